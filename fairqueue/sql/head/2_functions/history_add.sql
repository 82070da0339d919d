-- Makes the partition of history for one day in UTC, if it is missing, with what history_default has of that day.
--
-- Called by history_maintain. A table of its own that is then attached: unlike CREATE TABLE ... PARTITION OF, this lets
-- completions to other partitions go on. A day of which history_default has more than 10,000 rows stays there, as
-- moving them would take long.
-- Locks: history, against another call; for a day that has begun also against completions, whose rows may just be on
-- their way to history_default; and history_default, against everybody. All until the end of the transaction.
--
-- Who may read history may read it by its partitions, as the pipeline does, and nobody else. They belong to the owner of
-- the queue, who drops them in time, whoever calls this.
CREATE FUNCTION history_add(day date, begun boolean) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
DECLARE
    v_name CONSTANT text := to_char(day, '"history_"YYYY_MM_DD');
    v_path CONSTANT text := format('%I.%I', current_schema(), v_name);
    v_from CONSTANT text := to_char(day, 'YYYY-MM-DD"T00:00:00Z"');
    v_to CONSTANT text := to_char(day + 1, 'YYYY-MM-DD"T00:00:00Z"');
    v_grant text;
BEGIN
    IF to_regclass(v_path) IS NOT NULL THEN
        RETURN;
    END IF;
    IF begun THEN
        LOCK TABLE ONLY history IN SHARE ROW EXCLUSIVE MODE;
    ELSE
        LOCK TABLE ONLY history IN SHARE UPDATE EXCLUSIVE MODE;
    END IF;
    LOCK TABLE history_default IN ACCESS EXCLUSIVE MODE;
    IF to_regclass(v_path) IS NOT NULL THEN
        RETURN;  -- somebody else has made it meanwhile
    END IF;
    IF (SELECT count(*) > 10000 FROM (
        SELECT FROM history_default h
        WHERE h.finished_at >= v_from::timestamptz AND h.finished_at < v_to::timestamptz
        LIMIT 10001) AS few)
    THEN
        RETURN;
    END IF;
    EXECUTE format('CREATE TABLE %s (LIKE history INCLUDING ALL)'
        ' WITH (vacuum_truncate = off, toast.vacuum_truncate = off)', v_path);
    PERFORM table_close(v_path::regclass);
    FOR v_grant IN
        SELECT format('GRANT %s ON TABLE %s TO %s', a.privilege_type, v_path,
            CASE WHEN a.grantee = 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END)
        FROM pg_class c CROSS JOIN aclexplode(c.relacl) a
        WHERE c.oid = 'history'::regclass AND a.grantee <> c.relowner
    LOOP
        EXECUTE v_grant;
    END LOOP;
    EXECUTE format('WITH moved AS (DELETE FROM history_default WHERE finished_at >= %L AND finished_at < %L RETURNING *)'
        ' INSERT INTO %s SELECT * FROM moved', v_from, v_to, v_path);
    EXECUTE format('ALTER TABLE history ATTACH PARTITION %s FOR VALUES FROM (%L) TO (%L)', v_path, v_from, v_to);
END
$$;

REVOKE EXECUTE ON FUNCTION history_add FROM PUBLIC;
