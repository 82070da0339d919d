-- Waits for the caller's turn to dequeue from a queue and keeps it until the end of the transaction; or, shared, for a
-- part in a turn that many have at the same time.
--
-- Called by scheduler_serve and queue_repair, and shared by message_dequeue. True: the turn is the caller's, and
-- whether it had to wait is to be read in fairqueue_turn.waited. False: somebody else has it and waiting could deadlock,
-- because this transaction holds the turn of another queue, or wrote something before it came to dequeue, and so may
-- hold other locks.
-- Locks: one transaction-level advisory lock a queue. Besides this, message_dequeue takes it.
--
-- Raises lock_not_available after 10 s: a transaction that dequeues has to commit at once.
CREATE FUNCTION scheduler_turn(
    queue text, shared boolean DEFAULT false, wrote boolean DEFAULT pg_current_xact_id_if_assigned() IS NOT NULL
) RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_key CONSTANT bigint := queue_key(queue);
    v_held text;
BEGIN
    IF (shared AND pg_try_advisory_xact_lock_shared(v_key)) OR (NOT shared AND pg_try_advisory_xact_lock(v_key)) THEN
        v_held := set_config('fairqueue_turn.held', 'yes', true);  -- assigned, as PERFORM would run a query for it
        RETURN true;
    ELSIF wrote OR current_setting('fairqueue_turn.held', true) = 'yes' THEN
        RETURN false;
    END IF;
    DECLARE
        v_timeout CONSTANT text := current_setting('lock_timeout');
    BEGIN
        PERFORM set_config('lock_timeout', '10s', true);
        IF shared THEN
            PERFORM pg_advisory_xact_lock_shared(v_key);
        ELSE
            PERFORM pg_advisory_xact_lock(v_key);
        END IF;
        PERFORM set_config('lock_timeout', v_timeout, true);
        PERFORM set_config('fairqueue_turn.held', 'yes', true);
        PERFORM set_config('fairqueue_turn.waited', 'yes', true);
        RETURN true;
    EXCEPTION WHEN lock_not_available THEN
        RAISE lock_not_available USING
            MESSAGE = format('queue %L has been held by another dequeue for 10 s', queue),
            DETAIL = format('Held by %s.', (
                SELECT string_agg(coalesce('the server process with pid ' || l.pid,
                    'a prepared transaction (pg_prepared_xacts)'), ', ')
                FROM pg_locks l
                WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = 1
                    AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
                    AND (l.classid::bigint << 32) | l.objid::bigint = v_key)),
            HINT = 'Commit the transaction of a dequeue at once: the lease, not the transaction, keeps the messages.';
    END;
END
$$;
