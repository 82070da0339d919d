-- Writes the order of some messages of a queue to plan, behind the place planned; returns how many they are.
--
-- Called by scheduler_plan and scheduler_plan_heads, within the turn or with a share in it. The arrays are those of plan,
-- of any length. In SQL, as plpgsql would take them apart when it is given them, and put them together for each row.
-- Locks: nothing that anybody else writes.
CREATE FUNCTION scheduler_plan_write(
    queue text, planned bigint, rows tid[], ids bigint[], attempts integer[], tags bigint[], sinces bigint[],
    channels text[]
) RETURNS integer
LANGUAGE sql
SET search_path FROM CURRENT
AS $$
    WITH written AS (
        INSERT INTO plan (queue, place, rows, ids, attempts, tags, sinces, channels)
        -- Small enough that reading one costs little where a single message is wanted.
        SELECT $1, $2 + n, $3[n:n + 31], $4[n:n + 31], $5[n:n + 31], $6[n:n + 31], $7[n:n + 31],
            k.channels[n - k.before:n - k.before + 31]
        -- To cut something out of many names, all before it are read: so it is cut out of some.
        FROM (
            SELECT k.before, $8[k.before + 1:k.before + 512] AS channels
            FROM generate_series(0, cardinality($8) - 1, 512) AS k (before)
            OFFSET 0) k
        CROSS JOIN generate_series(k.before + 1, k.before + cardinality(k.channels), 32) AS n
        RETURNING cardinality(ids) AS messages
    )
    SELECT coalesce(sum(w.messages), 0)::integer FROM written w
$$;
