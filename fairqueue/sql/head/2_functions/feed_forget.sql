-- Forgets a feed that isn't read any more: history no longer keeps anything for it. Returns whether there was one.
--
-- Called by operators.
-- Locks: the row of the feed.
CREATE FUNCTION feed_forget(name text) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
BEGIN
    DELETE FROM feed f WHERE f.name = $1;
    RETURN FOUND;
END
$$;

REVOKE EXECUTE ON FUNCTION feed_forget FROM PUBLIC;
