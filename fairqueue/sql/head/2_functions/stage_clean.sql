-- Drops what loads have left: staging tables that were given up, those of runs that have made none since so long ago,
-- and the names of nameless jobs.
--
-- Called by stage_drop, by loaders when they have finished, and by operators as often as they like. Returns how many
-- tables it dropped: at most 500 in one call, as a transaction can hold only so many locks; call it until it returns 0.
-- Choose an age that no running load reaches; one whose tables are gone fails, and enters nothing. Jobs without a name
-- keep one of their own, or one a part, for as long, so that a task which runs twice enters its part once, and that they
-- can be told how many messages they have made.
-- Locks: these tables, against everybody, until the end of the transaction. A table that is in use is left for later.
CREATE FUNCTION stage_clean(older_than interval DEFAULT '1 day') RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET lock_timeout = '10ms'
AS $$
DECLARE
    v_stage stage;
    v_dropped integer := 0;
BEGIN
    IF older_than IS NULL OR older_than < interval '0' THEN
        RAISE invalid_parameter_value USING
            MESSAGE = format('older_than must not be negative, not %s', coalesce(older_than::text, 'null'));
    END IF;
    DELETE FROM load l
    WHERE l.ctid = ANY (ARRAY(
        SELECT o.ctid FROM load o WHERE o.name LIKE 'run/%' AND o.entered_at < clock() - older_than
        FOR UPDATE SKIP LOCKED));
    FOR v_stage IN
        SELECT s.* FROM stage s
        WHERE s.run = ''
            OR NOT EXISTS (SELECT FROM stage o WHERE o.run = s.run AND o.created_at > clock() - older_than)
        LIMIT 500 FOR UPDATE SKIP LOCKED
    LOOP
        BEGIN
            EXECUTE format('DROP TABLE IF EXISTS %I.%I', current_schema(), v_stage.name);
            DELETE FROM stage s WHERE s.name = v_stage.name;
            v_dropped := v_dropped + 1;
        EXCEPTION
            WHEN lock_not_available THEN
                NULL;
        END;
    END LOOP;
    RETURN v_dropped;
END
$$;

REVOKE EXECUTE ON FUNCTION stage_clean FROM PUBLIC;
