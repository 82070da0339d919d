-- Whether a transaction that may have ended since the snapshot has changed a row or will have.
--
-- Called by row_is_held, for one that began before the snapshot was taken; takes no lock. A single expression, which
-- costs little more than if it stood there itself.
CREATE FUNCTION row_is_changed(place tid, xmax xid, snapshot pg_snapshot) RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN CASE pg_xact_status((
            pg_snapshot_xmax(snapshot)::text::bigint + age(pg_snapshot_xmax(snapshot)::xid) - age(xmax))::text::xid8)
        WHEN 'in progress' THEN true
        WHEN 'committed' THEN NOT is_there(place)
        ELSE false END;
END
$$;
