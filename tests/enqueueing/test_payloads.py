"""Typed payloads: JSON by default, or bytes, a dataclass, whatever Pydantic knows."""

import itertools
import json
import pickle
import sys
from dataclasses import FrozenInstanceError, dataclass, field
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from enum import Enum
from functools import partial
from threading import Lock
from typing import Annotated, Any, Generic, Literal, TypeVar
from uuid import UUID

import pytest
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Json, RootModel, computed_field
from pydantic.alias_generators import to_camel
from sqlalchemy import Engine, create_engine, select, text
from sqlalchemy.orm import Session
from typing_extensions import TypedDict

import fairqueue as fq

pytestmark = pytest.mark.shared_database


@dataclass
class Page:
    number: int


@dataclass
class Upload:
    path: str
    pages: list[Page] = field(default_factory=list)


class Colour(Enum):
    RED = "red"


class Order(BaseModel):
    id: UUID
    price: Decimal
    at: datetime
    patience: timedelta = timedelta(hours=1)
    colours: set[Colour] = {Colour.RED}
    data: bytes = b""


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, ser_json_bytes="base64", val_json_bytes="base64")
    at: datetime
    data: bytes


class Line(TypedDict):
    text: str


class Camel(BaseModel):
    model_config = ConfigDict(alias_generator=to_camel)
    doc_id: int


class Computed(BaseModel):
    model_config = ConfigDict(extra="forbid")
    net: int

    @computed_field
    def gross(self) -> int:
        return 2 * self.net


class Nested(BaseModel):
    pages: Json[list[int]]


class Excluding(BaseModel):
    a: int
    b: int = Field(exclude=True)


class UploadMessage(fq.TypedMessage[Upload]):
    """At the top of a module, so that what it reads can be pickled."""


ORDER = Order(id=UUID(int=7), price=Decimal("1.10"), at=datetime(2030, 1, 1, tzinfo=UTC), data=b"abc")
UPLOAD = Upload("a.pdf", [Page(1), Page(2)])


NUMBERS = itertools.count()


def typed(payload_type: Any) -> Any:
    """A message class; two of one name would be a warning."""
    return type(f"Typed{next(NUMBERS)}", (fq.TypedMessage,), {}, payload_type=payload_type)


def test_a_class_of_any_name() -> None:
    class Message(fq.TypedMessage[Upload], payload_type=Upload):
        pass

    assert Message("acme", UPLOAD).payload == UPLOAD
    with pytest.raises(fq.InvalidValue, match=r"Mine must derive from TypedMessage\[\.\.\.\] itself, not from Message"):
        type("Mine", (Message,), {})
    with pytest.raises(fq.InvalidValue, match=r"Mine must derive from TypedMessage\[\.\.\.\] itself, not from Message"):
        type("Mine", (fq.Message,), {})


@pytest.mark.parametrize("wrong", [Upload, fq.TypedMessage, "Message"])
def test_what_is_no_message_class(wrong: Any) -> None:
    """The class of the payload, say."""
    with pytest.raises(
        fq.InvalidValue, match=r"message_type must be Message or a TypedMessage, not .*(Message|Upload)"
    ):
        fq.dequeue(message_type=wrong)


def round_trip(session: Session, payload_type: Any, value: Any) -> Any:
    """Through the message class and the table, as a worker gets it."""
    Typed = typed(payload_type)  # noqa: N806
    session.add(Typed("acme", value))
    session.commit()
    [stored] = session.scalars(select(Typed))
    assert stored.payload == value
    [message] = session.scalars(fq.dequeue(message_type=Typed))
    session.execute(fq.complete(message))
    session.commit()
    return message.payload


@pytest.mark.parametrize(
    ("payload_type", "value"),
    [
        (Order, ORDER),
        (Strict, Strict(at=datetime(2030, 1, 1, tzinfo=UTC), data=b"\x00\xff")),
        (Upload, UPLOAD),
        (Line, {"text": "a"}),
        (list[int], [1, 2]),
        (Page | Upload, UPLOAD),
        (int, 0),
        (bytes, b"\x00\xff"),
        (bytes, b""),
        (Any, {"doc": [1, "two", None]}),
        (Order, None),
        (bytes, None),
        (Camel, Camel.model_validate({"docId": 1})),
        (Computed, Computed(net=1)),
        (Nested, Nested.model_validate({"pages": "[1]"})),
    ],
    ids=[
        *("model", "strict model", "dataclass", "TypedDict", "list", "union", "zero", "bytes", "no bytes"),
        *("JSON", "no model", "null bytes", "aliases", "computed", "JSON in JSON"),
    ],
)
def test_round_trip(session: Session, payload_type: Any, value: Any) -> None:
    back = round_trip(session, payload_type, value)
    assert back == value
    assert type(back) is type(value)


def test_what_could_not_be_read_back(session: Session) -> None:
    """It would be a dead letter, however often it is tried."""
    session.add(typed(Excluding)("acme", Excluding(a=1, b=2)))
    with pytest.raises(fq.InvalidValue, match=r"^payload can't be read back as .*Excluding.* once it is written"):
        session.flush()


def test_an_engine_that_reads_decimals(database_url: str) -> None:
    engine = create_engine(database_url, json_deserializer=partial(json.loads, parse_float=Decimal))
    with Session(engine) as session:
        assert round_trip(session, list[float], [0.5]) == [0.5]
    engine.dispose()


def test_aliases_in_what_others_wrote(session: Session) -> None:
    fq.enqueue(session, "acme", {"docId": 1})
    session.flush()
    [message] = session.scalars(fq.dequeue(message_type=typed(Camel)))
    assert message.payload.doc_id == 1


class TestDeclared:
    """The type in the brackets is the payload's, unless payload_type says otherwise."""

    def test_objects(self, session: Session) -> None:
        session.add(UploadMessage("acme", UPLOAD))
        session.flush()
        [message] = session.scalars(fq.dequeue(message_type=UploadMessage))
        assert message.payload == UPLOAD

    def test_bytes(self, session: Session) -> None:
        class Bytes(fq.TypedMessage[bytes]):
            pass

        session.add(Bytes("acme", b"x"))
        session.flush()
        [message] = session.scalars(fq.dequeue(message_type=Bytes))
        assert message.payload == b"x"

    def test_json_is_not_converted(self, session: Session) -> None:
        class Plain(fq.TypedMessage[dict[str, int]]):
            pass

        class Anything(fq.TypedMessage[Any]):
            pass

        session.add_all([Plain("acme", {"pages": "many"}), Anything("globex", [1])])  # type: ignore[dict-item]
        session.flush()
        found = {message.channel: message.payload for message in session.scalars(fq.dequeue(limit=2))}
        assert found == {"acme": {"pages": "many"}, "globex": [1]}

    def test_objects_within_json(self, session: Session) -> None:
        class Many(fq.TypedMessage[list[Upload]]):
            pass

        class Perhaps(fq.TypedMessage[dict[str, list[Order | None]]]):
            pass

        session.add_all([Many("acme", [UPLOAD]), Perhaps("globex", {"orders": [ORDER, None]})])
        session.commit()
        [many] = session.scalars(fq.dequeue(message_type=Many))
        assert many.payload == [UPLOAD]
        [perhaps] = session.scalars(fq.dequeue(message_type=Perhaps))
        assert perhaps.payload == {"orders": [ORDER, None]}

    def test_keys_that_json_has_none_of(self, session: Session) -> None:
        class Whole(fq.TypedMessage[list[dict[int, str]]]):
            pass

        class Decimals(fq.TypedMessage[dict[float, str]]):
            pass

        class Flags(fq.TypedMessage[dict[bool, str]]):
            pass

        cases: list[tuple[type[fq.TypedMessage[Any]], Any]]
        cases = [(Whole, [{1: "a"}]), (Decimals, {1.5: "a"}), (Flags, {True: "a"})]
        for message_type, payload in cases:
            session.add(message_type("acme", payload))
            session.flush()
            assert session.scalars(fq.dequeue(message_type=message_type)).one().payload == payload

    def test_words_that_name_no_type(self, session: Session) -> None:
        """Values, and what is said about a type."""

        class Coloured(fq.TypedMessage[Literal["red", "green"]]):
            pass

        class Described(fq.TypedMessage[Annotated[int, "pages", Field(gt=0)]]):
            pass

        for wrong in (Coloured("acme", "blue"), Described("acme", 0)):  # type: ignore[arg-type]
            session.add(wrong)
            with pytest.raises(fq.InvalidValue, match=r"^payload must be "):
                session.flush()
            session.rollback()

    def test_inherited_through_a_class_without_a_table(self, session: Session) -> None:
        P = TypeVar("P")

        class Ours(fq.TypedMessage[P]):
            __abstract__ = True

        class Mixin(Generic[P]):
            pass

        class Inheriting(Mixin[Page], Ours[Upload]):
            pass

        session.add(Inheriting("acme", UPLOAD))
        session.flush()
        assert session.scalars(fq.dequeue(message_type=Inheriting)).one().payload == UPLOAD

    def test_inherited_through_a_class_that_makes_another_type_of_it(self, session: Session) -> None:
        K = TypeVar("K")
        P = TypeVar("P")

        class Batch(fq.TypedMessage[list[P]]):
            __abstract__ = True

        class Batched(Batch[Upload]):
            pass

        class Known(fq.TypedMessage[P], Generic[K, P]):
            __abstract__ = True

        class ByNumber(Known[int, Upload]):
            pass

        class Open(Batch[P]):
            pass

        cases: Any = {Batched: [UPLOAD], ByNumber: UPLOAD, Open: [{"a": 1}]}
        for message, payload in cases.items():
            session.add(message("acme", payload))
            session.flush()
            [leased] = session.scalars(fq.dequeue(message_type=message))
            assert leased.payload == payload

    def test_inherited_by_a_class_without_brackets(self, session: Session) -> None:
        """Beside mixins, with brackets of their own or without."""
        P = TypeVar("P")

        class Mixin(Generic[P]):
            pass

        class Ours(fq.TypedMessage[Upload]):
            __abstract__ = True

        class Said(fq.TypedMessage[Any], payload_type=Upload):
            __abstract__ = True

        class WithoutBrackets(Ours):
            pass

        class Beside(Mixin[int], Ours):
            pass

        class BesideABareOne(Mixin, Ours):  # type: ignore[type-arg]
            pass

        class AsSaid(Said):
            pass

        for message in (WithoutBrackets, Beside, BesideABareOne, AsSaid):
            session.add(message("acme", UPLOAD))
            session.flush()
            [leased] = session.scalars(fq.dequeue(message_type=message))
            assert leased.payload == UPLOAD

    def test_what_is_only_named(self) -> None:
        with pytest.raises(fq.InvalidValue, match="Later needs a payload_type="):

            class Later(fq.TypedMessage["Upload"]):
                pass

    def test_what_is_only_named_within_json(self) -> None:
        with pytest.raises(fq.InvalidValue, match="Later needs a payload_type="):

            class Later(fq.TypedMessage[list["Upload"]]):
                pass


def test_can_be_sent_to_another_process(session: Session) -> None:
    session.add(UploadMessage("acme", UPLOAD))
    session.flush()
    [message] = session.scalars(fq.dequeue(message_type=UploadMessage))
    sent = pickle.loads(pickle.dumps(message))  # noqa: S301
    assert (sent, sent.payload) == (message, UPLOAD)


def test_made_by_hand() -> None:
    """As for a test of a handler: with the type in brackets, too."""
    at = datetime(2030, 1, 1, tzinfo=UTC)
    made = fq.LeasedMessage[dict[str, int]](
        id=1, queue="default", channel="acme", attempt=1, raw={"n": 1}, body=None, state=None, error=None,
        dequeue_at=0, cost=1, created_at=at, leased_until=at,
    )  # fmt: skip
    assert made.payload == {"n": 1}
    with pytest.raises(FrozenInstanceError):
        made.attempt = 2  # type: ignore[misc]


def test_json_operators(session: Session) -> None:
    session.add_all([fq.Message("acme", {"doc": 1}), UploadMessage("acme", UPLOAD)])
    session.flush()
    [document] = session.scalars(select(fq.Message).where(fq.Message.payload.has_key("doc")))
    assert document.payload == {"doc": 1}
    payload: Any = UploadMessage.payload  # type: ignore[misc]  # mypy: ambiguous, as the class is generic
    for condition in (payload.contains({"path": "a.pdf"}), payload == UPLOAD, payload.in_([UPLOAD])):
        [upload] = session.scalars(select(UploadMessage).where(condition))
        assert upload.payload == UPLOAD
    ids = select(UploadMessage.id)
    assert session.scalars(ids.where(payload.is_not_distinct_from(UPLOAD))).all() == [upload.id]
    for condition in (payload != UPLOAD, payload.not_in([UPLOAD]), payload.is_distinct_from(UPLOAD)):
        assert session.scalars(ids.where(condition)).all() == [document.id]


def test_fields_are_json(session: Session) -> None:
    """Of whatever type the whole payload is."""
    session.add(UploadMessage("acme", UPLOAD))
    session.flush()
    payload: Any = UploadMessage.payload  # type: ignore[misc]  # mypy: ambiguous, as the class is generic
    fields = payload["path"], payload["pages"][0], payload["pages", 1, "number"]
    assert session.execute(select(*fields)).all() == [("a.pdf", {"number": 1}, 2)]
    for condition in (fields[0] == "a.pdf", fields[0].astext == "a.pdf", fields[2].as_integer() > 1):
        assert session.scalars(select(UploadMessage).where(condition)).one().payload == UPLOAD


def test_where_they_are_kept(session: Session) -> None:
    """JSON in payload, bytes in body; so programs that know nothing of the types can read them."""

    class Blob(fq.TypedMessage[bytes], payload_type=bytes):
        pass

    class Document(fq.TypedMessage[Upload], payload_type=Upload):
        pass

    session.add(Blob("acme", b"x"))
    session.add(Document("acme", UPLOAD, body=b"beside"))
    session.flush()
    rows = session.execute(text("SELECT payload, body FROM fairqueue.message ORDER BY body DESC")).all()
    assert [tuple(row) for row in rows] == [
        (None, b"x"),
        ({"path": "a.pdf", "pages": [{"number": 1}, {"number": 2}]}, b"beside"),
    ]
    with pytest.raises(fq.InvalidValue, match="body can't be given: the payload of Blob is the body"):
        Blob("acme", b"x", body=b"y")


def test_read_as_another_type(session: Session) -> None:
    """Who enqueues and who works may be different programs: the type is the reader's."""

    class Read(fq.TypedMessage[Upload], payload_type=Upload):
        pass

    fq.enqueue(session, "acme", {"path": "a.pdf", "pages": [{"number": 1}, {"number": 2}]})
    session.commit()
    [message] = session.scalars(fq.dequeue(message_type=Read))
    assert message.payload == UPLOAD
    session.rollback()
    assert session.scalars(fq.dequeue()).one().payload["path"] == "a.pdf"


@pytest.mark.parametrize("error", [TypeError, RecursionError, AttributeError, LookupError])
def test_whatever_a_validator_raises(session: Session, error: type[Exception]) -> None:
    """It is that message's payload which doesn't fit, on both ways."""

    def refuse(_: object) -> None:
        raise error("not this one")

    fq.enqueue(session, "acme", 7)
    session.flush()
    Refused = typed(Annotated[int, BeforeValidator(refuse)])  # noqa: N806
    [message] = session.scalars(fq.dequeue(message_type=Refused))
    with pytest.raises(fq.InvalidValue, match=r"^the stored payload is no .*: .*not this one"):
        _ = message.payload
    session.add(Refused("acme", 7))
    with pytest.raises(fq.InvalidValue, match=r"^payload must be .*: .*not this one"):
        session.flush()


def test_an_object_that_would_be_null(session: Session) -> None:
    """None would come back, which is no object of its type."""
    Root = RootModel[int | None]  # noqa: N806
    session.add(typed(Root)("acme", Root(None)))
    with pytest.raises(fq.InvalidValue, match=r"^payload would be JSON's null, which is read as no payload: RootM"):
        session.flush()


def test_a_type_that_cannot_be_hashed() -> None:
    with pytest.raises(fq.InvalidValue, match=r"^payload_type .* can't be hashed: unhashable type: 'dict'"):
        typed(Annotated[Upload, {"version": 2}])


@pytest.mark.parametrize(
    ("payload_type", "value"),
    [
        (Upload, {"path": 7}),
        (Upload, "a.pdf"),
        (Upload, Upload(path=7)),  # type: ignore[arg-type]
        (Order, {"id": "x"}),
        (list[int], ["a"]),
        (bytes, "text"),
        (float, float("nan")),
        (str, "nul \x00"),
    ],
    ids=["dict", "text", "wrong field", "model", "list", "bytes", "NaN", "NUL"],
)
def test_refused_on_the_way_in(session: Session, payload_type: Any, value: Any) -> None:
    """With one error that names the payload (or the body that it is kept in), before anything is written."""
    Typed = typed(payload_type)  # noqa: N806
    session.add(Typed("acme", value))
    with pytest.raises(fq.InvalidValue, match=r"^(payload|body) (must|holds)"):
        session.flush()
    session.rollback()
    assert session.scalar(text("SELECT count(*) FROM fairqueue.message")) == 0


@pytest.mark.parametrize("payload_type", [Engine, list[Engine]])
def test_what_no_json_becomes(payload_type: Any) -> None:
    """Pydantic's own words would be to allow arbitrary types, which it then can't write."""
    with pytest.raises(fq.InvalidValue, match=r"^payload_type .* has, or is, a class that Pydantic can.t turn"):
        typed(payload_type)


@pytest.mark.shared_database(False)
class TestWithoutPydantic:
    @pytest.fixture(autouse=True)
    def _no_pydantic(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pydantic", None)

    def test_dataclass(self, session: Session) -> None:
        class Numbered(fq.TypedMessage[Page], payload_type=Page):
            pass

        session.add(Numbered("acme", Page(3)))
        [message] = session.scalars(fq.dequeue(message_type=Numbered))
        assert message.payload == Page(3)

    def test_nested_dataclass_comes_back_as_a_dict(self, session: Session) -> None:
        """The documented limitation."""

        class Nested(fq.TypedMessage[Upload], payload_type=Upload):
            pass

        session.add(Nested("acme", UPLOAD))
        [message] = session.scalars(fq.dequeue(message_type=Nested))
        assert message.payload == Upload("a.pdf", [{"number": 1}, {"number": 2}])  # type: ignore[list-item]

    @pytest.mark.parametrize("value", [{"number": 3}, Page(Lock())], ids=["dict", "lock"])  # type: ignore[arg-type]
    def test_refused_on_the_way_in(self, session: Session, value: Any) -> None:
        session.add(typed(Page)("acme", value))
        with pytest.raises(fq.InvalidValue, match=r"^payload must be .*Page"):
            session.flush()

    def test_what_could_not_be_read_back(self, session: Session) -> None:
        @dataclass
        class Made:
            number: int = field(init=False, default=1)

        session.add(typed(Made)("acme", Made()))
        with pytest.raises(fq.InvalidValue, match=r"^payload can't be read back as .*Made.* once it is written"):
            session.flush()

    def test_bytes_and_json_need_nothing(self, session: Session) -> None:
        assert round_trip(session, bytes, b"x") == b"x"
        assert round_trip(session, None, [1]) == [1]

    def test_json_in_brackets_needs_nothing(self, session: Session) -> None:
        class Number(fq.TypedMessage[int | None]):
            pass

        class Tree(fq.TypedMessage[dict[str, list[float | str] | None]]):
            pass

        session.add_all([Number("acme", 7), Tree("globex", {"a": [1.5, "b"], "c": None})])
        session.flush()
        found = {message.channel: message.payload for message in session.scalars(fq.dequeue(limit=2))}
        assert found == {"acme": 7, "globex": {"a": [1.5, "b"], "c": None}}

    def test_objects_within_json_are_refused(self) -> None:
        with pytest.raises(fq.InvalidValue, match=r"list\[tests.enqueueing.test_payloads.Upload\] needs Pydantic"):

            class Pages(fq.TypedMessage[list[Upload]]):
                pass

    @pytest.mark.parametrize("payload_type", [int, list[int], Line, UPLOAD])
    def test_all_else_is_refused(self, payload_type: Any) -> None:
        with pytest.raises(fq.InvalidValue, match=r"needs Pydantic \(pip install 'fairqueue\[pydantic\]'\)"):
            typed(payload_type)
