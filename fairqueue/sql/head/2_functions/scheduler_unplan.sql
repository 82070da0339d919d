-- Takes back what is left of the plan: the lanes stand again where their next planned messages were.
--
-- Called by scheduler_serve, within the turn, when what was planned is no longer what should come next, because a
-- message is gone, changed or held by somebody, and before lanes are derived anew; by scheduler_settle, when others were
-- taken past such a one; by scheduler_activate, when a message came before planned ones of its channel; by scheduler_fold
-- and scheduler_tidy, before they change what was planned by; and by queue_repair. Nothing is lost by it but the work:
-- each lane owes what it owed before, and what was taken of it.
-- Locks: the lanes that it changes, and the rows of plan that it deletes.
--
-- Where something was taken since the place of the rotation, returns where the last message would have started, had the
-- same work been done in the order of those planned ones that were taken or are still to be had. At least one lane stands
-- there, or beyond.
CREATE FUNCTION scheduler_unplan(queue text, OUT tag bigint, OUT since bigint)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_now CONSTANT bigint := unix_ms(clock());
    v_place bigint;
    v_has_drawn boolean;
BEGIN
    SELECT r.place, coalesce(pg_sequence_last_value(r.tickets) > r.ticket_base, false) INTO v_place, v_has_drawn
    FROM rotation r WHERE r.queue = v_queue ORDER BY r.era DESC LIMIT 1;

    WITH gone AS (
        DELETE FROM plan p
        WHERE p.queue = v_queue AND p.place > v_place - 32
    -- As it was before that: the function is stable.
    ), planned AS MATERIALIZED (
        SELECT p.channel, p.tag, p.since, p.place, p.left_id, p.left_at, p.is_taken FROM scheduler_planned(v_queue) p
    -- The steps are found by sorting: a join would be a loop. A message's step is up to where the next one of its channel
    -- starts; that of the last one, up to its lane.
    ), steps AS MATERIALIZED (
        SELECT e.*, lead(e.tag) OVER (PARTITION BY e.channel ORDER BY e.place) - e.tag AS step,
            min(e.tag) OVER lane AS first_tag, max(e.weight) OVER lane AS lane_weight
        FROM (
            SELECT p.*, NULL::tid AS row, NULL::double precision AS weight FROM planned p
            UNION ALL
            SELECT c.channel, l.tag, NULL, 9223372036854775807, NULL, NULL, NULL, l.row, l.weight
            FROM (SELECT DISTINCT p.channel FROM planned p) c
            CROSS JOIN LATERAL (
                SELECT l.ctid AS row, l.tag, l.weight FROM lane l
                WHERE l.queue = v_queue AND l.channel = c.channel
                ORDER BY l.tag DESC LIMIT 1) l) e
        WINDOW lane AS (PARTITION BY e.channel)
    ), moves AS MATERIALIZED (
        SELECT (array_agg(s.row) FILTER (WHERE s.row IS NOT NULL))[1] AS row,
            -- Where something is left, it stands where it stood, even if that is gone: there, it was ready.
            CASE WHEN bool_or(NOT s.is_taken) THEN v_now END AS ready_at,
            (min(s.first_tag) + coalesce(sum(s.step) FILTER (WHERE s.is_taken), 0))::bigint AS tag,
            min(s.left_at) AS head_at,
            (array_agg(s.left_id ORDER BY s.left_at, s.left_id) FILTER (WHERE s.left_id IS NOT NULL))[1] AS head_id
        FROM steps s
        GROUP BY s.channel
    ), moved AS (
        UPDATE lane l
        SET tag = v.tag, planned = -1, due = CASE WHEN v.ready_at IS NOT NULL THEN 0 ELSE l.due END,
            head_at = least(v.head_at, l.head_at, v.ready_at),
            head_id = CASE WHEN v.ready_at < least(v.head_at, l.head_at) THEN 0
                WHEN (v.head_at, v.head_id) < (l.head_at, l.head_id) THEN v.head_id ELSE l.head_id END
        FROM moves v
        WHERE l.ctid = v.row
    -- Without what is gone, what comes after it in its channel starts earlier.
    ), ordered AS (
        SELECT s.since, s.is_taken, s.step * s.lane_weight::numeric AS work,
            (s.first_tag - s.step
                + sum(s.step) OVER (PARTITION BY s.channel ORDER BY s.place ROWS UNBOUNDED PRECEDING))::bigint AS start
        FROM steps s
        WHERE v_has_drawn AND (s.is_taken OR s.left_at <= v_now)
    )
    SELECT o.start, o.since INTO tag, since
    FROM (
        SELECT o.start, o.since, sum(o.work) FILTER (WHERE o.is_taken) OVER () AS work_taken,
            sum(o.work) OVER (ORDER BY o.start, o.since ROWS UNBOUNDED PRECEDING) - o.work AS work_before
        FROM ordered o) o
    WHERE o.work_before < o.work_taken
    ORDER BY o.start DESC, o.since DESC LIMIT 1;
END
$$;
