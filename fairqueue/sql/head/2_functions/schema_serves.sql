-- The oldest version whose release works with this installation too, so that its programs may go on, and be started
-- again, until they are replaced. Called by anyone; takes no lock.
CREATE FUNCTION schema_serves() RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN 1;
