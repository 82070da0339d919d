-- Puts messages whose lease ran out back into their own channels.
--
-- Called by scheduler_serve, which holds the turn, when a lease may have ended. The attempt stays counted: a message
-- that has no more of them becomes a dead letter. After its first failure it has its old place; after others it waits
-- as one that failed does, so that a message which kills its worker gets away from those that were leased with it. So
-- does one that should be a dead letter, but can't be one. The trigger message_moved signals the channels, so that each
-- waits for its place in the rotation like any other.
-- Locks: the rows it returns to ready or takes out, and the rotation of the queue, which nobody else writes. Rows that
-- somebody else holds are left for a later call: a completion may be on its way in a long transaction, and the fence
-- decides afterwards. The longer one has been held, the later that call is, by a sixteenth of that time, 10 minutes at
-- most.
--
-- Returns when the next lease ends, or is to be looked at again; the first one before that which ran out while somebody
-- held it; and whether leases that ran out may be left.
CREATE FUNCTION scheduler_reclaim(
    queue text, clock timestamptz, INOUT lease_floor timestamptz, max_messages integer,
    OUT held_from timestamptz, OUT more boolean
)
LANGUAGE plpgsql
SET search_path FROM CURRENT
AS $$
#variable_conflict use_column
DECLARE
    v_queue CONSTANT text := $1;
    v_from timestamptz := $3;
    v_expired integer;
    v_dead bigint[];
    v_back_at bigint[];
    v_id bigint;
    v_dequeue_at bigint;
    v_error text;
    v_end timestamptz;
    v_again boolean;
    v_left timestamptz;
    q queue;
    r record;
BEGIN
    SELECT q.* INTO q FROM queue q WHERE q.name = v_queue;
    SELECT t.era, t.held_from, t.held_since, t.held_at INTO r
    FROM rotation t WHERE t.queue = v_queue ORDER BY t.era DESC LIMIT 1;
    v_again := r.held_at <= clock;
    IF v_again THEN
        v_from := least(v_from, r.held_from);
        r.held_from := 'infinity';
        r.held_at := 'infinity';
    END IF;
    WITH locked AS MATERIALIZED (
        SELECT m.ctid AS row, m.id, m.dequeue_at, m.backoff, m.attempt::bigint - m.forgiven AS failures,
            m.attempt::bigint - m.forgiven >= coalesce(m.max_attempts, q.max_attempts, 20) AS is_dead
        FROM message m
        WHERE m.queue = v_queue AND m.leased_until >= v_from AND m.leased_until <= clock
        ORDER BY m.leased_until
        LIMIT max_messages
        FOR UPDATE SKIP LOCKED
    ), delayed AS MATERIALIZED (
        SELECT l.*, CASE WHEN l.failures < 2 AND NOT l.is_dead THEN 0
            ELSE retry_delay(l.failures, l.backoff, q.backoff, q.max_backoff) END AS delay
        FROM locked l
    ), expired AS MATERIALIZED (
        SELECT d.row, d.id, d.is_dead, CASE WHEN d.delay = 0 THEN d.dequeue_at
            ELSE unix_ms(clock + make_interval(secs => d.delay)) END AS back_at
        FROM delayed d
    ), back AS (
        UPDATE message m
        SET leased_until = NULL, counted = NULL, error = format('the lease of attempt %s ran out', m.attempt),
            dequeue_at = e.back_at
        FROM expired e
        WHERE m.ctid = e.row AND NOT e.is_dead
    )
    SELECT count(*), array_agg(e.id) FILTER (WHERE e.is_dead), array_agg(e.back_at) FILTER (WHERE e.is_dead)
    INTO v_expired, v_dead, v_back_at
    FROM expired e;

    -- One that can't be a dead letter must not keep the others from it; nor, where it waits, the queue for long. It is
    -- put back, and tried again when its next lease has run out.
    IF v_dead IS NOT NULL AND scheduler_bury(v_dead) IS NOT NULL THEN
        v_end := clock_timestamp() + interval '1 second';
        FOR v_id, v_dequeue_at IN SELECT b.id, b.back_at FROM unnest(v_dead, v_back_at) AS b (id, back_at) LOOP
            EXIT WHEN clock_timestamp() > v_end;
            v_error := scheduler_bury(ARRAY[v_id]);
            UPDATE message m
            SET leased_until = NULL, counted = NULL, dequeue_at = v_dequeue_at,
                error = format('the lease of attempt %s ran out; no dead letter: %s', m.attempt, v_error)
            WHERE v_error IS NOT NULL AND m.id = v_id;
        END LOOP;
    END IF;
    more := v_expired = max_messages AND (v_end IS NULL OR clock_timestamp() <= v_end);
    v_left := (
        SELECT m.leased_until FROM message m
        WHERE m.queue = v_queue AND m.leased_until >= v_from
        ORDER BY m.leased_until LIMIT 1);
    IF more THEN
        lease_floor := least(v_left, r.held_at);
        held_from := r.held_from;
        RETURN;
    ELSIF v_left <= clock THEN
        r.held_from := least(r.held_from, v_left);
        r.held_since := greatest(least(r.held_since, clock), r.held_from);
        r.held_at := least(r.held_at, clock
            + least(greatest(interval '10 ms', (clock - r.held_since) / 16), interval '10 minutes'));
        v_left := (
            SELECT m.leased_until FROM message m
            WHERE m.queue = v_queue AND m.leased_until > clock
            ORDER BY m.leased_until LIMIT 1);
    ELSIF v_again THEN
        r.held_since := 'infinity';
    END IF;
    UPDATE rotation t
    SET held_from = r.held_from, held_since = r.held_since, held_at = r.held_at
    WHERE t.queue = v_queue AND t.era = r.era
        AND (t.held_from, t.held_since, t.held_at) <> (r.held_from, r.held_since, r.held_at);
    lease_floor := least(v_left, r.held_at);
    held_from := r.held_from;
END
$$;
