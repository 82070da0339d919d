-- Whether the transaction that locked or changed a row, its xmax, is under way, or has changed it since the snapshot.
--
-- Called by message_dequeue, into whose statement it is expanded, and which prepares it for each call, so it is short:
-- who passes over what others take needn't touch it. To try to lock a row that was changed since the snapshot would lock
-- what it has become, which is somebody else's. oldest and newest are the ages of the snapshot's xmin and xmax: an older
-- xmax that is still there was a mere lock, and none is older than any; a newer one may have done anything. Where several
-- have locked a row, xmax is no transaction, and this may be wrong while they do; a number that is far from those of
-- transactions says nothing.
-- Takes no lock.
CREATE FUNCTION row_is_held(place tid, xmax xid, oldest integer, newest integer, snapshot pg_snapshot) RETURNS boolean
LANGUAGE sql VOLATILE
RETURN CASE WHEN age(xmax) > oldest THEN false WHEN age(xmax) <= newest THEN age(xmax) > -1000000
    ELSE row_is_changed(place, xmax, snapshot) END;
