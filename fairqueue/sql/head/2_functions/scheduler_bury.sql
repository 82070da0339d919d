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
    r record;
BEGIN
    PERFORM message_finish(ids, 'dead', 'the lease of the last attempt ran out');
    -- Deferred ones now, too: at the commit they would undo the whole dequeue, and each one after it.
    FOR r IN
        SELECT format('%I.%I', n.nspname, c.conname) AS name, c.condeferred
        FROM pg_constraint c JOIN pg_namespace n ON n.oid = c.connamespace
        WHERE c.contype = 'f' AND c.confrelid = 'message'::regclass
            AND has_schema_privilege(n.oid, 'USAGE')
    LOOP
        EXECUTE format('SET CONSTRAINTS %s IMMEDIATE', r.name);
        IF r.condeferred THEN
            EXECUTE format('SET CONSTRAINTS %s DEFERRED', r.name);
        END IF;
    END LOOP;
    RETURN NULL;
EXCEPTION WHEN others THEN
    RETURN SQLERRM;
END
$$;
