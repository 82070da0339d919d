"""Where much is planned, dequeues serve it side by side: none waits for the other, none gets what the other has.

The order is that of the plan. Whatever is to be done beside serving waits for those who take part in the turn.
"""

import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import psycopg
import pytest
from sqlalchemy import Engine, text, update
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import complete, lease_of, move_clock, plan_ahead, put, sql, wait_until
from tests.fixtures.connections import Raw
from tests.invariants import check_invariants
from tests.limiting import NOW, limit
from tests.observing import observer, value
from tests.scheduling.taking import (
    CHANNELS,
    GATE,
    DequeueAfter,
    Ids,
    Named,
    a_second_later,
    dequeue,
    drawn,
    fill,
    finish,
    ids_planned,
    plan_once,
    replaced,
)

pytestmark = [pytest.mark.usefixtures("clock_that_stands"), pytest.mark.shared_database]

#: Unix milliseconds of the year 2096.
FAR = 4_000_000_000_000

#: The queue from whose plan a session took last time.
PLANNED = "SELECT current_setting('fairqueue_turn.planned', true)"


def test_none_waits_and_each_gets_the_next(session: Session, order: Ids, workers: list[psycopg.Connection]) -> None:
    done = [dequeue(worker) for worker in workers]
    assert done == [order[:3], order[3:6], order[6:9], order[9:12]]
    for worker in (workers[2], workers[0]):
        worker.commit()
        check_invariants(session.connection())
        session.commit()
    done += [dequeue(workers[2], 5), dequeue(workers[0], 1)]
    assert done[4:] == [order[12:17], order[17:18]]
    finish(session, workers, *done)


def test_what_is_rolled_back_comes_within_a_second(
    session: Session, order: Ids, workers: list[psycopg.Connection]
) -> None:
    """Though what came after it has been served."""
    for worker in workers:
        dequeue(worker)
    workers[1].rollback()
    assert dequeue(workers[1], 4) == order[12:16]
    workers[0].rollback()
    for worker in workers[1:]:
        worker.commit()
    a_second_later(session)
    # What was taken past them counts: of channels a and b less was.
    assert dequeue(workers[3], 4) == [*order[4:6], *order[:2]]
    finish(session, workers)


def test_what_is_drawn_last_and_rolled_back_is_still_to_come(
    session: Session, order: Ids, workers: list[psycopg.Connection]
) -> None:
    """Nothing was taken past it: what is planned stays so."""
    done = [dequeue(worker) for worker in workers]
    for worker in workers[:2]:
        worker.commit()
    for worker in workers[2:]:
        worker.rollback()
    a_second_later(session)
    done[2] = dequeue(workers[0])
    workers[0].commit()
    done[3] = dequeue(workers[1])
    workers[1].commit()
    assert done == [order[:3], order[3:6], order[6:9], order[9:12]]
    assert ids_planned(session) == order[12:]
    finish(session, workers, *done)


@pytest.mark.parametrize("more", [0, 2_000_000_000_000_000_000])
def test_what_is_rolled_back_is_left_when_the_scheduler_moves_on(
    session: Session, order: Ids, workers: list[psycopg.Connection], more: int
) -> None:
    """It goes before whatever is planned. A channel that comes starts where the others are, how large tags ever are."""
    for worker in workers:
        dequeue(worker)
    workers[0].commit()
    workers[1].rollback()
    workers[2].commit()
    workers[3].rollback()
    put(session, "a")  # so that the next dequeue takes its turn
    served = [message.id for message in lease_of(session, 1)]
    sql(session, "UPDATE fairqueue.lane SET tag = tag + :n", n=more)
    sql(session, "UPDATE fairqueue.rotation SET vtime = vtime + :n, arrival_tag = arrival_tag + :n", n=more)
    served += [message.id for message in lease_of(session, 1)]
    (late,) = put(session, "late")
    served += [message.id for message in lease_of(session, 6)]
    assert served == [*order[3:6], order[9], late, *order[10:13]]
    finish(session, workers)


@pytest.mark.shared_database(False)
def test_a_channel_of_which_nothing_is_left_in_a_plan_that_is_taken_back(
    session: Session, heads: None, workers: list[psycopg.Connection]
) -> None:
    """It was served past one that comes before it."""
    for number in range(60):
        put(session, f"c{number}")
    lease_of(session, 1)
    plan_ahead(session)
    lease_of(session, 1)
    order = ids_planned(session)
    done = [dequeue(worker) for worker in workers[:3]]
    assert done == [order[:3], order[3:6], order[6:9]]
    workers[0].commit()
    workers[1].rollback()
    workers[2].commit()
    put(session, "late")  # so that the next dequeue takes its turn
    assert [message.id for message in lease_of(session, 1)] == order[3:4]
    finish(session, workers, done[0], done[2], order[3:4])


def test_a_worker_that_dies_has_taken_nothing(
    session: Session, raw: Raw, database_url: str, order: Ids, workers: list[psycopg.Connection]
) -> None:
    watching = observer(raw, database_url)
    for worker in workers[:2]:
        dequeue(worker)
    pid = workers[0].info.backend_pid
    value(watching, "SELECT pg_terminate_backend(%s)", pid)
    wait_until(lambda: value(watching, "SELECT count(*) FROM pg_stat_activity WHERE pid = %s", pid) == 0)
    workers[1].commit()
    a_second_later(session)
    assert dequeue(workers[2], 4) == [*order[:3], order[6]]
    finish(session, workers[1:])


def a_message_comes(session: Session) -> None:
    put(session, "late")


def a_lease_runs_out(session: Session) -> None:
    sql(session, "UPDATE fairqueue.rotation SET lease_floor = '2000-01-01'")


def edited(session: Session, id_: int) -> None:
    session.execute(update(fq.Message).where(fq.Message.id == id_).values(payload="new"))


@pytest.mark.parametrize("change", [replaced, edited])
def test_a_change_is_no_more_urgent_than_an_arrival(session: Session, change: Callable[[Session, int], None]) -> None:
    """So that floods of them keep nobody waiting for a policy."""
    change(session, put(session, "acme")[0])
    session.commit()
    assert {*session.scalars(text("SELECT urgent FROM fairqueue.signal"))} == {False}


@pytest.mark.parametrize("change", [replaced, edited])
def test_a_message_that_is_changed_keeps_its_place(
    session: Session, order: Ids, dequeue_after: DequeueAfter, change: Callable[[Session, int], None]
) -> None:
    """Nothing that is planned after it in its channel is served before it, though others are at it."""

    def meanwhile() -> None:
        change(session, order[30])
        session.commit()

    done, served = dequeue_after(meanwhile, "commit")
    assert done + served == order[:48]


@pytest.mark.parametrize("news", [a_message_comes, a_lease_runs_out])
@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_news_wait_for_those_who_are_at_it(
    session: Session, order: Ids, dequeue_after: DequeueAfter, news: Callable[[Session], None], end: str
) -> None:
    """What they give back is served again, before anything goes by the news."""
    done, served = dequeue_after(lambda: news(session), end)
    assert done == order[:24]
    assert len(served) == 24
    assert len({*served} & {*done}) >= 22 if end == "rollback" else not {*served} & {*done}
    check_invariants(session.connection())


@pytest.mark.parametrize(("end", "more"), [("commit", 0), ("rollback", 1)])
def test_what_others_are_about_to_take_counts_toward_a_new_limit(
    session: Session, order: Ids, dequeue_after: DequeueAfter, end: str, more: int
) -> None:
    """One of channel a runs already."""
    of_a = set(session.scalars(text("SELECT id FROM fairqueue.message WHERE channel = 'a' AND leased_until IS NULL")))
    assert len(of_a) == 119
    done, served = dequeue_after(lambda: limit(session, "a", max_concurrency=2), end)
    assert len(of_a & {*done}) == 4
    assert len(of_a & {*served}) == more
    check_invariants(session.connection(), caps=False)


def test_what_counted_toward_a_limit_that_is_gone(session: Session) -> None:
    """Its end is news to nobody, so that nobody needs the turn for it."""
    limit(session, "a", max_concurrency=100)
    fill(session)
    lease_of(session, 24)
    sql(session, "UPDATE fairqueue.message SET leased_until = NULL WHERE leased_until IS NOT NULL")
    move_clock(session, NOW + 1)  # what is leased twice at the same time may have been leased by hand
    limit(session, "a", max_concurrency=None)
    order = plan_once(session)
    counted = set(
        session.scalars(text("SELECT id FROM fairqueue.message WHERE counted IS NOT NULL AND leased_until IS NULL"))
    )
    batch = lease_of(session, 24)
    assert [message.id for message in batch] == order[:24]
    assert counted & {*order[:24]}
    complete(session, batch)
    assert session.scalar(text("SELECT count(*) FROM fairqueue.signal")) == 0


def test_a_channel_whose_turn_comes_within_the_batch(
    session: Session, workers: list[psycopg.Connection], dequeue_after: DequeueAfter
) -> None:
    """Its last message is never planned. Who comes to that waits for the turn, though it has locked some already."""
    for channel in CHANNELS:
        put(session, channel, 120)
    put(session, "few", 7)
    lease_of(session, 1)
    plan_ahead(session, 600)
    lease_of(session, 1)
    (last,) = session.scalars(text("SELECT max(id) FROM fairqueue.message"))
    assert last not in ids_planned(session)
    done, served = dequeue_after(lambda: None, "commit")
    assert len(served) == 24
    assert last in served
    finish(session, workers, done, served)


def test_the_turn_comes_before_much_has_been_taken(session: Session, order: Ids) -> None:
    """So that there is time to plan on; and what was taken counts when the next plan is made."""
    taken = [(len(lease_of(session, 20)), drawn(session)) for _ in range(17)]
    assert all(messages == 20 for messages, _ in taken)
    assert [tickets for _, tickets in taken] == [*range(20, 320, 20), 0, 20]


@pytest.mark.shared_database(False)
def test_a_session_knows_whether_it_took_from_a_plan(
    session: Session, order: Ids, workers: list[psycopg.Connection]
) -> None:
    """So who did asks for a share at once, and who didn't looks first whether anything is planned."""
    first, second = workers[:2]
    assert value(first, PLANNED) is None
    done = [dequeue(first), dequeue(second)]
    assert [value(worker, PLANNED) for worker in (first, second)] == ["default", "default"]
    first.commit()
    second.rollback()
    assert [value(worker, PLANNED) for worker in (first, second)] == ["default", ""]
    a_message_comes(session)
    done[1] = dequeue(first)
    assert value(first, PLANNED) == ""
    finish(session, workers, *done)


@pytest.mark.parametrize("queue", ["default", "another"])
def test_what_a_session_believes_of_a_plan_is_only_a_guess(
    session: Session, workers: list[psycopg.Connection], queue: str
) -> None:
    """Nothing is planned, whatever it says; and several believe it at a time."""
    order = put(session, "a", 40)
    for worker in workers:
        worker.execute("SELECT set_config('fairqueue_turn.planned', %s, false)", [queue])
        worker.execute("SET lock_timeout = 0")
        worker.commit()

    def work(worker: psycopg.Connection) -> Ids:
        done: Ids = []
        while batch := dequeue(worker, 1):
            worker.commit()
            done += batch
        worker.commit()
        return done

    with ThreadPoolExecutor(len(workers)) as pool:
        done = list(pool.map(work, workers))
    assert sorted(id_ for ids in done for id_ in ids) == order
    finish(session, workers, *done)


@pytest.mark.shared_database(False)
def test_one_takes_the_turn_for_all(session: Session, order: Ids, raw: Raw, database_url: str, named: Named) -> None:
    """Those who come to it together wait for that one; then the plan serves them side by side again."""
    first, gate, watching = raw(database_url), raw(database_url), observer(raw, database_url)
    done = [dequeue(first)]
    # Half of what is planned.
    while 2 * drawn(session) <= (session.scalar(text("SELECT planned - place FROM fairqueue.rotation")) or 0):
        done.append([message.id for message in lease_of(session, 20)])
    taken = sum(map(len, done)) - 3
    turn = session.scalar(text("SELECT turn + 1 FROM fairqueue.rotation"))
    session.commit()
    sql(session, GATE)

    def waiting(mode: str) -> object:
        return value(watching, "SELECT count(*) FROM pg_locks WHERE NOT granted AND mode = %s", mode)

    gate.execute("SELECT pg_advisory_lock(42), pg_advisory_lock(43)")
    one, *others = named("first 42"), named("first 43"), named("first 43")
    with ThreadPoolExecutor(3) as pool:
        serving = [pool.submit(dequeue, worker) for worker in (one, *others)]
        wait_until(lambda: waiting("ShareLock") == 3)  # for the gates
        gate.execute("SELECT pg_advisory_unlock(42)")
        wait_until(lambda: waiting("ExclusiveLock") == 1)
        gate.execute("SELECT pg_advisory_unlock(43)")
        wait_until(lambda: waiting("ShareLock") == 2)  # for the one that has the turn, or waits for it
        first.commit()
        done.append(serving[0].result())
        one.commit()
        # Neither of them has ended its transaction.
        done += [other.result() for other in serving[1:]]
    assert sorted(id_ for ids in done for id_ in ids) == sorted(order[: 3 * 4 + taken])
    for other in others:
        other.commit()
    assert session.scalar(text("SELECT turn FROM fairqueue.rotation")) == turn
    finish(session, [], *done)


def test_who_could_not_wait_takes_nothing_without_a_share(
    session: Session, order: Ids, workers: list[psycopg.Connection]
) -> None:
    """One that has written something, while somebody has the turn, who may change what is planned."""
    holder, writer = workers[:2]
    value(holder, "SELECT fairqueue.scheduler_turn('default')")
    value(writer, "SELECT pg_current_xact_id()")
    assert dequeue(writer) == []
    holder.commit()
    done = dequeue(writer)
    assert done == order[:3]
    finish(session, workers, done)


def test_who_could_not_wait_keeps_nobody_waiting(
    session: Session, order: Ids, workers: list[psycopg.Connection]
) -> None:
    """One that has written something, when it needs the turn while somebody has a share: it has no lock of either."""
    holder, writer = workers[:2]
    done = [dequeue(writer)]
    writer.commit()
    done.append(dequeue(holder))
    value(writer, "INSERT INTO fairqueue.message (channel) VALUES ('new') RETURNING id")
    assert dequeue(writer) == []
    mine = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
    assert value(writer, mine) == 0
    finish(session, workers, *done)


def test_what_a_user_had_locked_is_served(session: Session, order: Ids, workers: list[psycopg.Connection]) -> None:
    """All of it, for a foreign key say; that they have let go of it long ago doesn't show in the rows themselves."""
    old = workers[3]
    old.execute("SELECT pg_current_xact_id()")
    session.connection().exec_driver_sql("SELECT FROM fairqueue.message FOR KEY SHARE")
    session.commit()
    done = [dequeue(worker) for worker in workers[:3]]
    assert done == [order[:3], order[3:6], order[6:9]]
    finish(session, workers, *done)


def test_a_shorter_lease(session: Session, order: Ids, workers: list[psycopg.Connection]) -> None:
    """It is found when it runs out, before those that were given earlier."""
    done = dequeue(workers[0])
    workers[0].commit()
    short = [message.id for message in lease_of(session, 3, lease=1000)]
    assert done + short == order[:6]
    finish(session, workers, done, short)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        pytest.param("clock", "clock + 100000", id="a clock that was set back"),
        pytest.param("news_from", "'4000000000'", id="a dump of another server"),
        pytest.param("urgent_from", "'4000000000'", id="an urgent one of such a dump"),
        pytest.param("maintain_at", "0", id="a day that is over"),
    ],
)
def test_what_nobody_tells_of(session: Session, order: Ids, column: str, value: str) -> None:
    """Is noticed, though there is nothing to do but to take."""
    sql(session, f"UPDATE fairqueue.rotation SET {column} = {value}")
    state = text(f"SELECT {column}::text::bigint FROM fairqueue.rotation")
    before = session.scalar(state)
    assert [message.id for message in lease_of(session, 3)] == order[:3]
    after = session.scalar(state)
    assert before is not None
    assert after is not None
    assert after > before if column == "maintain_at" else after < before


def test_a_repair_in_between(session: Session, order: Ids, workers: list[psycopg.Connection]) -> None:
    """What was taken counts: the order goes on where it was."""
    done = [dequeue(workers[0])]
    workers[0].commit()
    sql(session, "SELECT fairqueue.queue_repair()")
    done.append([message.id for message in lease_of(session, 40)])
    assert [id_ for ids in done for id_ in ids] == order[:43]
    finish(session, workers, *done)


@pytest.mark.slow
@pytest.mark.shared_database(False)
@pytest.mark.parametrize(("channels", "each"), [(20, 150), (600, 5)], ids=["", "heads"])
def test_many_at_a_time(
    session: Session, engine: Engine, request: pytest.FixtureRequest, channels: int, each: int
) -> None:
    """Some roll back, some enqueue and cancel; each message is served once, and the scheduler is never wrong."""
    if channels > 100:
        request.getfixturevalue("heads")
    names = [f"c{number}" for number in range(channels)]
    fq.enqueue_many(session, [{"channel": name} for _ in range(each) for name in names])
    # The time of the last one comes first.
    fq.enqueue_many(session, [{"channel": name, "dequeue_at": FAR - nth} for nth, name in enumerate(names[::7])])
    session.commit()
    lease_of(session, 1)
    dice = random.Random(7)  # noqa: S311

    def work(seed: int) -> tuple[Ids, int]:
        dice = random.Random(seed)  # noqa: S311
        served: Ids = []
        taken = 0
        turn = text("SELECT max(turn) FROM fairqueue.rotation")
        with Session(engine) as worker:
            before = worker.scalar(turn)
            worker.commit()
            while batch := worker.scalars(fq.dequeue(limit=dice.randint(1, 8), lease=3600)).all():
                ids = [message.id for message in batch]
                if dice.random() < 0.1:
                    worker.rollback()
                    continue
                now = worker.scalar(turn)
                taken += before == now
                before = now
                worker.commit()
                served += ids
                if dice.random() < 0.02:
                    put(worker, f"late{dice.randrange(50)}", dice.randint(1, 3))
                if dice.random() < 0.02:
                    some = [dice.randrange(3000) for _ in range(3)]
                    worker.execute(fq.cancel(some))
                    worker.commit()
        return served, taken

    with ThreadPoolExecutor(4) as threads:
        working = [threads.submit(work, dice.randrange(1000)) for _ in range(4)]
        while wait(working, 0.01).not_done:  # to leave time to them
            assert fq.check(session) == []
            session.commit()
    results = [future.result() for future in working]
    served = [id_ for ids, _ in results for id_ in ids]
    ready = text("SELECT id FROM fairqueue.message WHERE leased_until IS NULL AND dequeue_at < :far")
    left = session.scalars(ready, {"far": FAR - channels}).all()
    assert left == []
    assert len(served) == len(set(served))
    check_invariants(session.connection())
    assert sum(taken for _, taken in results) > 100


def test_the_order_is_that_of_the_plan(session: Session, engine: Engine) -> None:
    """Of whoever takes part: no message is left behind while later ones are served."""
    for channel in CHANNELS:
        put(session, channel, 60)
    lease_of(session, 1)
    plan_ahead(session, 300)
    lease_of(session, 1)
    order = ids_planned(session)

    def work(limit: int) -> Ids:
        served: Ids = []
        with Session(engine) as worker:
            while len(served) < 60 and (batch := lease_of(worker, limit)):
                served += [message.id for message in batch]
        return served

    with ThreadPoolExecutor(4) as threads:
        served = {id_ for ids in threads.map(work, (1, 2, 3, 5)) for id_ in ids}
    assert served == {*order[: len(served)]}
    assert len(served) >= 240
