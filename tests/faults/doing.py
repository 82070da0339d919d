"""What can be done with a queue, at random: by producers, workers, users and operators."""

import time
from collections.abc import Callable, Collection, Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import insert, text
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.faults.life import (
    LOCK_NOT_AVAILABLE,
    READ_COMMITTED,
    SERIALIZATION_FAILURE,
    UNIQUE_VIOLATION,
    Fate,
    Life,
    Part,
    Refused,
)
from tests.faults.place import CAPS, CHANNELS, LEASE, SHORT_LEASE, WITH_POLICY

Message = fq.LeasedMessage[Any]


def live(part: Part) -> None:
    """What a process runs."""
    Life(part).live(ACTS)


def unless_read_committed(level: str) -> set[str]:
    """What ends or changes messages may fail in higher isolation, and is to be tried again."""
    return set() if level == READ_COMMITTED else {SERIALIZATION_FAILURE}


def turn_is_held(life: Life) -> set[str]:
    """A process that is stopped in the middle of a dequeue keeps others from theirs: they say so after 10 s."""
    return {LOCK_NOT_AVAILABLE} if life.part.faults else set()


def some_place(life: Life) -> dict[str, Any]:
    queue = life.random.choice(["fixed", "free"])
    return {"queue": queue, "channel": life.random.choice(CHANNELS[queue])}


def some_fields(life: Life) -> dict[str, Any]:
    fields: dict[str, Any] = {"cost": life.random.choice([1, 1, 2, 0.5])}
    match life.random.randrange(8):
        case 0:
            fields["delay"] = life.random.choice([0.05, 0.5])
        case 1:
            fields["dequeue_at"] = -life.random.randint(1, 3)
        case 2:
            fields["max_attempts"] = life.random.randint(1, 2)
    return fields


# Producers


def send(life: Life, enqueue: Callable[[Session, str], list[int]], level: str, may_fail: Collection[str] = ()) -> None:
    """Enqueue in a transaction that may be rolled back, and write down what became of it."""
    nonce = f"{life.name}-{next(life.numbers)}"
    ids: list[int] = []

    def body(session: Session) -> None:
        if life.chance(0.1):
            with session.begin_nested() as savepoint:
                write_sent(session, f"{nonce}-savepoint", enqueue(session, f"{nonce}-savepoint"))
                savepoint.rollback()
            life.note("rolled back", f"{nonce}-savepoint")
        ids.extend(enqueue(session, nonce))
        write_sent(session, nonce, ids)

    fate = life.transaction(body, level, may_fail, commit=life.chance(0.85))
    if fate is Fate.COMMITTED:
        life.ids.extend(ids)
        life.note("committed", nonce)
    elif fate is not Fate.UNKNOWN:
        life.note("rolled back", nonce)


def write_sent(session: Session, nonce: str, ids: Iterable[int]) -> None:
    rows = [{"nonce": nonce, "id": id_} for id_ in ids]
    session.execute(text("INSERT INTO public.sent VALUES (:nonce, :id)"), rows)


def bounded(level: str, rows: Iterable[dict[str, Any]]) -> set[str]:
    """Where nothing is bounded, an enqueue without a key may never fail, in whatever isolation."""
    return unless_read_committed(level) if any(row["channel"] == "bounded" for row in rows) else set()


def enqueue(life: Life) -> None:
    rows = [some_place(life) | some_fields(life) for _ in range(life.random.randint(1, 2))]

    def add(session: Session, nonce: str) -> list[int]:
        messages = [fq.enqueue(session, payload={"nonce": nonce}, **row) for row in rows]
        session.flush()
        return [message.id for message in messages]

    level = life.level()
    send(life, add, level, bounded(level, rows))


def enqueue_many(life: Life) -> None:
    rows: Any = [some_place(life) | some_fields(life) for _ in range(life.random.randint(1, 20))]

    def add(session: Session, nonce: str) -> list[int]:
        return fq.enqueue_many(session, [row | {"payload": {"nonce": nonce}} for row in rows])

    level = life.level()
    send(life, add, level, bounded(level, rows))


def enqueue_keyed(life: Life) -> None:
    channel = life.random.choice(CHANNELS["free"][:4])
    key = f"key{life.random.randrange(6)}"
    how: Any = life.random.choice(["raise", "ignore", "replace", "replace"])

    def add(session: Session, nonce: str) -> list[int]:
        return [fq.enqueue_unique(session, channel, {"nonce": nonce}, queue="free", key=key, on_conflict=how)]

    level = life.level()
    send(life, add, level, unless_read_committed(level) | ({UNIQUE_VIOLATION} if how == "raise" else set()))


# Workers


def work(life: Life) -> None:
    queue = life.random.choice(["fixed", "free"])
    limit = life.random.choice([1, 1, 2, 3, 5])
    lease = life.random.choice([LEASE, LEASE, SHORT_LEASE])
    batch: list[Message] = []

    def dequeue(session: Session) -> None:
        if life.part.faults and life.chance(0.5):
            session.execute(text("SET LOCAL synchronous_commit = off"))  # A worker may: a lost lease does no harm.
        batch.extend(session.scalars(fq.dequeue(queue=queue, limit=limit, lease=lease, worker=life.name)))

    fate = life.transaction(dequeue, may_fail=turn_is_held(life), at_once=True)
    if fate is not Fate.COMMITTED or not batch:
        return
    life.ids.extend(message.id for message in batch)
    if life.chance(0.2):
        complete(life, batch)
    else:
        for message in batch:
            handle(life, message)


def handle(life: Life, message: Message) -> None:
    (how,) = life.random.choices(["complete", "fail", "defer", "heartbeat", "undo", "abandon"], [60, 18, 5, 7, 5, 2])
    # Only in the queue `fixed` the backoff is sure to be short.
    delay = life.random.choice([0, 0, 0.05, None if message.queue == "fixed" else 0.02])
    match how:
        case "complete":
            complete(life, [message])
        case "fail":
            end(life, [message], fq.fail(message, "no luck", delay=delay, retry=life.chance(0.8)), {"failed", "dead"})
        case "defer":
            end(life, [message], fq.defer(message, delay=delay, state={"at": "once more"}), {"deferred"})
        case "heartbeat":
            end(life, [message], fq.heartbeat(message, lease=LEASE * 1.5), {"extended", "busy"})
            life.pause()
            complete(life, [message])
        case "undo":
            complete(life, [message], commit=False)
            complete(life, [message])


def complete(life: Life, batch: list[Message], commit: bool = True) -> None:
    fate = end(life, batch, fq.complete(batch), {"completed"}, effect=True, commit=commit)
    if fate is Fate.COMMITTED:
        for message in batch:
            life.note("completed", message.id, message.attempt)


def end(
    life: Life, batch: list[Message], statement: Any, done: set[str], *, effect: bool = False, commit: bool = True
) -> Fate:
    """Do something with leases, with an effect or without, in a transaction that is tried again if it fails."""
    rows = [{"id": message.id, "attempt": message.attempt} for message in batch]
    effect_first = life.chance(0.5)

    def write_effect(session: Session) -> None:
        session.execute(text("INSERT INTO public.effect VALUES (:id, :attempt)"), rows)
        life.pause()

    def body(session: Session) -> None:
        if effect and effect_first:
            write_effect(session)
        results = session.execute(statement).all()
        assert [row.id for row in results] == [message.id for message in batch]
        told = {row.result for row in results}
        assert told <= done | {"stale", "not_found"}, told
        if not told <= done:
            raise Refused
        if effect and not effect_first:
            write_effect(session)
        life.fault(None)

    level = life.level()
    deadline = time.monotonic() + 60
    while True:
        fate = life.transaction(body, level, unless_read_committed(level), commit=commit)
        # Whoever doesn't know whether it has committed does it all again: it is refused if it has.
        if fate is not Fate.FAILED and not (fate is Fate.UNKNOWN and effect):
            return fate
        assert time.monotonic() < deadline
        level = life.level()


# Users and operators


def cancel(life: Life) -> None:
    ids = life.random.sample(list(life.ids), min(len(life.ids), life.random.randint(1, 3)))
    level = life.level()
    life.transaction(
        lambda session: session.execute(fq.cancel(ids)).all(),
        level,
        unless_read_committed(level),
        commit=life.chance(0.8),
    )


def delete(life: Life) -> None:
    """A user's own DELETE, of a message that may be ready, leased or gone."""
    life.execute(
        "WITH gone AS (DELETE FROM fairqueue.message WHERE id = :id RETURNING id)"
        " INSERT INTO public.deleted SELECT id FROM gone",
        id=life.random.choice(life.ids),
    )


def move(life: Life) -> None:
    """A user gives a ready message another time, or another channel."""
    column = life.random.choice(["dequeue_at = :at", "channel = :channel"])
    life.execute(
        f"UPDATE fairqueue.message SET {column} WHERE id = :id AND leased_until IS NULL AND key IS NULL"
        " AND queue = 'free'",
        id=life.random.choice(life.ids),
        at=life.random.choice([-5, 0, 1_700_000_000_000]),
        channel=life.random.choice(CHANNELS["free"][:4]),
    )


def redrive(life: Life) -> None:
    queue = life.random.choice(["fixed", "free"])
    channel = life.random.choice([None, *CHANNELS[queue]])

    def body(session: Session) -> None:
        rows = session.execute(fq.redrive(queue=queue, channel=channel)).all()
        if ids := [{"id": row.id} for row in rows if row.result == "redriven"]:
            session.execute(text("INSERT INTO public.redriven VALUES (:id)"), ids)

    life.transaction(body, commit=life.chance(0.8))


def repair(life: Life) -> None:
    name = {"name": life.random.choice(["fixed", "free"])}
    life.transaction(
        lambda session: session.execute(text("SELECT fairqueue.queue_repair(:name)"), name),
        may_fail=turn_is_held(life),
        at_once=True,
    )


def soon(life: Life) -> datetime:
    return datetime.now(UTC) + timedelta(seconds=life.random.choice([0.05, 0.3]))


def edit_free_channel(life: Life) -> None:
    name = life.random.choice(CHANNELS["free"][:4])
    match life.random.randrange(5):
        case 0 | 1:
            life.execute(
                "SELECT fairqueue.channel_set(:name, 'free', :weight, :cap, :interval, :burst)",
                name=name,
                weight=life.random.choice([None, 0.5, 1, 3]),
                cap=life.random.choice([None, 1, 2, 5]),
                interval=life.random.choice([None, 0, 5, 30]),
                burst=life.random.choice([None, 1, 3]),
            )
        case 2:
            column = life.random.choice(["max_concurrency", "max_concurrency", "release_interval_ms"])
            life.execute(
                f"UPDATE fairqueue.channel SET {column} = NULL WHERE queue = 'free' AND name = :name", name=name
            )
        case 3:
            pause = fq.pause(queue="free", channel=name, until=soon(life))
            life.transaction(lambda session: session.execute(pause))
        case _:
            life.execute("DELETE FROM fairqueue.channel WHERE queue = 'free' AND name = :name", name=name)


def edit_free_queue(life: Life) -> None:
    match life.random.randrange(4):
        case 0 | 1:
            life.execute(
                "SELECT fairqueue.queue_set('free', max_concurrency => :cap, max_attempts => :attempts,"
                " channel_weight => :weight, channel_max_concurrency => :channel_cap,"
                " channel_release_interval_ms => :interval)",
                cap=life.random.choice([None, 2, 8]),
                attempts=life.random.choice([None, 2, 5]),
                weight=life.random.choice([None, 1, 2]),
                channel_cap=life.random.choice([None, None, None, 1, 3]),
                interval=life.random.choice([None, 0, 5]),
            )
        case 2:
            pause = fq.pause(queue="free", until=soon(life))
            life.transaction(lambda session: session.execute(pause))
        case _:
            life.execute("DELETE FROM fairqueue.queue WHERE name = 'free'")
            life.execute("SELECT fairqueue.queue_set('free', backoff => 0.05, max_backoff => 0.5)")


def edit_fixed(life: Life) -> None:
    """Whatever changes no cap and no rate, but makes the scheduler count anew."""
    name = life.random.choice(WITH_POLICY)
    weight = life.random.choice([0.5, 1, 2])
    match life.random.randrange(6):
        case 0:
            life.execute("SELECT fairqueue.channel_set(:name, 'fixed', :weight)", name=name, weight=weight)
        case 1:
            life.execute(
                "SELECT fairqueue.channel_set('swing', 'fixed', max_concurrency => :cap)",
                cap=life.random.randint(1, CAPS["swing"]),
            )
        case 2 | 3:
            life.transaction(lambda session: put_back(session, name))
        case 4:
            life.execute("SELECT fairqueue.queue_set('fixed', channel_weight => :weight)", weight=weight)
        case _:
            pause = fq.pause(queue="fixed", channel=name, until=soon(life))
            life.transaction(lambda session: session.execute(pause))


def put_back(session: Session, name: str) -> None:
    """Deleting a channel and making it anew gets around no limit."""
    gone = session.execute(
        text("DELETE FROM fairqueue.channel WHERE queue = 'fixed' AND name = :name RETURNING *"), {"name": name}
    )
    for row in gone.mappings().all():
        session.execute(insert(fq.Channel), dict(row))


#: And how often they are done.
ACTS: dict[Callable[[Life], None], float] = {
    enqueue: 16,
    enqueue_many: 7,
    enqueue_keyed: 6,
    work: 45,
    cancel: 3,
    delete: 2,
    move: 3,
    redrive: 2,
    edit_free_channel: 7,
    edit_free_queue: 2,
    edit_fixed: 4,
    repair: 0.3,
}
