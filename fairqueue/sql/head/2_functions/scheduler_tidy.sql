-- Removes lanes that have been idle so long that forgetting them changes nothing; and keeps tags small.
--
-- Called by scheduler_serve now and then, within the turn. An idle lane behind the virtual time would start at the
-- virtual time anyway; one whose limits still count something is looked at again later. Tags start again from zero
-- long before they reach the end of bigint.
-- Locks: the lanes it removes or rewrites, and the rotation of the queue.
--
-- Returns the virtual time and the tag below which no idle lane is left.
CREATE FUNCTION scheduler_tidy(queue text, now_ms bigint, INOUT vtime bigint, INOUT idle_floor bigint)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_vtime CONSTANT bigint := $3;
    v_floor CONSTANT bigint := $4;
    -- A lane that is used often is kept: only those 64 messages (of cost and weight 1) behind are removed.
    v_keep CONSTANT bigint := $3 - 64 * lane_step(1, 1);
    v_last bigint;
    v_all boolean;
BEGIN
    IF v_keep > v_floor THEN
        WITH old AS MATERIALIZED (
            SELECT l.* FROM (
                SELECT l.*, count(*) FILTER (WHERE NOT l.is_done) OVER (ORDER BY l.tag ROWS UNBOUNDED PRECEDING) AS kept
                FROM (
                    -- One whose rate is gone may get it back: it is known for a day when it was last released.
                    SELECT l.ctid AS row, l.tag, l.running = 0
                        AND l.released_at + coalesce(nullif(l.release_interval, 0), 86400000) <= now_ms AS is_done
                    FROM lane l
                    WHERE l.queue = v_queue AND l.due IS NULL AND l.tag >= v_floor AND l.tag < v_keep
                    ORDER BY l.tag
                    LIMIT 10000) l) l
            -- Few at a time that have to be rewritten, as they come round again.
            WHERE l.kept <= 256
        ), removed AS (
            DELETE FROM lane l USING old o WHERE l.ctid = o.row AND o.is_done
        ), kept AS (
            UPDATE lane l SET tag = v_vtime FROM old o WHERE l.ctid = o.row AND NOT o.is_done
        )
        SELECT count(*) < 10000 AND count(*) FILTER (WHERE NOT o.is_done) < 256, max(o.tag) INTO v_all, v_last FROM old o;
        idle_floor := CASE WHEN v_all THEN v_keep ELSE v_last END;
    END IF;
    IF vtime > 1000000000000000000 THEN
        PERFORM scheduler_unplan(v_queue);
        UPDATE lane l SET tag = greatest(l.tag - v_vtime, 0), planned = -1 WHERE l.queue = v_queue;
        UPDATE rotation t SET arrival_tag = greatest(t.arrival_tag - v_vtime, 0) WHERE t.queue = v_queue;
        vtime := 0;
        idle_floor := -1;
    END IF;
END
$$;
