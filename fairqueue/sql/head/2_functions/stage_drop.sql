-- Gives up the staging tables of a run, and returns how many there were. They can't be entered any more, and are dropped,
-- now or, where somebody reads one as pg_dump does, by a later stage_clean.
--
-- Called by load_enter, and by loaders that give up. What has been entered stays.
-- Locks: see stage_clean. A task that still fills a table isn't waited for; its table is left to stage_clean.
CREATE FUNCTION stage_drop(run text) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER
SET search_path FROM CURRENT
AS $$
DECLARE
    v_given_up integer;
BEGIN
    UPDATE stage s SET run = '' WHERE s.run = $1;
    GET DIAGNOSTICS v_given_up = ROW_COUNT;
    IF v_given_up > 0 THEN
        PERFORM stage_clean('1000 years');
    END IF;
    RETURN v_given_up;
END
$$;

REVOKE EXECUTE ON FUNCTION stage_drop FROM PUBLIC;
