-- The staging tables that there are: one row each, for a part of a load that hasn't been entered yet.
--
-- Written by stage_create and stage_drop; deleted by stage_clean, with the tables. Only what has a row here is entered,
-- or dropped.
CREATE TABLE stage (
    -- That of the table.
    name             text COLLATE "C" NOT NULL,
    -- Which attempt to load something it belongs to; empty: none, and it is to be dropped.
    run              text COLLATE "C" NOT NULL,
    created_at       timestamptz      NOT NULL DEFAULT clock(),
    CONSTRAINT stage_pkey PRIMARY KEY (name)
);

CREATE INDEX stage_run ON stage (run);
