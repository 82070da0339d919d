-- Drops the partitions of history for days before oldest, in UTC.
--
-- Called by history_maintain. What a feed hasn't read stays, and with it its whole day; one that can't be dropped, as an
-- object of somebody's depends on it, is a warning. At most 50 in one call, as a transaction can hold only so many locks,
-- and of what lies in history_default at most 10,000 rows. Returns whether that was all.
-- Locks: history, against everybody, where there is a partition to drop, until the end of the transaction.
CREATE FUNCTION history_drop(oldest date) RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_name text;
    v_look text;
    v_unread boolean;
    v_tries integer := 0;
    v_done boolean := true;
    v_rows integer;
BEGIN
    FOR v_name IN
        SELECT c.relname
        FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
        WHERE i.inhparent = 'history'::regclass AND c.relname ~ '^history_\d{4}_\d\d_\d\d$'
            AND c.relname < to_char(oldest, '"history_"YYYY_MM_DD') COLLATE "C"
        ORDER BY c.relname
    LOOP
        v_look := format('SELECT EXISTS (
            SELECT FROM feed f
            CROSS JOIN LATERAL (SELECT FROM %I h WHERE (h.xid, h.message_id) >= (f.xid, f.message_id) LIMIT 1) u)',
            v_name);
        EXECUTE v_look INTO v_unread;
        CONTINUE WHEN v_unread;
        v_tries := v_tries + 1;
        IF v_tries > 50 THEN
            RETURN false;
        END IF;
        BEGIN
            -- Once nobody is writing outcomes, or detaching what they keep: what they did meanwhile is seen now.
            LOCK TABLE ONLY history IN ACCESS EXCLUSIVE MODE;
            CONTINUE WHEN NOT EXISTS (
                SELECT FROM pg_inherits i
                WHERE i.inhparent = 'history'::regclass
                    AND i.inhrelid = to_regclass(format('%I.%I', current_schema(), v_name)));
            EXECUTE v_look INTO v_unread;
            CONTINUE WHEN v_unread;
            EXECUTE format('INSERT INTO dropped (xid, message_id) SELECT h.xid, h.message_id FROM %I h'
                ' ORDER BY h.xid DESC, h.message_id DESC LIMIT 1', v_name);
            EXECUTE format('DROP TABLE %I.%I', current_schema(), v_name);
        EXCEPTION
            WHEN lock_not_available OR deadlock_detected THEN
                RETURN false;  -- not to wait for the next one as well
            WHEN OTHERS THEN
                RAISE WARNING 'history_maintain: %', SQLERRM;
                v_done := false;
        END;
    END LOOP;
    WITH gone AS (
        DELETE FROM history_default h
        WHERE h.ctid = ANY (ARRAY(
            SELECT o.ctid FROM history_default o
            WHERE o.finished_at < oldest::timestamp AT TIME ZONE 'UTC'
                AND NOT EXISTS (SELECT FROM feed f WHERE (o.xid, o.message_id) >= (f.xid, f.message_id))
            LIMIT 10000))
        RETURNING h.xid, h.message_id
    ), noted AS (
        INSERT INTO dropped (xid, message_id)
        SELECT g.xid, g.message_id FROM gone g ORDER BY g.xid DESC, g.message_id DESC LIMIT 1
    )
    SELECT count(*) INTO v_rows FROM gone;
    RETURN v_done AND v_rows < 10000;
END
$$;

REVOKE EXECUTE ON FUNCTION history_drop FROM PUBLIC;
