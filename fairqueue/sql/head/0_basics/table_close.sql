-- Takes from all but its owner what they may do with a table that was just made.
--
-- Called by history_add and stage_create. Of the owner's ALTER DEFAULT PRIVILEGES, which are meant for the application's
-- tables: by them whoever may use the schema could read what is here, and change it.
-- Locks: takes no lock that anybody waits for, as nobody else sees the table yet.
CREATE FUNCTION table_close(relation regclass) RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
DECLARE
    v_role text;
BEGIN
    FOR v_role IN
        SELECT DISTINCT CASE WHEN a.grantee = 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END
        FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) a
        WHERE c.oid = relation AND a.grantee <> c.relowner
    LOOP
        EXECUTE format('REVOKE ALL ON TABLE %s FROM %s', relation, v_role);
    END LOOP;
END
$$;

REVOKE EXECUTE ON FUNCTION table_close FROM PUBLIC;
