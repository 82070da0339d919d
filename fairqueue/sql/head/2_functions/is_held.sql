-- Whether the transaction that has locked or changed a row, its xmax, is under way, or has done so since the snapshot.
--
-- Called by message_dequeue, into whose statement it is expanded: who passes over what others take needn't touch it. To
-- try to lock a row that was changed since the snapshot would lock what it has become, which is somebody else's. Where
-- several have locked a row this may say anything, but is no error. Takes no lock.
CREATE FUNCTION is_held(xmax xid, snapshot pg_snapshot) RETURNS boolean
LANGUAGE sql VOLATILE PARALLEL SAFE
RETURN CASE
    WHEN xmax = '0'::xid OR age(xmax) > age(pg_snapshot_xmin(snapshot)::xid) THEN false
    WHEN age(xmax) <= age(pg_snapshot_xmax(snapshot)::xid) THEN true
    ELSE coalesce(pg_xact_status(greatest(
        pg_snapshot_xmax(snapshot)::text::bigint + age(pg_snapshot_xmax(snapshot)::xid) - age(xmax), 0)::text::xid8)
        <> 'aborted', false) END;
