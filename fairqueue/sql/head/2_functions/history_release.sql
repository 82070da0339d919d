-- Drops the history of a day that is over, in UTC, if it is just what the caller has elsewhere: so many rows with this
-- checksum, as history_digest has it. Otherwise it raises, and all stays.
--
-- Called by archives. What another feed hasn't read stays. It waits for no lock longer than 100 ms. In READ COMMITTED
-- only: the rows are counted after they are locked.
-- Locks: the day's partition, against writers, while the rows are counted; then history, against everybody. A day
-- without a partition is deleted from history_default, which is locked against writers. A table that was detached from
-- history stays, as somebody keeps it.
CREATE FUNCTION history_release(day date, rows bigint, checksum numeric) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET lock_timeout = '100ms'
AS $$
DECLARE
    v_from CONSTANT timestamptz := day::timestamp AT TIME ZONE 'UTC';
    v_until CONSTANT timestamptz := (day + 1)::timestamp AT TIME ZONE 'UTC';
    v_name text := to_char(day, '"history_"YYYY_MM_DD');
    v_feed text;
    v_found record;
BEGIN
    IF day IS NULL OR rows IS NULL OR checksum IS NULL THEN
        RAISE invalid_parameter_value USING MESSAGE = 'day, rows and checksum must not be null';
    END IF;
    IF v_until > clock() THEN
        RAISE invalid_parameter_value USING MESSAGE = format('day must be over: %s is not', day);
    END IF;
    IF current_setting('transaction_isolation') NOT IN ('read committed', 'read uncommitted') THEN
        RAISE invalid_transaction_state USING MESSAGE = 'history_release needs READ COMMITTED';
    END IF;
    -- As long as it is held, no partition can be detached.
    LOCK TABLE ONLY history IN ACCESS SHARE MODE;
    IF NOT EXISTS (
        SELECT FROM pg_inherits i
        WHERE i.inhparent = 'history'::regclass
            AND i.inhrelid = to_regclass(format('%I.%I', current_schema(), v_name)))
    THEN
        v_name := 'history_default';
    END IF;
    -- With an open completion of that day this waits, as long as it may.
    EXECUTE format('LOCK TABLE %I.%I IN SHARE MODE', current_schema(), v_name);
    SELECT f.name INTO v_feed
    FROM feed f
    CROSS JOIN LATERAL (
        SELECT FROM history h
        WHERE (h.xid, h.message_id) >= (f.xid, f.message_id) AND h.finished_at >= v_from AND h.finished_at < v_until
        LIMIT 1) u
    LIMIT 1;
    IF FOUND THEN
        RAISE object_not_in_prerequisite_state USING
            MESSAGE = format('the feed %s has not read all of %s', v_feed, day);
    END IF;
    SELECT d.rows, d.checksum INTO v_found FROM history_digest(day) d;
    IF (v_found.rows, v_found.checksum) IS DISTINCT FROM (rows, checksum) THEN
        RAISE data_corrupted USING MESSAGE = format(
            '%s has %s rows with checksum %s, not %s with %s', day, v_found.rows, v_found.checksum, rows, checksum);
    END IF;
    INSERT INTO dropped (xid, message_id)
    SELECT h.xid, h.message_id FROM history h
    WHERE h.finished_at >= v_from AND h.finished_at < v_until
    ORDER BY h.xid DESC, h.message_id DESC
    LIMIT 1;
    IF v_name = 'history_default' THEN
        DELETE FROM history_default h WHERE h.finished_at >= v_from AND h.finished_at < v_until;
    ELSE
        EXECUTE format('DROP TABLE %I.%I', current_schema(), v_name);
    END IF;
END
$$;

REVOKE EXECUTE ON FUNCTION history_release FROM PUBLIC;
