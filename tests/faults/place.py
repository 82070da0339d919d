"""Where random life takes place: two queues with limits, and tables in which is written down what happened.

In the queue `fixed` the limits in CAPS and RATES stay as they are all the time, though the rows that hold them are
edited, deleted and put back; so they can be checked to the message. In the queue `free` everything changes. Some of its
channels have the names of others in `fixed`.
"""

from typing import NamedTuple

from sqlalchemy import Connection, insert, text

import fairqueue as fq

#: For how many seconds messages are leased: so short that leases run out while there is life, some under work.
LEASE, SHORT_LEASE = 1.0, 0.02

QUEUE_CAP = 7
#: The largest cap that a channel of the queue `fixed` ever has; for all but `swing` it is the only one.
CAPS = {"one": 1, "two": 2, "three": 3, "swing": 4, "both": 2}


class Rate(NamedTuple):
    interval: int
    burst: int = 1


RATES = {"paced": Rate(200), "bursty": Rate(150, 3), "both": Rate(70, 2)}

CHANNELS = {
    "fixed": ("one", "two", "three", "swing", "both", "paced", "bursty", "plain"),
    "free": ("one", "two", "swing", "plain", "bounded"),
}
#: Those that have a row in the queue `fixed` all the time.
WITH_POLICY = tuple(dict.fromkeys([*CAPS, *RATES]))

TABLES = """
-- What was committed to be enqueued, deleted, put back from the dead; and done, in the transactions that did so.
CREATE TABLE public.sent (nonce text NOT NULL, message_id bigint NOT NULL);
CREATE TABLE public.deleted (message_id bigint NOT NULL);
CREATE TABLE public.redriven (message_id bigint NOT NULL);
CREATE TABLE public.effect (message_id bigint NOT NULL, attempt integer NOT NULL);

-- Every lease there ever was, in their order; with it, how many leases the channel and the queue have then, and what
-- caps the scheduler goes by. A row without a queue: the clock was set.
CREATE TABLE public.lease_log (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    queue text, channel text, message_id bigint, attempt integer, leased_at timestamptz,
    channel_leases bigint, channel_cap integer, queue_leases bigint, queue_cap integer
);
CREATE FUNCTION public.log_lease() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO public.lease_log (queue, channel, message_id, attempt, leased_at, channel_leases, channel_cap,
        queue_leases, queue_cap)
    SELECT NEW.queue, NEW.channel, NEW.id, NEW.attempt, NEW.leased_at,
        count(*) FILTER (WHERE m.channel = NEW.channel),
        (SELECT l.max_concurrency FROM fairqueue.lane l WHERE l.queue = NEW.queue AND l.channel = NEW.channel),
        count(*),
        (SELECT r.max_concurrency FROM fairqueue.rotation r WHERE r.queue = NEW.queue)
    FROM fairqueue.message m
    WHERE m.queue = NEW.queue AND m.leased_until IS NOT NULL;
    RETURN NULL;
END
$$;
CREATE TRIGGER lease_log AFTER UPDATE ON fairqueue.message FOR EACH ROW
WHEN (OLD.leased_until IS NULL AND NEW.leased_until IS NOT NULL)
EXECUTE FUNCTION public.log_lease();
"""

#: A clock that can be set.
CLOCK = """
CREATE TABLE public.clock_offset (seconds double precision NOT NULL);
INSERT INTO public.clock_offset VALUES (0);
CREATE OR REPLACE FUNCTION fairqueue.clock() RETURNS timestamptz LANGUAGE sql VOLATILE PARALLEL SAFE
RETURN (SELECT clock_timestamp() + make_interval(secs => o.seconds) FROM public.clock_offset o);
"""


def keep_books(connection: Connection) -> None:
    """Make the tables."""
    connection.execute(text(TABLES))


def prepare(connection: Connection) -> None:
    """Make the tables and set the limits."""
    keep_books(connection)
    retries = {"backoff": 0.05, "max_backoff": 0.5, "max_attempts": 6}
    connection.execute(
        insert(fq.Queue),
        [
            {"name": "fixed", "max_concurrency": QUEUE_CAP, **retries},
            {"name": "free", "max_concurrency": None, **retries},
        ],
    )
    for name in WITH_POLICY:
        interval, burst = RATES.get(name, (None, None))
        policy = {"max_concurrency": CAPS.get(name), "release_interval_ms": interval, "burst": burst}
        connection.execute(insert(fq.Channel), {"queue": "fixed", "name": name, **policy})
    bounded = {"queue": "free", "name": "bounded", "max_size": 10, "overflow": "drop"}
    connection.execute(insert(fq.Channel), bounded)


def speed_up(connection: Connection) -> None:
    """Let nobody wait for the slow rates. All else stays: if a count had drifted, its cap would now close a channel."""
    connection.execute(text("UPDATE fairqueue.channel SET release_interval_ms = 0 WHERE queue = 'fixed'"))
