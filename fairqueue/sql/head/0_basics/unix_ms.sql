-- A point in time as Unix time in whole milliseconds, rounded down: the unit of message.dequeue_at.
--
-- Called by the functions here and by statements of the client library; takes no lock.
CREATE FUNCTION unix_ms(at timestamptz) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN floor(extract(epoch FROM at) * 1000)::bigint;
