-- How many messages are scheduled ahead at once, at most; and no more than have been served in a row.
--
-- Called by scheduler_serve and the functions that this serves by, scheduler_settle, scheduler_extend and
-- scheduler_plan. The more, the less probing its channels costs a message, but the longer a dequeue takes that plans:
-- for these, a thirtieth of a second. Takes no lock.
CREATE FUNCTION plan_most() RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN 8192;
