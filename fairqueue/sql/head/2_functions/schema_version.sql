-- The version of this installation: which numbered step it stands at. Called by anyone; takes no lock.
CREATE FUNCTION schema_version() RETURNS integer
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN 1;
