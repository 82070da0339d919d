"""Bad input in Python gets one clear error that names the field, and nothing is written.

See test_bad_input_in_sql.py for the same in the database.
"""

import asyncio
import json
import math
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, create_engine, literal, select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Session, scoped_session, sessionmaker

import fairqueue as fq
from fairqueue import payloads, roles, schema
from fairqueue.payloads import JSONPayload
from fairqueue.status import status
from fairqueue.testing import assert_enqueued, enqueued
from tests.fixtures.connections import Raw
from tests.observing import observer, rows

NAN, INF = math.nan, math.inf
ROUND: list[Any] = []
ROUND.append(ROUND)
DEEP: Any = []
for _ in range(100_000):
    DEEP = [DEEP]
# Nobody is there to ask: what is refused is refused before.
LOST = create_engine("postgresql+psycopg://nobody@localhost:1/nowhere")
NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)

NAMES = {
    "none": None,
    "empty": "",
    "256 characters": "x" * 256,
    "1 MB": "x" * 1_000_000,
    "with NUL": "nul\x00",
    "with half a surrogate pair": "half \ud83d",
    "number": 7,
    "bytes": b"acme",
}
NUMBERS = [-1, 0, NAN, INF, -INF, True, "1", None]
NOT_JSON = [
    NAN,
    INF,
    {"deep": [{"er": -INF}]},
    "nul \x00",
    "\\u0000, and behind a backslash: \\\x00",
    {"a": ["b", {"nul \x00": 1}]},
    ["half \ud83d"],
    {"half \udfff": 1},
    "wrong way round \ude00\ud83d",
    "backslash \\ud83d\ude00 and half",
    object(),
    {1, 2},
    b"bytes",
    NOON,
    {("a", "b"): 1},
    ROUND,
    DEEP,
]

CASES: list[tuple[dict[str, Any], str]] = [
    *[({"channel": name}, "^channel (must|holds)") for name in NAMES.values()],
    *[({"queue": name}, "^queue (must|holds)") for name in NAMES.values()],
    *[({"cost": number}, "^cost must be") for number in [*NUMBERS, 1_000_001]],
    *[({"payload": value}, "^payload (must be|holds)") for value in NOT_JSON],
    *[({"body": value}, "^body must be bytes") for value in ["text", 7, [1]]],
    *[({"delay": value}, "^delay must be between 0 and") for value in [-1, NAN, INF, "1", True, 1e9]],
    ({"delay": timedelta(days=-1)}, "^delay must be between 0 and"),
    *[({"at": value}, "^at must be a datetime with a time zone") for value in [datetime(2030, 1, 1)]],  # noqa: DTZ001
    *[({"at": value}, "^at must be a datetime with a time zone") for value in ["now", 0, date(2030, 1, 1)]],
    *[({"priority": value}, "^priority must be a whole number") for value in [-1, 1.5, True, "1", NAN, 2**70]],
    *[({"dequeue_at": value}, "^dequeue_at must be Unix time") for value in [1.5, True, "1", 2**63, NOON]],
    *[({"key": name}, "^key (must|holds)") for name in NAMES.values() if name is not None],
    *[({"max_attempts": value}, "^max_attempts must be a whole number from 1 to") for value in [0, -1, 1.5, True, "1"]],
    ({"max_attempts": 2**31}, "^max_attempts must be a whole number from 1 to 2147483647, not 2147483648"),
    *[({"backoff": value}, "^backoff must be between 0 and") for value in [-1, NAN, INF, True, "1", 31_557_601]],
    ({"backoff": timedelta(days=-1)}, "^backoff must be between 0 and"),
    ({"at": NOON, "priority": 1}, "only one of at, priority may be given"),
    ({"delay": 1, "priority": 1}, "only one of delay, priority may be given"),
    ({"delay": 1, "at": NOON, "dequeue_at": 1}, "only one of delay, at, dequeue_at may be given"),
]


def add(session: Session, row: dict[str, Any]) -> None:
    session.add(fq.Message(**row))
    session.flush()


def call(session: Session, row: dict[str, Any]) -> None:
    fq.enqueue(session, **row)
    session.flush()


FACES: dict[str, Callable[[Session, dict[str, Any]], object]] = {
    "Message": add,
    "enqueue": call,
    "enqueue_unique": lambda session, row: fq.enqueue_unique(session, **{"key": "k", **row}),
    "enqueue_many": lambda session, row: fq.enqueue_many(session, [{"channel": "acme"}, row]),  # type: ignore[list-item]
    "enqueue_copy": lambda session, row: fq.enqueue_copy(session, [{"channel": "acme"}, row]),  # type: ignore[list-item]
}


@pytest.mark.parametrize("face", FACES)
def test_bad_messages(session: Session, raw: Raw, database_url: str, face: str) -> None:
    """Every bad value at every door: one error each that names the field, and in the end an empty database."""
    for row, expected in CASES:
        with pytest.raises(fq.InvalidValue) as error:
            FACES[face](session, {"channel": "acme", **row})
        session.rollback()
        text = str(error.value)
        if face in {"enqueue_many", "enqueue_copy"}:
            assert text.startswith("row 1: ")
            text = text.removeprefix("row 1: ")
        assert pytest.RaisesExc(fq.InvalidValue, match=expected).matches(fq.InvalidValue(text)), (row, text)
        assert len(text) < 2_000_000
    session.commit()
    assert rows(observer(raw, database_url)) == {}


#: The most there may be of everything, and of some the least.
EXTREMES: list[dict[str, Any]] = [
    *({"cost": 1_000_000}, {"cost": 1e-300}, {"delay": 315_576_000}, {"priority": 2**62 - 1}),
    *({"dequeue_at": 2**62 - 1}, {"dequeue_at": 1 - 2**62}, {"max_attempts": 2**31 - 1}, {"backoff": 31_557_600}),
]


@pytest.mark.parametrize("face", FACES)
def test_extreme_messages(session: Session, face: str) -> None:
    """Neither the library nor the database minds."""
    for row in EXTREMES:
        FACES[face](session, {"channel": "acme", **row})
        stored = session.scalars(select(fq.Message.channel)).all()
        assert stored == ["acme"] * (2 if face in ("enqueue_many", "enqueue_copy") else 1), row
        session.rollback()


@pytest.mark.parametrize(
    "where",
    [
        *(LOST, create_async_engine(LOST.url), sessionmaker(LOST), async_sessionmaker(), scoped_session),
        *(None, "postgresql://u:s3cret@h/d", Session, AsyncSession, fq.Message("acme")),
    ],
    ids=lambda where: getattr(where, "__name__", None) or type(where).__name__,
)
def test_what_is_no_session(where: Any) -> None:
    """One error at every door, that tells what is wanted, and nothing of a URL."""
    doors: list[Callable[[Any, dict[str, Any]], object]]
    doors = [*FACES.values(), lambda session, _: fq.check(session), lambda session, _: status(session)]
    doors += [lambda session, _: enqueued(session), lambda session, _: assert_enqueued(session)]
    for door in doors:
        if door is add:
            continue
        with pytest.raises(fq.InvalidValue, match=r"^session must be a Session or an AsyncSession, .* not ") as error:
            door(where, {"channel": "acme"})
        assert str(error.value).endswith(type(where).__name__)


def test_a_connection_is_no_session(engine: Engine) -> None:
    """There is nothing to be flushed; what needs no flush takes one."""
    with engine.connect() as connection:
        given: Any = connection
        for door in (enqueued, assert_enqueued):
            with pytest.raises(fq.InvalidValue, match=r"^session must be a Session or .* not Connection$"):
                door(given)
        assert (fq.check(connection), status(connection).queues) == ([], [])


@pytest.mark.parametrize("wrong", [LOST, create_async_engine(LOST.url), Session(LOST), None])
@pytest.mark.parametrize(
    "act",
    [
        *(fq.verify, schema.install, schema.uninstall, schema.installed_version),
        *(partial(roles.grant, role="app", kind="worker"), partial(roles.revoke, role="app")),
    ],
)
def test_what_is_no_connection(act: Any, wrong: Any) -> None:
    with pytest.raises(fq.InvalidValue, match=r"^connection must be a Connection, not .*: take that of engine.begin"):
        act(wrong)


def test_what_is_no_metadata() -> None:
    class Base(DeclarativeBase):
        pass

    with pytest.raises(fq.InvalidValue, match=r"^metadata must be a MetaData, not <class '.*Base'>: give .* Base.meta"):
        fq.attach(Base)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("wrong", [Session(LOST), AsyncSession(create_async_engine(LOST.url)), "postgresql://u:s@h/d"])
def test_what_is_no_engine(wrong: Any) -> None:
    with pytest.raises(fq.InvalidValue, match=r"^engine must be an Engine or an AsyncEngine, not (AsyncS|S|s)"):
        fq.translate_errors(wrong)


def test_a_connection_enqueues_nothing(engine: Engine, database_url: str) -> None:
    """It has no flush, so what its session has would be missing; to look at, it is good enough."""
    refused = r"^session must be a Session or an AsyncSession, .* not (Async)?Connection$"
    with engine.connect() as connection:
        for name in ("enqueue", "enqueue_unique", "enqueue_many", "enqueue_copy"):
            with pytest.raises(fq.InvalidValue, match=refused):
                FACES[name](connection, {"channel": "acme"})  # type: ignore[arg-type]
        assert status(connection).queues == []

    async def look() -> None:
        engine = create_async_engine(database_url)
        async with engine.connect() as connection:
            with pytest.raises(fq.InvalidValue, match=refused):
                fq.enqueue_many(connection, [])  # type: ignore[call-overload]
            assert (await status(connection)).queues == []
        await engine.dispose()

    asyncio.run(look())


class TestFieldsThatAreNone:
    """A misspelt field is an error, not a message without it."""

    @pytest.mark.parametrize("door", [fq.enqueue_many, fq.enqueue_copy])
    def test_of_rows(self, session: Session, door: Callable[..., object]) -> None:
        with pytest.raises(
            fq.InvalidValue, match="row 0: unknown field chanel, prioritty: a message has at, backoff, body,"
        ):
            door(session, [{"chanel": "acme", "prioritty": 3}])
        session.rollback()
        with pytest.raises(fq.InvalidValue, match="row 1: channel is missing"):
            door(session, [{"channel": "acme"}, {"payload": 1}])
        session.rollback()
        with pytest.raises(fq.InvalidValue, match="row 0: unknown field 0, chanel: a message has"):
            door(session, [{"chanel": "acme", 0: 1}])

    @pytest.mark.parametrize("door", [fq.enqueue_many, fq.enqueue_copy])
    @pytest.mark.parametrize("row", ["acme", None, 7, ["acme"]])
    def test_rows_that_are_none(self, session: Session, door: Callable[..., object], row: object) -> None:
        with pytest.raises(fq.InvalidValue, match="row 0: a message is a dict of its fields, not"):
            door(session, [row])

    def test_of_models(self) -> None:
        models: list[tuple[Callable[..., object], str]]
        models = [(fq.Message, "channel"), (fq.Channel, "name"), (fq.Queue, "name")]
        for model, field in models:
            with pytest.raises(TypeError, match="'wieght'"):
                model(**{field: "acme", "wieght": 2})


class TestConflicts:
    @pytest.mark.parametrize("mode", ["", "update", None, True, ["raise"]])
    def test_on_conflict(self, session: Session, mode: Any) -> None:
        expected = r"^on_conflict must be 'raise' or 'ignore' or 'replace', not"
        with pytest.raises(fq.InvalidValue, match=expected):
            fq.enqueue_unique(session, "acme", key="k", on_conflict=mode)
        with pytest.raises(fq.InvalidValue, match=expected):
            fq.enqueue_many(session, [], on_conflict=mode)

    def test_no_key(self, session: Session) -> None:
        with pytest.raises(fq.InvalidValue, match="key must be text, not None: use enqueue for messages without one"):
            fq.enqueue_unique(session, "acme", key=None)  # type: ignore[call-overload]

    def test_unknown_field(self, session: Session) -> None:
        with pytest.raises(fq.InvalidValue, match="unknown field wieght"):
            fq.enqueue_unique(session, "acme", key="k", wieght=1)  # type: ignore[call-overload]


NOT_COUNTS = [-1, 0, 1.5, NAN, INF, True, "1", 2**31]
NOT_SECONDS = [-1, NAN, INF, True, "1", 31_557_600.1]
WEIGHT = (r"a number from 0.01 to 1000", [-1, 0, NAN, INF, -INF, True, "1", 0.0099, 1000.1])
COUNT = (r"a whole number from 1 to 2147483647", NOT_COUNTS)
INTERVAL = (r"a whole number from 0 to 31557600000", [-1, 1.5, NAN, True, "1", timedelta(1), 31_557_600_001])
BURST = (r"a whole number from 1 to 1000000", [*NOT_COUNTS, 1_000_001])
OVERFLOW = (r"'reject' or 'drop'", ["", "Drop", 1, True, b"drop"])
FLAG = (r"True or False", [None, 0, 1, "yes"])
MOMENT = (r"a datetime with a time zone", [datetime(2030, 1, 1), "tomorrow", 0, date(2030, 1, 1)])  # noqa: DTZ001
SECONDS = (r"between 0 and 31557600 seconds", NOT_SECONDS)

CHANNEL: dict[str, tuple[str, list[Any]]] = {
    "weight": WEIGHT,
    "max_concurrency": COUNT,
    "release_interval_ms": INTERVAL,
    "burst": BURST,
    "max_size": COUNT,
    "overflow": OVERFLOW,
    "paused": FLAG,
    "resume_at": MOMENT,
}
QUEUE: dict[str, tuple[str, list[Any]]] = {
    "max_concurrency": COUNT,
    "paused": FLAG,
    "resume_at": MOMENT,
    "max_attempts": (COUNT[0], [*NOT_COUNTS, None]),
    "backoff": (SECONDS[0], [*NOT_SECONDS, None]),
    "max_backoff": (SECONDS[0], [*NOT_SECONDS, None]),
    "history_days": (r"a whole number from 0 to 36500", [-1, 1.5, NAN, True, "1", 36_501, None]),
    "channel_weight": (WEIGHT[0], [*WEIGHT[1], None]),
    "channel_max_concurrency": COUNT,
    "channel_release_interval_ms": (INTERVAL[0], [*INTERVAL[1], None]),
    "channel_burst": (BURST[0], [*BURST[1], None]),
    "channel_max_size": COUNT,
    "channel_overflow": (OVERFLOW[0], [*OVERFLOW[1], None]),
}
FIELDS = [(fq.Channel, field) for field in CHANNEL] + [(fq.Queue, field) for field in QUEUE]


class TestPolicies:
    def test_every_field_is_here(self) -> None:
        for model, fields in ((fq.Channel, CHANNEL), (fq.Queue, QUEUE)):
            assert fields.keys() == set(model.__table__.c.keys()) - {"queue", "name", "created_at"}

    @pytest.mark.parametrize(("model", "field"), FIELDS, ids=lambda each: getattr(each, "__name__", each))
    def test_fields(self, model: Any, field: str) -> None:
        """When it is made, and later; the error names field, value and what it may be."""
        expected, values = (CHANNEL if model is fq.Channel else QUEUE)[field]
        other = {"paused": True} if field == "resume_at" else {}
        for value in values:
            with pytest.raises(fq.InvalidValue, match=f"^{field} must be {expected}, not ") as error:
                model("acme", **{field: value, **other})
            assert repr(value) in str(error.value)
            with pytest.raises(fq.InvalidValue, match=f"^{field} must be {expected}, not "):
                setattr(model("acme"), field, value)

    def test_extremes(self, session: Session) -> None:
        most: dict[str, Any] = {"release_interval_ms": 31_557_600_000, "burst": 1_000_000, "max_size": 2**31 - 1}
        ends: dict[str, Any] = {"max_attempts": 2**31 - 1, "backoff": 31_557_600, "max_backoff": 31_557_600}
        for weight in (0.01, 1000):
            own = {"weight": weight, "max_concurrency": 2**31 - 1, **most}
            session.merge(fq.Channel("acme", **own))
            channels = {f"channel_{field}": value for field, value in own.items()}
            session.merge(fq.Queue("default", history_days=36_500, **ends, **channels))
            session.flush()

    @pytest.mark.parametrize("model", [fq.Channel, fq.Queue])
    def test_an_end_without_a_pause(self, model: Any) -> None:
        for paused in ({}, {"paused": False}):
            with pytest.raises(fq.InvalidValue, match="resume_at says until when a pause lasts: give paused=True"):
                model("acme", resume_at=NOON, **paused)

    @pytest.mark.parametrize("until", MOMENT[1], ids=map(str, MOMENT[1]))
    def test_until(self, until: Any) -> None:
        with pytest.raises(fq.InvalidValue, match=r"^until must be a datetime with a time zone, not"):
            fq.pause(until=until)

    @pytest.mark.parametrize("end", [datetime.max, datetime(9999, 1, 1), datetime.min], ids=str)  # noqa: DTZ001, DTZ901
    def test_an_end_that_could_not_be_read_back(self, end: datetime) -> None:
        """Where the server is in another time zone, Python may not know the year."""
        end = end.replace(tzinfo=UTC)
        said = r"must be in the years 2 to 9998 \(UTC\), not (9999|0001)-.*\+00:00: leave it out for no end$"
        for model in (fq.Channel, fq.Queue):
            with pytest.raises(fq.InvalidValue, match=f"^resume_at {said}"):
                model("acme", paused=True, resume_at=end)
            with pytest.raises(fq.InvalidValue, match=f"^resume_at {said}"):
                model("acme").resume_at = end
        with pytest.raises(fq.InvalidValue, match=f"^until {said}"):
            fq.pause(until=end)

    @pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
    def test_names_to_pause(self, name: Any) -> None:
        statements: list[Callable[..., object]] = [fq.pause, fq.resume]
        for statement in statements:
            with pytest.raises(fq.InvalidValue, match=r"^queue (must|holds)"):
                statement(queue=name)
            if name is not None:  # which is the whole queue
                with pytest.raises(fq.InvalidValue, match=r"^channel (must|holds)"):
                    statement(channel=name)

    @pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
    def test_names(self, name: Any) -> None:
        for model, field in ((fq.Channel, "name"), (fq.Channel, "queue"), (fq.Queue, "name")):
            with pytest.raises(fq.InvalidValue, match=f"^{field} (must|holds)"):
                model(**{"name": "acme", field: name})

    def test_later(self) -> None:
        """Not only when they are made."""
        channel, message = fq.Channel("acme"), fq.Message("acme")
        with pytest.raises(fq.InvalidValue, match=r"^weight must be"):
            channel.weight = NAN
        for row, expected in CASES:
            [(field, value), *others] = row.items()
            if not others and field in message.__table__.c and field not in {"payload", "body"}:
                with pytest.raises(fq.InvalidValue, match=expected):
                    setattr(message, field, value)


class TestLeases:
    @pytest.mark.parametrize("limit", [0, -1, 10_001, True, 1.5, "1", None, NAN])
    def test_limit(self, limit: Any) -> None:
        with pytest.raises(fq.InvalidValue, match=r"^limit must be a whole number from 1 to 10000, not"):
            fq.dequeue(limit=limit)

    @pytest.mark.parametrize("lease", [0, -1, NAN, INF, True, "30", None, timedelta(0), timedelta(days=-1), 1e9])
    def test_lease(self, lease: Any) -> None:
        for statement in (fq.dequeue, lambda lease: fq.heartbeat((1, 1), lease=lease)):
            with pytest.raises(fq.InvalidValue, match=r"^lease must be between 0.001 and 315576000 seconds, not"):
                statement(lease=lease)

    @pytest.mark.parametrize("delay", [-1, NAN, INF, True, "30", timedelta(days=-1)])
    def test_delay(self, delay: Any) -> None:
        for statement in (fq.fail, fq.defer):
            with pytest.raises(fq.InvalidValue, match=r"^delay must be between 0 and 315576000 seconds, not"):
                statement((1, 1), delay=delay)

    @pytest.mark.parametrize("retry", [None, 0, "no"])
    def test_retry(self, retry: Any) -> None:
        with pytest.raises(fq.InvalidValue, match=r"^retry must be True or False, not"):
            fq.fail((1, 1), retry=retry)

    @pytest.mark.parametrize("name", [name for name in NAMES.values() if name is not None])
    def test_worker(self, name: Any) -> None:
        with pytest.raises(fq.InvalidValue, match=r"^worker (must|holds)"):
            fq.dequeue(worker=name)

    @pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
    def test_queue(self, name: Any) -> None:
        with pytest.raises(fq.InvalidValue, match=r"^queue (must|holds)"):
            fq.dequeue(queue=name)

    @pytest.mark.parametrize("state", NOT_JSON, ids=range(len(NOT_JSON)))
    def test_state(self, state: Any) -> None:
        with pytest.raises(fq.InvalidValue, match=r"^state (must be|holds)"):
            fq.defer((1, 1), state=state)

    @pytest.mark.parametrize("given", [7, None, 1.5, "ab", [7], [(1,)], (1, 2, 3), [("1", 1)], fq.Message("acme")])
    @pytest.mark.parametrize("statement", [fq.complete, fq.fail, fq.defer, fq.heartbeat])
    def test_no_leases(self, statement: Callable[[Any], object], given: Any) -> None:
        with pytest.raises(fq.InvalidValue, match=r"^a lease is a LeasedMessage from dequeue\(\) or a pair"):
            statement(given)

    @pytest.mark.parametrize("given", [1.5, True, "ab", ["1"], [None], fq.History()])
    @pytest.mark.parametrize(
        "statement", [fq.cancel, fq.redrive, fq.ending, lambda given: fq.wait_for(LOST, given, timeout=0)]
    )
    def test_no_messages(self, statement: Callable[[Any], object], given: Any) -> None:
        with pytest.raises(fq.InvalidValue, match=r"^a message is an id, a Message, a LeasedMessage or"):
            statement(given)

    def test_no_ids(self) -> None:
        """Numbers out of a URL, that no column could hold."""
        expected = rf"^id must be a whole number from {-(2**63)} to {2**63 - 1}, not {2**63}$"
        for statement in (fq.cancel, fq.redrive, fq.ending):
            with pytest.raises(fq.InvalidValue, match=expected):
                statement([2**63])
        with pytest.raises(fq.InvalidValue, match=expected):
            fq.complete((2**63, 1))
        with pytest.raises(fq.InvalidValue, match=rf"^attempt must be a whole number from .*, not {2**31}$"):
            fq.complete((1, 2**31))

    def test_nothing_to_redrive(self) -> None:
        redrive: Any = fq.redrive
        for arguments, text in (
            ({}, "one of messages and queue must be given, not none"),
            ({"messages": None}, "one of messages and queue must be given, not none"),
            ({"messages": [1], "queue": "default"}, "one of messages and queue must be given, not both"),
            ({"messages": [1], "channel": "acme"}, "channel 'acme' must be given with its queue, not with messages"),
            ({"queue": ""}, "queue must have 1 to 255 characters, not 0"),
            ({"queue": "default", "channel": "x" * 256}, "channel must have 1 to 255 characters, not 256"),
        ):
            with pytest.raises(fq.InvalidValue, match=f"^{text}$"):
                redrive(**arguments)


class TestWaiting:
    @pytest.mark.parametrize("timeout", [-1, NAN, INF, True, "30", timedelta(days=-1), 1e9])
    def test_timeout(self, timeout: Any) -> None:
        with pytest.raises(fq.InvalidValue, match=r"^timeout must be between 0 and 315576000 seconds, not"):
            fq.wait_for(LOST, 1, timeout=timeout)

    def test_engine(self, session: Session, engine: Engine) -> None:
        """What has a transaction sees no end of others."""
        with engine.connect() as connection:
            for given in (session, connection, create_async_engine(LOST.url).connect(), None, str(engine.url)):
                with pytest.raises(fq.InvalidValue, match=r"^engine must be an Engine or an AsyncEngine, not \w+:"):
                    fq.wait_for(given, 1, timeout=0)  # type: ignore[call-overload]

    @pytest.mark.parametrize("error", [7, b"broken", {}])
    def test_error(self, error: Any) -> None:
        with pytest.raises(fq.InvalidValue, match=r"^error must be text or an exception, not"):
            fq.fail((1, 1), error)

    def test_error_of_any_text(self, session: Session) -> None:
        """What a handler died of is not to be lost for a character that PostgreSQL can't store."""
        fq.enqueue(session, "acme")
        [message] = session.scalars(fq.dequeue())
        session.execute(fq.fail(message, FileNotFoundError("caf\udce9\x00.pdf"), delay=0))
        [message] = session.scalars(fq.dequeue())
        assert message.error == "FileNotFoundError: caf?.pdf"


class TestSize:
    def test_payload(self, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
        """In bytes of its JSON."""
        monkeypatch.setattr(payloads, "MAX_BYTES", 100)
        for payload, size in (("x" * 99, 101), (["x" * 98], 102), ("é" * 50, 102)):
            with pytest.raises(fq.InvalidValue, match=f"payload has {size} bytes as JSON, more than 100"):
                add(session, {"channel": "acme", "payload": payload})
            session.rollback()
        add(session, {"channel": "acme", "payload": "x" * 98})
        add(session, {"channel": "acme", "payload": "é" * 49})

    def test_body(self, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(payloads, "MAX_BYTES", 100)
        for body in (bytes(101), bytearray(101), memoryview(bytes(104)).cast("d")):
            with pytest.raises(fq.InvalidValue, match=r"body has 10[14] bytes, more than 100"):
                add(session, {"channel": "acme", "body": body})
            session.rollback()
        add(session, {"channel": "acme", "body": bytes(100)})


# Any JSON there is, and strings that come near to what JSON's own escapes look like.
TEXT = st.text() | st.text("\\u08dbcef\ud83d\ude00\x00", max_size=12) | st.text(st.characters(categories=["Cs"]))
ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=150)
@given(value=ANY_JSON)
@example(value="\\ud83d\ude00")
@example(value="\ud83d\ude00")
@example(value=[10**4000, -0.0, 5e-324, 1e308, 1e23, 0.1])
def test_any_json_round_trips_or_is_refused(engine: Engine, value: Any) -> None:
    """What is accepted comes back equal; all else is refused before anything is sent.

    One difference: jsonb keeps decimal numbers, so 1e23 comes back as 10**23, which is the same float.
    """
    with engine.connect() as connection:
        try:
            back = connection.scalar(select(literal(value, JSONPayload())))
        except fq.InvalidValue as error:
            assert str(error).startswith("payload ")  # noqa: PT017
            escaped = json.dumps(value, ensure_ascii=False)
            assert any(bad in escaped for bad in ("NaN", "Infinity", "\\u0000")) or has_surrogate(escaped)
        else:
            assert same(back, value)


def has_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def same(back: Any, value: Any) -> bool:
    """Equal, also in type, except that a float may come back as the int of the same text."""
    if isinstance(value, float):
        return isinstance(back, int | float) and float(back) == value
    if isinstance(value, list):
        return isinstance(back, list) and len(back) == len(value) and all(map(same, back, value))
    if isinstance(value, dict):
        return isinstance(back, dict) and back.keys() == value.keys() and all(same(back[k], value[k]) for k in value)
    return type(back) is type(value) and bool(back == value)
