-- What is planned of a queue behind the place of its rotation, up to the place last (null: all), and what became of it.
--
-- Called by scheduler_settle, scheduler_unplan and queue_check; takes no lock. Left is a message that is ready and was
-- leased no more often than when it was planned: what was taken and has failed since is ready again, but isn't left. It
-- is found by its id, not by its row, which may be another one: the table was rewritten, or restored. Taken is, of what
-- dequeues without the turn had tickets for, what is neither left nor was missed by them. Stable: it sees what the
-- statement sees that calls it, though that deletes what is planned.
CREATE FUNCTION scheduler_planned(queue text, last bigint DEFAULT NULL)
RETURNS TABLE (
    place bigint, channel text, tag bigint, since bigint, id bigint, left_id bigint, left_at bigint, is_taken boolean
)
LANGUAGE sql STABLE
SET search_path FROM CURRENT
AS $$
    SELECT e.place, e.channel, e.tag, e.since, e.id, m.id, m.dequeue_at,
        -- Nobody takes what comes after a lane.
        m.id IS NULL AND e.place <= r.drawn
            AND coalesce((e.tag, e.since) < (r.lane_tag, r.lane_since), false)
            -- OFFSET: else all of it might be read and hashed, dead entries among it.
            AND NOT EXISTS (
                SELECT FROM missed k WHERE k.queue = r.queue AND k.turn = r.turn AND k.place = e.place OFFSET 0)
    FROM (
        SELECT r.*, r.place + coalesce(pg_sequence_last_value(r.tickets) - r.ticket_base, 0) AS drawn
        FROM rotation r WHERE r.queue = $1 ORDER BY r.era DESC LIMIT 1) r
    CROSS JOIN LATERAL (
        SELECT e.*, p.place + e.nth - 1 AS place
        FROM plan p
        CROSS JOIN LATERAL unnest(p.ids, p.attempts, p.tags, p.sinces, p.channels) WITH ORDINALITY
            AS e (id, attempt, tag, since, channel, nth)
        -- Not that of r: there is nothing to join by but a loop, whatever the caller's settings.
        WHERE p.queue = $1 AND p.place > r.place - 32 AND p.place <= coalesce($2, 9223372036854775807)) e
    -- By its id alone, so that no index but that one can be used for it.
    LEFT JOIN LATERAL (SELECT m.* FROM message m WHERE m.id = e.id OFFSET 0) m
        ON m.queue = $1 AND m.channel = e.channel AND m.leased_until IS NULL AND m.attempt <= e.attempt
    WHERE e.place > r.place AND e.place <= coalesce($2, 9223372036854775807)
$$;
