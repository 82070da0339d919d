-- Makes dead letters of messages whose last lease ran out; of all of them, or, where one can't be, of none.
--
-- Called by scheduler_reclaim, which has locked them. Returns null, or why it can't be done: a foreign key of the
-- application's may forbid it, or make it wait. No query of the queue's may fail by that, nor wait for long.
-- Locks: as message_finish.
CREATE FUNCTION scheduler_bury(ids bigint[]) RETURNS text
LANGUAGE plpgsql
SET search_path FROM CURRENT
SET lock_timeout = '100ms'
AS $$
BEGIN
    PERFORM message_finish(ids, 'dead', 'the lease of the last attempt ran out');
    RETURN NULL;
EXCEPTION WHEN others THEN
    RETURN SQLERRM;
END
$$;
