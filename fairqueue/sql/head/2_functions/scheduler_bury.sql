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
DECLARE
    v_error CONSTANT text := 'the lease of the last attempt ran out';
BEGIN
    -- Once to see it fail, and undone: what is deferred, also of tables to which a foreign key leads on, would undo the
    -- whole dequeue at the commit, and each one after it.
    BEGIN
        PERFORM message_finish(ids, 'dead', v_error);
        SET CONSTRAINTS ALL IMMEDIATE;
        RAISE SQLSTATE 'FQ000';
    EXCEPTION WHEN SQLSTATE 'FQ000' THEN
        NULL;
    END;
    PERFORM message_finish(ids, 'dead', v_error);
    RETURN NULL;
EXCEPTION WHEN others THEN
    RETURN SQLERRM;
END
$$;
