-- The outcomes of days that have no partition of their own, so that a completion never fails for want of one.
--
-- Normally empty: history_maintain makes the partitions ahead.
CREATE TABLE history_default PARTITION OF history DEFAULT
    WITH (vacuum_truncate = off, toast.vacuum_truncate = off);
