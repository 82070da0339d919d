"""Bad input in Python gets one clear error that names the field, and nothing is written.

See test_bad_input_in_sql.py for the same in the database, and the modules of this name in limits/ and outcomes/.
"""

import asyncio
import json
from collections.abc import Callable
from datetime import date, datetime, timedelta, tzinfo
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, MetaData, literal, select
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Session, scoped_session, sessionmaker

import fairqueue as fq
from fairqueue import payloads, roles, schema
from fairqueue.installation import installations
from fairqueue.payloads import JSONPayload
from fairqueue.status import status
from fairqueue.testing import assert_enqueued, enqueued
from tests.fixtures.connections import Raw
from tests.observing import observer, rows
from tests.wrong import INF, LOST, NAMES, NAN, NOON, NOT_JSON

pytestmark = pytest.mark.shared_database

NUMBERS = [-1, 0, NAN, INF, -INF, True, "1", None]

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


def test_not_only_when_they_are_made() -> None:
    message = fq.Message("acme")
    for row, expected in CASES:
        [(field, value), *others] = row.items()
        if not others and field in message.__table__.c and field not in {"payload", "body"}:
            with pytest.raises(fq.InvalidValue, match=expected):
                setattr(message, field, value)


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


def test_a_time_zone_that_knows_no_difference_to_utc_is_none() -> None:
    class Nowhere(tzinfo):
        def utcoffset(self, dt: datetime | None) -> None:
            return None

        dst = tzname = utcoffset

    with pytest.raises(fq.InvalidValue, match=r"^at must be a datetime with a time zone, not "):
        fq.Message("acme", at=datetime(2030, 1, 1, tzinfo=Nowhere()))


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
    doors = [lambda session, _: fq.check(session), lambda session, _: status(session)]  # which take a connection, too
    doors += [door for door in FACES.values() if door is not add]
    doors += [lambda session, _: enqueued(session), lambda session, _: assert_enqueued(session)]
    for place, door in enumerate(doors):
        with pytest.raises(fq.InvalidValue, match=r"^session must be a Session or an AsyncSession, .* not ") as error:
            door(where, {"channel": "acme"})
        assert str(error.value).endswith(type(where).__name__)
        assert ("or a Connection" in str(error.value)) == (place < 2)


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
    metadata = MetaData()
    with pytest.raises(fq.InvalidValue, match=r"^manage must be True or False, not 'False'$"):
        fq.attach(metadata, manage="False")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    assert installations(metadata) == {}


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


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        ({1, 2}, "payload is not: set {1, 2};"),
        ({"a": [{"at": date(2030, 1, 31)}]}, "payload['a'][0]['at'] is not: date datetime.date(2030, 1, 31);"),
        ({"a": {(1, 2): "b"}}, "a key of payload['a'] is not: tuple (1, 2);"),
    ],
)
def test_what_json_has_no_form_for_is_named(payload: Any, said: str, session: Session) -> None:
    takes = "must be what json.dumps() takes, which"
    way_out = "make it text or a number"
    with pytest.raises(fq.InvalidValue) as refused:
        fq.enqueue_many(session, [{"channel": "acme", "payload": payload}])
    assert (
        str(refused.value) == f"row 0: payload {takes} {said} {way_out}, or add a TypedMessage, which has its own type"
    )
    with pytest.raises(fq.InvalidValue) as refused:
        fq.defer((1, 1), state=[{1}])
    assert str(refused.value) == f"state {takes} state[0] is not: set {{1}}; {way_out}"


def test_what_json_has_no_form_for_is_named_however_deep_it_is() -> None:
    """From Python 3.12 on json.dumps() gets there, where functions of Python's can't; how far depends on that."""
    payload: Any = {1, 2}
    for _ in range(1200):
        payload = [payload]
    with pytest.raises(fq.InvalidValue, match=r"^payload ") as refused:
        payloads.json_text(payload, "payload")
    assert len(str(refused.value)) < 1500
    for _ in range(100_000):
        payload = [{}, [], "", 1, payload]
    where, what = payloads._culprit("payload", payload)
    assert (where[:20], where[-6:], what) == ("payload[4][4][4][4][", "[0][0]", "set {1, 2}")
