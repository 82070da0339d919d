-- Plans on behind what is planned, before that is used up: as many messages as were served in a row.
--
-- Called by message_dequeue, which has a share in the turn and part 2 of the queue's key: while it plans, others take
-- what was planned before. All that it plans comes after that, so the order is the same as if it came later, and who
-- began before its commit needn't know. The share keeps lanes and rotation as they are; the key, that two plan the same.
-- Locks: the lanes that it changes, and the rotation of the queue, which nobody else writes.
CREATE FUNCTION scheduler_extend(queue text, now_ms bigint) RETURNS void
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_messages integer;
    v_due_floor bigint;
    r record;
BEGIN
    -- As it is now: somebody else may just have done it, or found that there is nothing to plan.
    SELECT t.* INTO r FROM rotation t WHERE t.queue = v_queue ORDER BY t.era DESC LIMIT 1;
    IF r.planned - r.place > r.ahead OR r.ahead < r.plan_at THEN
        RETURN;
    END IF;
    SELECT p.messages, least(p.due_floor, r.due_floor) INTO v_messages, v_due_floor
    FROM scheduler_plan(v_queue, r.vtime, r.vsince, now_ms, 2 * r.ahead - (r.planned - r.place)::integer, r.place,
        r.planned, true) p;
    -- As in scheduler_serve: where it came to nothing, it is not tried again at once.
    IF v_messages = 0 THEN
        r.ahead := least(r.ahead, plan_most() / 2);
        r.plan_at := 2 * r.ahead;
    END IF;
    UPDATE rotation t
    SET lane_tag = coalesce(l.tag, 9223372036854775807), lane_since = coalesce(l.since, 9223372036854775807),
        planned = r.planned + v_messages, due_floor = v_due_floor, ahead = r.ahead, plan_at = r.plan_at
    FROM (SELECT) AS one
    LEFT JOIN LATERAL (
        SELECT l.tag, l.since FROM lane l
        WHERE l.queue = v_queue AND l.due = 0 AND (l.tag, l.since) > (r.vtime, r.vsince)
        ORDER BY l.tag, l.since LIMIT 1) l ON true
    WHERE t.queue = v_queue AND t.era = r.era;
END
$$;
