-- Whether a transaction that may have ended since the snapshot, or began after it, has changed a row or will have.
--
-- Called by row_is_held; takes no lock. A single expression, which costs little more than if it stood there itself. A
-- number that is far from those of transactions says nothing.
CREATE FUNCTION row_is_changed(place tid, xmax xid, snapshot pg_snapshot) RETURNS boolean
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    RETURN CASE WHEN age(xmax) <= age(pg_snapshot_xmax(snapshot)::xid) THEN age(xmax) > -1000000
        ELSE CASE pg_xact_status((
                pg_snapshot_xmax(snapshot)::text::bigint + age(pg_snapshot_xmax(snapshot)::xid) - age(xmax))::text::xid8)
            WHEN 'in progress' THEN true
            WHEN 'committed' THEN NOT is_there(place)
            ELSE false END
        END;
END
$$;
