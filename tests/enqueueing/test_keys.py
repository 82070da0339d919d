"""No two live messages of a channel have the same key, and a second one raises, is ignored or replaces.

Whoever comes first, and however the transactions end: that is in test_keys_concurrent.py.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
from psycopg import errors
from sqlalchemy import Engine, select, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession
from sqlalchemy.orm import Session

import fairqueue as fq
from fairqueue.errors import translated
from tests.acts import expire, lease_of, put
from tests.enqueueing.keyed import KEY, MODES, live, message

pytestmark = pytest.mark.shared_database

Enqueue = Callable[..., int | None]


def by_function(session: Session, mode: Any, payload: Any, **fields: Any) -> int | None:
    id_: int = fq.enqueue_unique(session, "acme", payload, key=KEY, on_conflict=mode, **fields)
    return id_


def by_many(session: Session, mode: Any, payload: Any, **fields: Any) -> int | None:
    rows: list[Any] = [{"channel": "acme", "payload": payload, "key": KEY, **fields}]
    ids: list[int | None] = fq.enqueue_many(session, rows, on_conflict=mode)
    return ids[0]


def by_sql(session: Session, mode: Any, payload: Any, **fields: Any) -> int | None:
    named = {"payload": json.dumps(payload), "key": KEY, "on_conflict": mode, **fields}
    arguments = ", ".join(f"{name} => :{name}" for name in named)
    call = text(f"SELECT fairqueue.message_create('acme', {arguments})")
    try:
        id_: int = session.scalars(call, named).one()
    except IntegrityError as error:
        meant = translated(error)
        assert isinstance(meant, fq.DuplicateKey)
        raise meant from error
    return id_


every_door = pytest.mark.parametrize("enqueue", [by_function, by_many, by_sql])


@every_door
class TestNoneIsLive:
    """The key is free: never used, or its message has ended in whatever way."""

    @pytest.mark.parametrize("mode", MODES)
    def test_never_used(self, session: Session, enqueue: Enqueue, mode: str) -> None:
        id_ = enqueue(session, mode, 1)
        session.commit()
        assert live(session) == [(id_, 1)]

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("ended", ["completed", "cancelled", "deleted", "dead", "rolled back"])
    def test_again(self, session: Session, enqueue: Enqueue, mode: str, ended: str) -> None:
        first = enqueue(session, "raise", 1, max_attempts=1)
        if ended == "rolled back":
            session.rollback()
        else:
            session.commit()
            [leased] = lease_of(session)
            if ended == "completed":
                session.execute(fq.complete(leased))
            elif ended == "cancelled":
                session.execute(fq.cancel(leased))
            elif ended == "deleted":
                session.delete(message(session, leased.id))
            else:
                session.execute(fq.fail(leased, "broken"))
            session.commit()
        second = enqueue(session, mode, 2)
        session.commit()
        assert second is not None
        assert first is not None
        assert second > first
        assert live(session) == [(second, 2)]

    @pytest.mark.parametrize("mode", MODES)
    def test_elsewhere(self, session: Session, enqueue: Enqueue, mode: str) -> None:
        """A key is the channel's own."""
        put(session, "globex", key=KEY)
        put(session, "acme", key=KEY, queue="other")
        put(session, "acme", key=KEY.upper())
        assert enqueue(session, mode, 1) == 4


@every_door
@pytest.mark.parametrize("leased", [False, True], ids=["ready", "leased"])
class TestOneIsLive:
    def before(self, session: Session, leased: bool) -> int:
        [id_] = put(session, "acme", payload="old", key=KEY, body=b"old", priority=5, max_attempts=3, backoff=7)
        if leased:
            assert [m.id for m in lease_of(session)] == [id_]
        return id_

    def test_raise(self, session: Session, enqueue: Enqueue, leased: bool) -> None:
        id_ = self.before(session, leased)
        with pytest.raises(fq.DuplicateKey, match=KEY):
            enqueue(session, "raise", "new")
        session.rollback()
        assert live(session) == [(id_, "old")]

    def test_ignore(self, session: Session, enqueue: Enqueue, leased: bool) -> None:
        id_ = self.before(session, leased)
        assert enqueue(session, "ignore", "new") == (None if enqueue is by_many else id_)
        session.commit()
        assert live(session) == [(id_, "old")]

    def test_replace(self, session: Session, enqueue: Enqueue, leased: bool) -> None:
        id_ = self.before(session, leased)
        new = enqueue(session, "replace", "new", cost=2)
        session.commit()
        assert new is not None
        assert live(session) == [(new, "new")]
        assert (new == id_) is not leased
        replaced = message(session, new)
        assert (replaced.cost, replaced.body, replaced.max_attempts, replaced.backoff) == (2, None, None, None)
        fields = {"body": b"newer", "cost": 3, "max_attempts": 5, "backoff": 9}
        assert enqueue(session, "replace", "newer", **fields) == new
        session.commit()
        replaced = message(session, new)
        assert {field: getattr(replaced, field) for field in fields} == fields
        assert replaced.payload == "newer"
        if leased:  # what runs goes its way, without the key
            running = message(session, id_)
            assert (running.key, running.payload, running.attempt) == (None, "old", 1)
            assert running.leased_until is not None

    def test_several_times_in_one_transaction(self, session: Session, enqueue: Enqueue, leased: bool) -> None:
        id_ = self.before(session, leased)
        new = [enqueue(session, "replace", number) for number in range(3)]
        assert enqueue(session, "ignore", 3) in {None, new[0]}
        session.commit()
        assert live(session) == [(new[0], 2)]
        assert len(set(new)) == 1
        assert (new[0] == id_) is not leased


class TestReplace:
    """What becomes of a message that is ready."""

    def test_starts_anew(self, session: Session) -> None:
        """Attempts, error and state belonged to the old contents. The attempt number goes on: it is the fence."""
        fq.enqueue_unique(session, "acme", "old", key=KEY, max_attempts=2)
        session.commit()
        [leased] = lease_of(session)
        session.execute(fq.defer(leased, state={"page": 7}))
        session.commit()
        [leased] = lease_of(session)
        session.execute(fq.fail(leased, "broken", delay=60))
        session.commit()
        id_ = fq.enqueue_unique(session, "acme", "new", key=KEY, on_conflict="replace", max_attempts=2)
        session.commit()
        [again] = lease_of(session)
        assert (again.id, again.payload, again.attempt) == (id_, "new", 3)
        assert (again.state, again.error) == (None, None)
        assert session.execute(fq.fail(again)).one().result == "failed"
        session.commit()
        assert message(session, id_).payload == "new", "one failure of two allowed: not dead yet"
        assert session.execute(fq.complete(leased)).one().result == "stale"

    def test_keeps_its_place(self, session: Session) -> None:
        """One that is replaced faster than its turn comes is served all the same."""
        first = fq.enqueue_unique(session, "acme", 0, key=KEY)
        put(session, "acme")
        for number in range(1, 4):
            assert fq.enqueue_unique(session, "acme", number, key=KEY, on_conflict="replace") == first
            session.commit()
        assert [(m.id, m.payload) for m in lease_of(session)] == [(first, 3)]

    def test_is_not_put_off(self, session: Session) -> None:
        """Without a time, "now" is meant: what was scheduled for later is served at once."""
        fq.enqueue_unique(session, "acme", "old", key=KEY, delay=3600)
        session.commit()
        fq.enqueue_unique(session, "acme", "new", key=KEY, on_conflict="replace")
        session.commit()
        assert [m.payload for m in lease_of(session)] == ["new"]

    @pytest.mark.parametrize("when", [{"delay": 3600}, {"dequeue_at": 4_102_444_800_000}])
    def test_a_time_of_its_own(self, session: Session, when: dict[str, Any]) -> None:
        fq.enqueue_unique(session, "acme", "old", key=KEY)
        session.commit()
        fq.enqueue_unique(session, "acme", "new", key=KEY, on_conflict="replace", **when)
        session.commit()
        assert lease_of(session) == []

    @pytest.mark.parametrize("again", ["enqueue_unique", "enqueue_many", "SQL"])
    def test_a_priority_of_0(self, session: Session, again: str) -> None:
        """It gives up the place that it had by a higher one."""
        put(session, "acme", payload="old", key=KEY, priority=5)
        put(session, "acme", payload="first", priority=1)
        if again == "enqueue_unique":
            fq.enqueue_unique(session, "acme", "new", key=KEY, on_conflict="replace", priority=0)
        elif again == "enqueue_many":
            row: fq.MessageRow = {"channel": "acme", "payload": "new", "key": KEY, "priority": 0}
            fq.enqueue_many(session, [row], on_conflict="replace")
        else:
            create = (
                "SELECT fairqueue.message_create('acme', '%s', key => '%s', on_conflict => 'replace', priority => 0)"
            )
            session.execute(text(create % ('"new"', KEY)))
        session.commit()
        assert [m.payload for m in lease_of(session, 2)] == ["first", "new"]

    def test_a_priority(self, session: Session) -> None:
        put(session, "acme", payload="first")
        fq.enqueue_unique(session, "acme", "old", key=KEY)
        session.commit()
        assert lease_of(session, 0 + 1)[0].payload == "first"
        put(session, "acme", payload="third", priority=1)
        fq.enqueue_unique(session, "acme", "new", key=KEY, on_conflict="replace", priority=2)
        session.commit()
        assert [m.payload for m in lease_of(session, 2)] == ["new", "third"]

    def test_a_lease_that_ran_out(self, session: Session) -> None:
        """It may still be worked on, so it is left alone; put back, it is a message without a key."""
        old = fq.enqueue_unique(session, "acme", "old", key=KEY)
        session.commit()
        lease_of(session)
        expire(session, [old])
        new = fq.enqueue_unique(session, "acme", "new", key=KEY, on_conflict="replace")
        session.commit()
        assert {m.id: m.payload for m in lease_of(session, 9)} == {old: "old", new: "new"}


class TestMany:
    def test_with_and_without_keys(self, session: Session) -> None:
        """None stands for what was ignored; the ids and the order of service are those of the rows."""
        [old] = put(session, "acme", payload="old", key="b")
        keys = ["z", None, "b", "a", None, "a", "c"]
        rows: list[fq.MessageRow] = [{"channel": "acme", "payload": n, "key": key} for n, key in enumerate(keys)]
        ids = fq.enqueue_many(session, rows, on_conflict="ignore")
        session.commit()
        made = [id_ for id_ in ids if id_ is not None]
        assert [id_ is None for id_ in ids] == [False, False, True, False, False, True, False]
        assert made == sorted(made)
        assert [m.payload for m in lease_of(session, 99)] == ["old", 0, 1, 3, 4, 6]
        assert old < made[0]

    def test_replace(self, session: Session) -> None:
        """As if each came after the other: the last one of a key counts."""
        [old] = put(session, "acme", payload="old", key="b")
        keys = ["z", None, "b", "a", "a"]
        rows: list[fq.MessageRow] = [{"channel": "acme", "payload": n, "key": key} for n, key in enumerate(keys)]
        ids = fq.enqueue_many(session, rows, on_conflict="replace")
        session.commit()
        assert ids[2] == old
        assert ids[3] == ids[4]
        assert [m.payload for m in lease_of(session, 99)] == [2, 0, 1, 4]

    @pytest.mark.parametrize("mode", MODES)
    def test_in_the_order_of_the_rows(self, session: Session, mode: Any) -> None:
        """Whatever the order of keys, and also where they take more than a millisecond."""
        rows: list[Any] = [{"channel": "acme", "payload": n, "key": str(9999 - n)} for n in range(2000)]
        ids = fq.enqueue_many(session, rows, on_conflict=mode)
        session.commit()
        assert ids == sorted(ids)
        served = session.scalars(text("SELECT payload::integer FROM fairqueue.message ORDER BY dequeue_at, id"))
        assert list(served) == list(range(2000))

    def test_raise_leaves_nothing(self, session: Session) -> None:
        put(session, "acme", payload="old", key=KEY)
        rows: list[fq.MessageRow] = [{"channel": "acme"}, {"channel": "acme", "key": KEY}]
        with pytest.raises(fq.DuplicateKey, match=f"channel 'acme' of queue 'default' has a live .* '{KEY}'"):
            fq.enqueue_many(session, rows)
        session.rollback()
        with pytest.raises(fq.DuplicateKey, match="Given in place 2"):
            fq.enqueue_many(session, [{"channel": "globex", "key": "twice"}, {"channel": "globex", "key": "twice"}])
        session.rollback()
        assert session.scalar(text("SELECT count(*) FROM fairqueue.message")) == 1

    def test_copy(self, session: Session) -> None:
        fq.enqueue_copy(session, [{"channel": "acme", "key": "a", "max_attempts": 3, "backoff": 1.5}, {"channel": "b"}])
        session.commit()
        first = message(session, 1)
        assert (first.key, first.max_attempts, first.backoff) == ("a", 3, 1.5)
        with pytest.raises(fq.DuplicateKey, match="acme, a"):
            fq.enqueue_copy(session, [{"channel": "c"}, {"channel": "acme", "key": "a"}])
        session.rollback()
        assert session.scalar(text("SELECT count(*) FROM fairqueue.message")) == 2

    @pytest.mark.parametrize(("mode", "left"), [("replace", range(993, 1000)), ("ignore", range(7))])
    def test_of_a_thousand_with_few_keys(self, session: Session, mode: Any, left: range) -> None:
        """More than what is equal stays in order by itself: the last one of a key counts, or the first one."""
        keys = [f"k{number * 5 % 7}" for number in range(1000)]
        rows: list[Any] = [{"channel": "acme", "key": key, "payload": number} for number, key in enumerate(keys)]
        ids = fq.enqueue_many(session, rows, on_conflict=mode)
        session.commit()
        entered = {message.key: message.payload for message in session.scalars(select(fq.Message))}
        assert entered == {keys[number]: number for number in left}
        assert [id_ is not None for id_ in ids] == [mode == "replace" or number in left for number in range(1000)]


class TestSession:
    """session.add() and enqueue() know of a conflict when they are flushed."""

    def test_integrity_error(self, session: Session) -> None:
        put(session, "acme", key=KEY)
        fq.enqueue(session, "acme", key=KEY)
        with pytest.raises(IntegrityError, match="message_key") as error:
            session.flush()
        assert isinstance(translated(error.value), fq.DuplicateKey)

    @pytest.mark.shared_database(False)
    def test_translated(self, engine: Engine, session: Session) -> None:
        for _ in range(2):
            fq.translate_errors(engine)
        put(session, "acme", key=KEY)
        session.add(fq.Message("acme", key=KEY))
        with pytest.raises(fq.DuplicateKey, match=f"default, acme, {KEY}") as error:
            session.commit()
        assert isinstance(error.value.__cause__, errors.UniqueViolation)
        session.rollback()
        session.add(fq.Channel("acme"))
        session.flush()
        session.execute(text("SAVEPOINT before"))
        with pytest.raises(IntegrityError, match="channel_pkey"):
            session.execute(text("INSERT INTO fairqueue.channel (name) VALUES ('acme')"))

    @pytest.mark.shared_database(False)
    @pytest.mark.parametrize("columns", ["key", "lower(key)", "channel, key"])
    def test_a_table_of_the_same_name(self, engine: Engine, session: Session, columns: str) -> None:
        """It is the application's, in another schema."""
        fq.translate_errors(engine)
        session.execute(text("CREATE TABLE public.message (channel text, key text)"))
        session.execute(text(f"CREATE UNIQUE INDEX message_key ON public.message ({columns})"))
        with pytest.raises(IntegrityError, match="message_key"):
            session.execute(text("INSERT INTO public.message VALUES ('acme', 'a'), ('acme', 'a')"))

    def test_savepoint(self, session: Session) -> None:
        put(session, "acme", payload="old", key=KEY)
        fq.enqueue(session, "acme", "before")
        session.flush()
        with pytest.raises(fq.DuplicateKey), session.begin_nested():
            fq.enqueue_unique(session, "acme", "new", key=KEY, on_conflict="raise")
        session.commit()
        assert [m.payload for m in lease_of(session, 9)] == ["old", "before"]

    def test_key_can_be_taken_away(self, session: Session) -> None:
        """A key is a column like any other."""
        [id_] = put(session, "acme", key=KEY)
        message(session, id_).key = None
        session.commit()
        assert put(session, "acme", key=KEY) != [id_]

    async def test_async(self, async_engine: AsyncEngine) -> None:
        fq.translate_errors(async_engine)
        async with AsyncSession(async_engine) as session:
            first = await fq.enqueue_unique(session, "acme", 1, key=KEY)
            assert await fq.enqueue_unique(session, "acme", 2, key=KEY) == first
            assert await fq.enqueue_many(session, [{"channel": "acme", "key": KEY}], on_conflict="ignore") == [None]
            await session.commit()
            fq.enqueue(session, "acme", 3, key=KEY)
            with pytest.raises(fq.DuplicateKey):
                await session.commit()
            await session.rollback()
            found = (await session.scalars(select(fq.Message))).all()
            assert [(m.id, m.payload) for m in found] == [(first, 1)]
