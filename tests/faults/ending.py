"""The end of a random life: all that was committed is served, and all that was written down is compared."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from sqlalchemy import Engine, text
from sqlalchemy.orm import Session

from tests.acts import complete, lease_of
from tests.faults.crew import Logs
from tests.faults.place import RATES, Rate, speed_up
from tests.invariants import check_invariants


class Lease(NamedTuple):
    """A row of lease_log."""

    queue: str | None
    channel: str | None
    message_id: int
    attempt: int
    #: In Unix milliseconds.
    at: int


def drain(engine: Engine) -> None:
    """Serve all that is there and complete it; leases that were left behind have to run out before."""
    with Session(engine) as session:
        speed_up(session.connection())
        session.commit()
        deadline = time.monotonic() + 60
        while left := session.execute(text("SELECT * FROM fairqueue.message LIMIT 10")).all():
            assert time.monotonic() < deadline, f"nobody is served any more: {left}"
            session.commit()
            for queue in ("fixed", "free"):
                while batch := lease_of(session, 200, queue=queue):
                    rows = [{"id": message.id, "attempt": message.attempt} for message in batch]
                    session.execute(text("INSERT INTO public.effect VALUES (:id, :attempt)"), rows)
                    assert set(complete(session, batch)) == {"completed"}
            time.sleep(0.01)


def check(engine: Engine, logs: Logs, limited_to: int) -> Counter[str]:
    """Compare; up to `limited_to`, in the order of leases, the limits were in force. Returns how many ended how."""
    with engine.connect() as connection:
        check_invariants(connection)
        rows = connection.execute(text("SELECT nonce, message_id FROM public.sent")).all()
        nonces, sent = {row.nonce for row in rows}, {row.message_id for row in rows}
        assert logs.committed <= nonces, "a commit that was confirmed is lost"
        assert not logs.rolled_back & nonces, "a transaction that was rolled back was committed"

        ended: defaultdict[int, list[str]] = defaultdict(list)
        deaths: Counter[int] = Counter()
        attempts: dict[int, int] = {}
        outcomes = connection.execute(text("SELECT message_id, outcome, attempt FROM fairqueue.history"))
        for id_, outcome, attempt in outcomes:
            attempts[id_] = max(attempt, attempts.get(id_, 0))
            if outcome == "dead":
                deaths[id_] += 1
            else:
                ended[id_].append(outcome)
        for id_ in connection.scalars(text("SELECT message_id FROM public.deleted")):
            ended[id_].append("deleted")
        for id_ in connection.scalars(text("SELECT message_id FROM public.redriven")):
            deaths[id_] -= 1
        for id_ in connection.scalars(text("SELECT id FROM fairqueue.dead_message")):
            deaths[id_] -= 1
            ended[id_].append("dead")
        assert ended.keys() - sent == set(), "a message that was never committed"
        assert sent - ended.keys() == set(), "a message without an end"
        assert {id_: how for id_, how in ended.items() if len(how) > 1} == {}, "a message with several ends"
        assert {id_: n for id_, n in deaths.items() if n} == {}, "each death is a dead letter or was put back"

        effects = Counter(
            tuple(row) for row in connection.execute(text("SELECT message_id, attempt FROM public.effect"))
        )
        completed = {(id_, attempts[id_]) for id_, how in ended.items() if how == ["completed"]}
        assert effects == dict.fromkeys(completed, 1), "effects, each once, of what was completed"
        assert logs.completed.keys() <= effects.keys(), "a completion that was confirmed is lost"

        leases = [
            Lease(*row)
            for row in connection.execute(
                text(
                    "SELECT queue, channel, message_id, attempt, fairqueue.unix_ms(leased_at)"
                    " FROM public.lease_log ORDER BY seq"
                )
            )
        ]
        # Of what was deleted the history tells no more than earlier deaths.
        check_attempts(leases, {id_: attempts[id_] for id_, how in ended.items() if how != ["deleted"]})
        beyond = "channel_leases > channel_cap OR queue_leases > queue_cap"
        beyond_cap = connection.execute(text(f"SELECT * FROM public.lease_log WHERE {beyond} ORDER BY seq")).all()
        assert not beyond_cap, f"a lease beyond the cap that was in force: {beyond_cap[:10]}"
        limited = connection.scalar(
            text("SELECT count(*) FROM public.lease_log WHERE seq <= :seq"), {"seq": limited_to}
        )
    for name, rate in RATES.items():
        early = too_early(leases[:limited], name, rate)
        assert not early, f"{name} was served earlier than its rate allows: {early[:10]}"
    return Counter(how for hows in ended.values() for how in hows)


def check_attempts(leases: Iterable[Lease], last: dict[int, int]) -> None:
    """The attempts of a message count its leases, 1, 2, 3, and so on, and it ends with the last one."""
    given: Counter[int] = Counter()
    for lease in leases:
        if lease.queue is not None:
            given[lease.message_id] += 1
            assert lease.attempt == given[lease.message_id], lease
    assert {id_: (attempt, given[id_]) for id_, attempt in last.items() if attempt != given[id_]} == {}


def too_early(leases: Iterable[Lease], channel: str, rate: Rate) -> list[Lease]:
    """What the generic cell rate algorithm (ITU-T I.371) would not have let go, in milliseconds.

    Where the clock was set, it begins anew: what time is it that has passed?
    """
    early = []
    last = due = 0
    for lease in leases:
        if lease.queue is None or (lease.queue == "fixed" and lease.at < last):
            due = 0
        if lease.queue == "fixed":
            last = lease.at
            if lease.channel == channel:
                if lease.at < due - (rate.burst - 1) * rate.interval:
                    early.append(lease)
                due = max(due, lease.at) + rate.interval
    return early
