-- Whether a message is leased, from its leased_until.
--
-- Called by functions that find messages by id, most of them to end or extend a lease; takes no lock. Not IS NOT NULL:
-- the planner would take that for an invitation to read the whole index of leases instead.
CREATE FUNCTION is_leased(leased_until timestamptz) RETURNS boolean
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN coalesce(leased_until, '-infinity') > '-infinity';
