-- Whether a version of a message is the one that is valid now, not when the calling statement began.
--
-- Called by row_is_changed; takes no lock.
CREATE FUNCTION is_there(place tid) RETURNS boolean
LANGUAGE sql VOLATILE
SET search_path FROM CURRENT
AS $$
    SELECT EXISTS (SELECT FROM message m WHERE m.ctid = $1);
$$;
