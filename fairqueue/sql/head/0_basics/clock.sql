-- The time by which everything here goes: that of the database server, as it is now, not as a transaction began.
--
-- Called by the functions here, by column defaults, and by statements of the client library; takes no lock. That there
-- is one function for it lets a test move the time of a queue, by replacing it.
CREATE FUNCTION clock() RETURNS timestamptz
LANGUAGE sql VOLATILE PARALLEL SAFE
RETURN clock_timestamp();
