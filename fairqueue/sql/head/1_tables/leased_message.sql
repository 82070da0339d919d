-- What a dequeue returns of each message that it leased: the message as it is then.
--
-- Returned by message_dequeue, scheduler_serve and the functions that this serves by. A type, and not a table of each
-- function's own, as PostgreSQL would read the columns of that anew for each call.
CREATE TYPE leased_message AS (
    id               bigint,
    channel          text,
    attempt          integer,
    payload          jsonb,
    body             bytea,
    state            jsonb,
    error            text,
    dequeue_at       bigint,
    cost             double precision,
    created_at       timestamptz,
    leased_until     timestamptz,
    key              text,
    forgiven         integer,
    first_leased_at  timestamptz
);
