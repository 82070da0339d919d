-- Where the rotation of a queue stands: one row a queue, written by dequeues alone.
--
-- Besides the virtual time it holds the lower bounds from which every index scan of a dequeue starts, so that none
-- walks over entries that are dead but, because of an old snapshot, not yet removable. The row itself is updated by
-- every dequeue that has the turn and does something, and by who plans on without it. Its key holds a number that
-- grows, so that it is read as the last entry of its index, however many dead versions lie before it; but only every 64
-- turns, as versions between which the key doesn't change stand in one page and need no entry of their own.
CREATE TABLE rotation (
    queue            text COLLATE "C" NOT NULL,
    turn             bigint           NOT NULL,
    -- Always rotation_era(turn). Not a generated column: as part of the key, that keeps PostgreSQL 18 from updating a
    -- table that is published.
    era              bigint           NOT NULL,
    -- Start tag of the message served last, but for what was taken from plan since: where a channel that becomes active
    -- starts.
    vtime            bigint           NOT NULL,
    -- The lane of that message: every ready lane comes after (vtime, vsince).
    vsince           bigint           NOT NULL,
    -- How many lanes have become ready so far: the number that the next one gets, less 1.
    activations      bigint           NOT NULL,
    -- Signals of transactions from news_from on, and of those in news_open, have not been folded yet; likewise the
    -- urgent ones.
    news_from        xid8             NOT NULL,
    news_open        xid8[]           NOT NULL,
    urgent_from      xid8             NOT NULL,
    urgent_open      xid8[]           NOT NULL,
    -- No lease ends, and no waiting lane is due, before these; but for leases that ran out while somebody held them. A
    -- due_floor of 0 has the next dequeue come at once, as the last one left something to go through (queue_due).
    lease_floor      timestamptz      NOT NULL,
    due_floor        bigint           NOT NULL,
    -- Idle lanes below this tag have been removed.
    idle_floor       bigint           NOT NULL,
    -- The last channel that scheduler_sweep looked at ('' at the start of a round).
    swept            text COLLATE "C" NOT NULL,
    -- The policy of the queue and what it counts, as in lane.
    max_concurrency  integer,
    paused_until     bigint,
    running          integer          NOT NULL,
    counted_from     bigint           NOT NULL,
    -- The time of this turn, in Unix milliseconds, to notice a clock that was set back.
    clock            bigint           NOT NULL,
    -- When history_maintain is to be called next, in Unix milliseconds.
    maintain_at      bigint           NOT NULL,
    -- How many messages were served, or taken back, of all that was ever planned, and how many were planned: the places
    -- in plan between the two are those to come.
    place            bigint           NOT NULL,
    planned          bigint           NOT NULL,
    -- How many messages were served since a dequeue came up short or a plan had to be taken back, and at how many the
    -- next ones are planned: as many again.
    ahead            integer          NOT NULL,
    plan_at          integer          NOT NULL,
    -- The ready lane that comes first: what is planned before it can be taken without the turn. Null: who wants to know
    -- has to look.
    lane_tag         bigint,
    lane_since       bigint,
    -- The first lease that ran out while somebody held it, since when there is such a one, and when to look again: not each
    -- time, as it may stay so for long, with more and more dead entries behind it. 'infinity': there is none.
    held_from        timestamptz      NOT NULL DEFAULT 'infinity',
    held_since       timestamptz      NOT NULL DEFAULT 'infinity',
    held_at          timestamptz      NOT NULL DEFAULT 'infinity',
    -- While lanes stand behind others, because of planned messages that weren't there to be taken: up to where all would
    -- have been served for the same work. A channel that becomes active starts there, if that is beyond vtime.
    arrival_tag      bigint           NOT NULL DEFAULT 0,
    -- While lanes are derived anew (scheduler_rebuild): the last one that has been, '' before the first.
    rebuilt          text COLLATE "C",
    -- From the plan on until a dequeue comes up short or the queue gets a limit, if there was one to be had: the
    -- sequence of which tickets for the places of the plan are drawn, and the last ticket that was drawn when what was
    -- taken of it was settled last. So the next one is for the place behind place.
    tickets          regclass,
    ticket_base      bigint           NOT NULL DEFAULT 0,
    CONSTRAINT rotation_pkey PRIMARY KEY (queue, era)
) WITH (
    autovacuum_vacuum_scale_factor = 0.05,
    vacuum_truncate = off,
    toast.vacuum_truncate = off,
    -- Room for versions to come beside each row.
    fillfactor = 50
);
