-- Where the next look for signals of a kind begins, and whom it looks for below that, once all that a snapshot sees of
-- them has been read.
--
-- Called by scheduler_fold, and by scheduler_serve where there was nothing to read; takes no lock. since is the horizon
-- so far, told the last transaction whose signals were read, if any, and most the end of what was read, if more is left.
--
-- Never beyond what the snapshot tells of: who began after it isn't on the list. The horizon goes no farther than to the
-- first one under way that began after all that have told something, so that only those are on the list that began
-- before, and what was read lies behind it. Who is still under way where the horizon stood before goes on the list, too,
-- as looks from the horizon on would walk over all that such a one writes. The caller is always among those under way:
-- it may go on to enqueue before it commits.
CREATE FUNCTION scheduler_under_way(
    snapshot pg_snapshot, since xid8, told xid8, most xid8, OUT horizon xid8, OUT open xid8[]
)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
BEGIN
    SELECT least(most, pg_snapshot_xmax(snapshot),
            (array_agg(u.xid ORDER BY u.xid) FILTER (WHERE u.xid > since AND (u.xid > told) IS NOT FALSE))[1]),
        array_agg(u.xid)
    INTO horizon, open
    FROM (SELECT pg_snapshot_xip(snapshot) AS xid UNION SELECT pg_current_xact_id()) u;
    open := ARRAY(SELECT x FROM unnest(open) AS x WHERE x < horizon);
END
$$;
