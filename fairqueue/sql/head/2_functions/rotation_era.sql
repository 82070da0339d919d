-- The part of a rotation's key that grows: 64 turns have the same.
--
-- Called by scheduler_serve, the functions that this serves by, and queue_repair, which write turn, and by queue_check,
-- into whose statements it is expanded; takes no lock. The more turns have the same, the fewer entries the index has;
-- but under an old snapshot so many dead versions may have to be looked through.
CREATE FUNCTION rotation_era(turn bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN turn / 64;
