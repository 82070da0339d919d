"""G15 in Python: bad input gets one clear error that names the field, and nothing is written.

See test_bad_input_in_sql.py for the same in the database.
"""

import json
import math
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine, literal, select
from sqlalchemy.orm import Session

import fairqueue as fq
from fairqueue import payloads
from fairqueue.payloads import JSONPayload
from tests.fixtures.connections import Raw
from tests.observing import observer, rows

NAN, INF = math.nan, math.inf
ROUND: list[Any] = []
ROUND.append(ROUND)
DEEP: Any = []
for _ in range(100_000):
    DEEP = [DEEP]
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
    "enqueue_many": lambda session, row: fq.enqueue_many(session, [{"channel": "acme"}, row]),  # type: ignore[list-item]
    "enqueue_copy": lambda session, row: fq.enqueue_copy(session, [{"channel": "acme"}, row]),  # type: ignore[list-item]
}


@pytest.mark.parametrize("face", FACES)
def test_bad_messages(session: Session, raw: Raw, database_url: str, face: str) -> None:
    """Every bad value at every door: one error each that names the field, and in the end an empty database."""
    for row, expected in CASES:
        if face == "enqueue" and "dequeue_at" in row:
            continue  # not a parameter of it
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


class TestFieldsThatAreNone:
    """A misspelt field is an error, not a message without it."""

    @pytest.mark.parametrize("door", [fq.enqueue_many, fq.enqueue_copy])
    def test_of_rows(self, session: Session, door: Callable[..., object]) -> None:
        with pytest.raises(fq.InvalidValue, match="row 0: unknown field chanel, prioritty: a message has at, body,"):
            door(session, [{"chanel": "acme", "prioritty": 3}])
        session.rollback()
        with pytest.raises(fq.InvalidValue, match="row 1: channel is missing"):
            door(session, [{"channel": "acme"}, {"payload": 1}])

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


class TestPolicies:
    @pytest.mark.parametrize("weight", [*NUMBERS, 0.0099, 1000.1])
    def test_weight(self, weight: Any) -> None:
        with pytest.raises(fq.InvalidValue, match=r"^weight must be a number from 0.01 to 1000, not"):
            fq.Channel("acme", weight=weight)

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
        with pytest.raises(fq.InvalidValue, match=r"^cost must be"):
            message.cost = -1
        with pytest.raises(fq.InvalidValue, match=r"^channel must have 1 to 255 characters, not 0"):
            message.channel = ""


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

    @pytest.mark.parametrize("delay", [-1, NAN, INF, True, "30", None, timedelta(days=-1)])
    def test_delay(self, delay: Any) -> None:
        for statement in (fq.fail, fq.defer):
            with pytest.raises(fq.InvalidValue, match=r"^delay must be between 0 and 315576000 seconds, not"):
                statement((1, 1), delay=delay)

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

    @pytest.mark.parametrize("given", [None, 1.5, "ab", ["1"], fq.Message("acme")])
    def test_nothing_to_cancel(self, given: Any) -> None:
        with pytest.raises(fq.InvalidValue, match=r"^a message is an id or a LeasedMessage, not"):
            fq.cancel(given)

    @pytest.mark.parametrize("error", [7, b"broken", {}])
    def test_error(self, error: Any) -> None:
        with pytest.raises(fq.InvalidValue, match=r"^error must be text or an exception, not"):
            fq.fail((1, 1), error)

    def test_error_of_any_text(self, session: Session) -> None:
        """What a handler died of is not to be lost for a character that PostgreSQL can't store."""
        fq.enqueue(session, "acme")
        [message] = session.scalars(fq.dequeue())
        session.execute(fq.fail(message, FileNotFoundError("caf\udce9\x00.pdf")))
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


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
