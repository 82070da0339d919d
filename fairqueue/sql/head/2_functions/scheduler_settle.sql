-- Moves the virtual time on to the last message that was taken from the plan without the turn.
--
-- Called by scheduler_serve and queue_repair, within the turn, which nobody who takes from the plan has at the same
-- time: all that was taken is committed, or rolled back. Where one comes before it that was drawn and is left, because
-- whoever had drawn it rolled back, or that wasn't there to be taken, the plan is taken back: it was made as if that one
-- came first. What was drawn last, and is left, is still to come.
-- A channel that becomes active then starts where the last message would have, had the same work been done in the order
-- of what was planned and is there.
-- Locks: the rotation of the queue, and the rows of missed that it deletes, which nobody else writes; and as
-- scheduler_unplan.
--
-- Returns the rotation as it is now.
CREATE FUNCTION scheduler_settle(queue text) RETURNS rotation
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_ticket bigint;
    v_drawn bigint;
    v_ids bigint[];
    v_last bigint;
    v_gap bigint;
    v_tag bigint;
    v_since bigint;
    v_left_tag bigint;
    v_left_since bigint;
    r rotation;
BEGIN
    SELECT t.* INTO r FROM rotation t WHERE t.queue = v_queue ORDER BY t.era DESC LIMIT 1;
    -- None was drawn of it: rotation was copied here without its sequences, as by logical replication.
    v_ticket := coalesce(pg_sequence_last_value(r.tickets), nextval(r.tickets), r.ticket_base);
    v_drawn := r.place + v_ticket - r.ticket_base;
    -- Nobody takes what comes after a lane.
    SELECT array_agg(e.id), max(e.place) INTO v_ids, v_last
    FROM plan p
    CROSS JOIN LATERAL (
        SELECT e.id, p.place + e.nth - 1 AS place
        FROM unnest(p.ids, p.tags, p.sinces) WITH ORDINALITY AS e (id, tag, since, nth)
        WHERE (e.tag, e.since) < (r.lane_tag, r.lane_since)) e
    WHERE p.queue = v_queue AND p.place > r.place - 32 AND p.place <= v_drawn
        AND e.place > r.place AND e.place <= v_drawn;
    -- All at once, as hardly ever one is left; and by the id alone, so that no index but that one can be used for it.
    IF EXISTS (SELECT FROM missed k WHERE k.queue = v_queue AND k.turn = r.turn) OR EXISTS (
        SELECT FROM (SELECT m.* FROM message m WHERE m.id = ANY (v_ids) OFFSET 0) m
        WHERE m.queue = v_queue AND m.leased_until IS NULL)
    THEN
        SELECT max(p.place) FILTER (WHERE p.is_taken), min(p.place) FILTER (WHERE NOT p.is_taken) INTO v_last, v_gap
        FROM scheduler_planned(v_queue, v_last) p;
    END IF;
    IF v_last IS NOT NULL THEN
        IF v_gap < v_last THEN
            SELECT u.tag, u.since INTO v_tag, v_since FROM scheduler_unplan(v_queue) u;
            r.place := r.planned;
            r.ahead := 0;
            r.plan_at := plan_after();
            -- Lanes of which something was passed over may be behind that; who arrives isn't to be.
            r.arrival_tag := greatest(r.arrival_tag, v_tag);
            SELECT l.tag, l.since - 1 INTO v_left_tag, v_left_since
            FROM lane l
            WHERE l.queue = v_queue AND l.due = 0 AND (l.tag, l.since) > (r.vtime, r.vsince)
                AND (l.tag, l.since) <= (v_tag, v_since)
            ORDER BY l.tag, l.since LIMIT 1;
        ELSE
            SELECT p.tags[v_last - p.place + 1], p.sinces[v_last - p.place + 1] INTO v_tag, v_since
            FROM plan p
            WHERE p.queue = v_queue AND p.place <= v_last AND p.place > v_last - 32
            ORDER BY p.place DESC LIMIT 1;
            r.ahead := least(r.ahead + (v_last - r.place)::integer, plan_most());
            r.place := v_last;
        END IF;
        -- Unless somebody has damaged the plan, there is a last one.
        r.vtime := coalesce(v_left_tag, v_tag, r.vtime);
        r.vsince := coalesce(v_left_since, v_since, r.vsince);
    END IF;
    r.ticket_base := v_ticket;
    DELETE FROM missed k WHERE k.queue = v_queue AND k.turn = r.turn;
    UPDATE rotation t
    SET vtime = r.vtime, vsince = r.vsince, arrival_tag = r.arrival_tag, place = r.place, planned = r.planned,
        ahead = r.ahead, plan_at = r.plan_at, lane_tag = NULL, lane_since = NULL, ticket_base = r.ticket_base
    WHERE t.queue = v_queue AND t.era = r.era;
    RETURN r;
END
$$;
