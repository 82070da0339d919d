-- A point in time as Unix time in whole milliseconds, rounded down: the unit of message.dequeue_at.
--
-- Called by the functions here and by statements of the client library; takes no lock. By way of UTC, as extract from a
-- timestamptz is not immutable, and PostgreSQL would call this function instead of reading its expression in.
CREATE FUNCTION unix_ms(at timestamptz) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN floor(extract(epoch FROM at AT TIME ZONE 'UTC') * 1000)::bigint;
