-- Gives a queue the tickets of a sequence that no other queue has, or takes them back.
--
-- Called by scheduler_serve and queue_repair, within the turn of the queue. Returns the sequence and the last ticket that
-- was drawn, or null where all are given out, or somebody else is getting those that are left, or they are taken back.
-- Locks: an advisory lock for the number of the sequence, until the end of the transaction, and the row of tickets. It
-- waits for nobody.
CREATE FUNCTION scheduler_tickets(queue text, wanted boolean, OUT tickets regclass, OUT ticket_base bigint)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_number integer;
BEGIN
    DELETE FROM tickets k WHERE k.queue = v_queue;
    IF NOT wanted THEN
        RETURN;
    END IF;
    FOR v_number IN
        SELECT n.number FROM generate_series(1, 64) AS n (number)
        WHERE NOT EXISTS (SELECT FROM tickets k WHERE k.number = n.number)
        ORDER BY n.number
    LOOP
        IF pg_try_advisory_xact_lock(queue_key('tickets', 100 + v_number)) THEN
            -- Unless another queue has got it since that look. Who has not committed that has the lock.
            INSERT INTO tickets (number, queue) VALUES (v_number, v_queue) ON CONFLICT DO NOTHING
            RETURNING to_regclass('tickets_' || v_number) INTO tickets;
            EXIT WHEN tickets IS NOT NULL;
        END IF;
    END LOOP;
    ticket_base := nextval(tickets);
END
$$;
