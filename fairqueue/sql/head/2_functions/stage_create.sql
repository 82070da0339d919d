-- Makes a staging table for one part of a load, returns its name, and lets the caller COPY into it.
--
-- Called by loaders (in Python by fairqueue.spark.engine). run is what all parts of one attempt to load something have
-- in common: 32 hexadecimal digits. No two calls get the same table, so attempts at the same part don't meet. It is
-- unlogged: after a crash it is empty, which load_enter notices.
-- Locks: none that anybody waits for.
CREATE FUNCTION stage_create(run text, part integer) RETURNS text
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
DECLARE
    v_name CONSTANT text := format('stage_%s_%s_%s', run, part, substr(md5(random()::text || clock_timestamp()), 1, 8));
    -- Who calls: this function runs as its owner, and what SET ROLE chose is not the session_user.
    v_caller CONSTANT text := coalesce(nullif(current_setting('role'), 'none'), session_user);
BEGIN
    IF run IS NULL OR run !~ '^[0-9a-f]{32}$' OR part IS NULL OR part < 0 THEN
        RAISE invalid_parameter_value USING
            MESSAGE = format('run must be 32 hexadecimal digits and part not negative, not %L and %s', run, part);
    END IF;
    EXECUTE format('CREATE UNLOGGED TABLE %I (
        queue text NOT NULL, channel text NOT NULL, key text, payload jsonb, body bytea, dequeue_at bigint,
        delay double precision, cost double precision, max_attempts integer, backoff double precision)
        WITH (autovacuum_enabled = off)', v_name);
    PERFORM table_close(format('%I', v_name)::regclass);
    EXECUTE format('GRANT INSERT ON %I TO %I', v_name, v_caller);
    INSERT INTO stage (name, run) VALUES (v_name, $1);
    RETURN v_name;
END
$$;

REVOKE EXECUTE ON FUNCTION stage_create FROM PUBLIC;
