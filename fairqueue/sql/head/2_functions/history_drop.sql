-- Drops the partitions of history for days before oldest, in UTC.
--
-- Called by history_maintain. Of what lies in history_default it deletes at most 10,000 rows, and returns whether that
-- was all.
-- Locks: history, against everybody, where there is a partition to drop, until the end of the transaction.
CREATE FUNCTION history_drop(oldest date) RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_name text;
    v_rows integer;
BEGIN
    FOR v_name IN
        SELECT c.relname
        FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'history'::regclass AND c.relname ~ '^history_\d{4}_\d\d_\d\d$'
            AND c.relname < to_char(oldest, '"history_"YYYY_MM_DD') COLLATE "C"
    LOOP
        EXECUTE format('DROP TABLE IF EXISTS %I.%I', current_schema(), v_name);
    END LOOP;
    DELETE FROM history_default h
    WHERE h.ctid = ANY (ARRAY(
        SELECT o.ctid FROM history_default o
        WHERE o.finished_at < oldest::timestamp AT TIME ZONE 'UTC'
        LIMIT 10000));
    GET DIAGNOSTICS v_rows = ROW_COUNT;
    RETURN v_rows < 10000;
END
$$;

REVOKE EXECUTE ON FUNCTION history_drop FROM PUBLIC;
