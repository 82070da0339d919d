-- Keeps the partitions of history, one a day in UTC: makes those of today and the next 7 days, drops old ones.
--
-- Called by scheduler_serve about once a day, by users as often as they like, and by the installation. Old is what
-- lies before the longest history_days of all queues. Those that have no row, or 0, count as 30: a queue is known by
-- its row, or by having been dequeued. Nothing is dropped in REPEATABLE READ and SERIALIZABLE, whose snapshot may be
-- older than a feed that hasn't read it.
-- Returns true when all is done; false when it is to be tried again, because somebody holds a lock: a report, a dump,
-- an open completion. It waits for none longer than 100 ms. Whatever else goes wrong is a warning and false, so that
-- no dequeue fails of it: without a partition, outcomes go to history_default.
-- Locks: those of history_add and history_drop, so none when there is nothing to do. Commit at once.
CREATE FUNCTION history_maintain() RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
SET lock_timeout = '100ms'
-- A dequeue's settings would have it read all of history_default by an index, should much be there.
SET enable_seqscan = on
SET enable_bitmapscan = on
AS $$
DECLARE
    v_today CONSTANT date := (clock() AT TIME ZONE 'UTC')::date;
    v_oldest CONSTANT date := v_today - (
        SELECT coalesce(max(coalesce(nullif(q.history_days, 0), 30)), 30)
        FROM (SELECT t.queue FROM rotation t UNION SELECT q.name FROM queue q) AS known (name)
        LEFT JOIN queue q ON q.name = known.name);
    v_done boolean := true;
BEGIN
    -- Each part by itself, so that one which has to wait doesn't undo the other.
    FOR part IN 1..2 LOOP
        BEGIN
            IF part = 1 THEN
                -- Today first: a completion has locked history, and needs history_default if today has no partition.
                FOR n IN 0..7 LOOP
                    PERFORM history_add(v_today + n, n = 0);
                END LOOP;
            ELSIF current_setting('transaction_isolation') IN ('read committed', 'read uncommitted') THEN
                v_done := history_drop(v_oldest) AND v_done;
            ELSE
                v_done := false;
            END IF;
        EXCEPTION
            WHEN lock_not_available OR deadlock_detected THEN
                v_done := false;
            WHEN OTHERS THEN
                RAISE WARNING 'history_maintain: %', SQLERRM;
                v_done := false;
        END;
    END LOOP;
    RETURN v_done;
END
$$;

REVOKE EXECUTE ON FUNCTION history_maintain FROM PUBLIC;

-- An installation begins with the days that it needs.
SELECT history_maintain();
