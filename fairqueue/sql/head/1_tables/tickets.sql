-- Which queue has the tickets of which sequence, of tickets_1 to tickets_64.
--
-- Written by scheduler_tickets, within the turn of the queue that gets or returns them. A number of a sequence is given
-- out once, whatever becomes of the transaction, so those who draw one (message_dequeue) neither wait for each other
-- nor get the same. Queues that have a max_concurrency, and with more queues that have a plan than sequences the
-- others, are served in their turns alone.
CREATE TABLE tickets (
    number  integer          NOT NULL,
    queue   text COLLATE "C" NOT NULL,
    CONSTRAINT tickets_pkey PRIMARY KEY (number)
) WITH (vacuum_truncate = off, toast.vacuum_truncate = off);

DO $$
BEGIN
    FOR n IN 1..64 LOOP
        EXECUTE format('CREATE SEQUENCE %I', 'tickets_' || n);
    END LOOP;
END
$$;
