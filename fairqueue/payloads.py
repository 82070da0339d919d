"""What a message carries: JSON by default, or bytes, a Pydantic model, a dataclass.

A message class says which::

    from dataclasses import dataclass
    import fairqueue as fq

    @dataclass
    class Upload:
        path: str
        pages: int

    class UploadMessage(fq.TypedMessage[Upload]):
        pass

    session.add(UploadMessage(channel="acme", payload=Upload("a.pdf", 3)))
    for message in session.scalars(fq.dequeue(message_type=UploadMessage)):
        message.payload.pages

Pydantic models and every other type that Pydantic knows (dataclasses, TypedDicts, unions) are validated on the way in
and on the way out when Pydantic is installed. They are written by the names of their fields, not their aliases, and
without what is computed; what could not be read back is refused when it is written. Without Pydantic, dataclasses are
written with :func:`dataclasses.asdict` and built by calling the class, so a nested dataclass comes back as a dict.
JSON's own types, as in ``TypedMessage[dict[str, int]]`` or ``TypedMessage[int | None]``, are for type checkers alone,
unless something else is within them, as in ``TypedMessage[list[Upload]]``. What is in the brackets can also be given,
or given otherwise, as ``class UploadMessage(fq.TypedMessage[Upload], payload_type=Upload)``. Both are inherited from an
``__abstract__`` class.

Limitations: secrets are no payload. Pydantic writes a ``SecretStr`` as asterisks, and that is what comes back. Of an
object of a subclass it writes what the declared class has, and leaves out the rest. Fields that fairqueue checks have
no room for a ``validates`` of yours: change them in ``__init__``.

All types share the table: JSON is kept in the column ``payload`` (jsonb), bytes in ``body`` (bytea).
"""

from __future__ import annotations

import dataclasses
import json
import re
import reprlib
from collections.abc import Callable, Iterator
from functools import partial
from types import NoneType, UnionType
from typing import Annotated, Any, ForwardRef, Literal, NamedTuple, NoReturn, TypeVar, Union, get_args, get_origin

from sqlalchemy import ColumnElement, Dialect, LargeBinary, Text, cast, type_coerce
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.sql import operators
from sqlalchemy.types import TypeDecorator, TypeEngine

from .errors import InvalidValue

__all__ = ["MAX_BYTES", "BytesPayload", "JSONPayload", "declared_payload_type", "payload_column_type"]

#: The largest payload, in bytes of its JSON text or of its body.
MAX_BYTES = 64 * 1024 * 1024

#: What is JSON as it is, typing's word for anything, and what makes one type of several.
_JSON_TYPES = (Any, dict, list, str, int, float, bool, NoneType, None, Union, UnionType)

#: Those of them that JSON has no keys of: it would make text of them.
_NO_KEYS = (int, float, bool, NoneType, None)

#: What compares a payload with a payload.
_OF_PAYLOADS = (
    *(operators.eq, operators.ne, operators.in_op, operators.not_in_op),
    *(operators.is_distinct_from, operators.is_not_distinct_from),
)

# How JSON text writes a NUL character, which PostgreSQL's jsonb can't hold: after no or escaped backslashes.
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


def json_text(value: Any, field: str) -> str:
    """``value`` as JSON text that PostgreSQL takes; raises :class:`InvalidValue` naming ``field`` otherwise."""
    try:
        encoded = json.dumps(value, allow_nan=False, ensure_ascii=False)
        size = len(encoded.encode())
    except UnicodeEncodeError:
        raise InvalidValue(f"{field} holds half a surrogate pair, which PostgreSQL can't store in JSON") from None
    except (ValueError, RecursionError) as error:
        raise InvalidValue(f"{field} holds a number or a structure that JSON has no form for: {error}") from error
    except TypeError as error:
        where, culprit = _culprit(field, value)
        raise InvalidValue(
            f"{field} must be what json.dumps() takes, which {where} is not: {culprit}; make it text or a number"
            f"{', or add a TypedMessage, which has its own type' if field == 'payload' else ''}"
        ) from error
    if size > MAX_BYTES:
        raise InvalidValue(f"{field} has {size:,} bytes as JSON, more than {MAX_BYTES:,}")
    if "\\u0000" in encoded and _NUL.search(encoded):  # the first takes a fiftieth of the time
        raise InvalidValue(f"{field} holds a NUL character, which PostgreSQL can't store in JSON")
    return encoded


def _culprit(field: str, value: Any) -> tuple[str, str]:
    """The first part of a value that JSON has no form for, and what that is: itself, or a key."""
    keys: list[Any] = []
    # Not by recursion: json.dumps() may go deeper than Python's own frames can.
    levels: list[Iterator[tuple[Any, Any]]] = [iter([(field, value)])]
    while levels:
        for key, part in levels[-1]:
            if not isinstance(key, str | int | float | None):
                return f"a key of {_path(*keys)}", _named(key)
            if isinstance(part, dict | list | tuple):
                keys.append(key)
                levels.append(iter(part.items() if isinstance(part, dict) else enumerate(part)))
                break
            if not isinstance(part, str | int | float | None):
                return _path(*keys, key), _named(part)
        else:
            levels.pop()
            del keys[-1:]
    return field, _named(value)


def _path(field: str, *keys: Any) -> str:
    path = "".join([field, *(f"[{key!r}]" for key in keys)])
    return path if len(path) <= 1000 else f"{path[:500]}...{path[-500:]}"


def _named(value: Any) -> str:
    return f"{type(value).__name__} {reprlib.repr(value)}"


def check_body(value: Any) -> bytes | None:
    """Binary data of at most :data:`MAX_BYTES`, or :class:`InvalidValue`."""
    if value is None:
        return None
    if not isinstance(value, bytes | bytearray | memoryview):
        raise InvalidValue(f"body must be bytes, not {type(value).__name__}")
    size = memoryview(value).nbytes
    if size > MAX_BYTES:
        raise InvalidValue(f"body has {size:,} bytes, more than {MAX_BYTES:,}")
    return bytes(value)


class JSONPayload(TypeDecorator[Any]):
    """jsonb that refuses, before anything is sent, what PostgreSQL or JSON can't hold."""

    impl = JSONB(none_as_null=True)
    cache_ok = True

    def __init__(self, field: str = "payload") -> None:
        super().__init__()
        self.field = field

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        if value is not None:
            json_text(value, self.field)
        return value

    def coerce_compared_value(self, op: Any, value: Any) -> Any:
        # As SQLAlchemy asks of a decorated JSON type: what stands beside ->, ? or @> is no payload itself.
        return self if op in _OF_PAYLOADS else self.impl_instance.coerce_compared_value(op, value)

    def later(self, data: Any) -> Any:
        """What stands for ``data`` until somebody reads it."""
        return data


class BytesPayload(TypeDecorator[bytes]):
    """bytea with a limit on its size."""

    impl = LargeBinary
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        return check_body(value)


class Unread(NamedTuple):
    """A value whose conversion is left to whoever reads it: one that doesn't fit must not spoil its batch."""

    raw: Any
    read: Callable[[Any], Any]


class _Fields(JSONB):
    """jsonb of which what is within is JSON, whatever the whole is."""

    class Comparator(JSONB.Comparator[Any]):
        def _setup_getitem(self, index: Any) -> Any:
            operator, index, _ = super()._setup_getitem(index)  # type: ignore[no-untyped-call]
            return operator, index, JSONPayload()

    comparator_factory = Comparator


class ObjectPayload(JSONPayload):
    """jsonb that is read and written as objects of ``payload_type``."""

    impl = _Fields(none_as_null=True)
    cache_ok = True

    def __init__(self, payload_type: Any) -> None:
        super().__init__()
        self.payload_type = payload_type
        self._conversion = _Conversion(payload_type)

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        return None if value is None else super().process_bind_param(self._conversion.dump(value), dialect)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        return None if value is None else self._conversion.load(value)

    def later(self, data: Any) -> Any:
        return None if data is None else Unread(data, self._conversion.load)


class JSONText(TypeDecorator[Any]):
    """The text of a jsonb column of type ``stored``, read in a way that raises nothing.

    PostgreSQL keeps JSON that Python doesn't read: a number of 5,000 digits, lists within lists within lists. A driver
    that meets it raises while it fetches, and so takes all rows of the statement with it.
    """

    impl = Text
    cache_ok = True

    def __init__(self, stored: JSONPayload) -> None:
        super().__init__()
        self.stored = stored

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        if value is None:
            return None
        deserialize: Callable[[str], Any] = getattr(dialect, "_json_deserializer", None) or json.loads
        try:
            data = deserialize(value)
        except Exception as error:  # noqa: BLE001 - whatever the engine's own deserializer raises
            problem = f"the stored {self.stored.field} is JSON that can't be read: {type(error).__name__}: {error}"
            return Unread(value, partial(_refuse, problem))
        return self.stored.later(data)


def payload_column_type(payload_type: Any) -> TypeEngine[Any]:
    """The column type for a payload of ``payload_type``."""
    if payload_type is Any or payload_type is None:
        return JSONPayload()
    if payload_type is bytes:
        return BytesPayload()
    found = ObjectPayload(payload_type)
    try:
        hash(payload_type)
    except TypeError as error:  # by which SQLAlchemy knows a statement again
        raise InvalidValue(f"payload_type {payload_type!r} can't be hashed: {error}") from error
    return found


def lazily(column: ColumnElement[Any], column_type: TypeEngine[Any] | None = None) -> ColumnElement[Any]:
    """The column, of ``column_type`` unless it is its own; but objects, and JSON that can't be read, are Unread."""
    column_type = column_type or column.type
    if isinstance(column_type, JSONPayload):
        return type_coerce(cast(column, Text), JSONText(column_type))
    return type_coerce(column, column_type)


def declared_payload_type(message_type: type, generic: type) -> Any:
    """The ``Upload`` of ``class UploadMessage(TypedMessage[Upload])``; Any where that is left open, or is JSON."""
    found = _argument(message_type, generic)
    parts = [*_parts(found)]
    if any(isinstance(part, str | ForwardRef) for part in parts):
        raise InvalidValue(f"{message_type.__name__} needs a payload_type=, as its payload's type is only named")
    return Any if all(isinstance(part, TypeVar) or part in _JSON_TYPES for part in parts) else found


def _argument(class_: type, generic: type) -> Any:
    """What a class has in the brackets behind ``generic``, be it by way of others that have parameters of their own."""
    for base in vars(class_).get("__orig_bases__", class_.__bases__):
        origin = get_origin(base)
        if origin is generic:
            return get_args(base)[0]
        if isinstance(base, type) and base is not generic and issubclass(base, generic):
            return _argument(base, generic)
        if isinstance(origin, type) and issubclass(origin, generic):  # else it is a mixin's
            found = _argument(origin, generic)
            given = dict(zip(origin.__parameters__, get_args(base), strict=True))  # type: ignore[attr-defined]
            if isinstance(found, TypeVar):
                return given.get(found, found)
            open_ = getattr(found, "__parameters__", ())
            return found[tuple(given[each] for each in open_)] if open_ else found
    return Any


def _parts(found: Any) -> Iterator[Any]:
    """A type without its brackets, then what is in them, and in theirs."""
    origin = get_origin(found)
    yield origin or found
    if origin not in (Literal, Annotated):  # which have values there, or words about the type
        for argument in get_args(found):
            yield from _parts(argument)
    if origin is dict and get_args(found)[0] in _NO_KEYS:
        yield found


class _Conversion:
    """How objects of a type become plain JSON data and back. Can be sent to another process, as the type can.

    Whatever is raised on the way: what the types of others do there, and raise, is for them to say.
    """

    def __init__(self, payload_type: Any) -> None:
        self.payload_type = payload_type
        self._plain, self._build = _converters(payload_type)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.payload_type,)

    def dump(self, value: Any) -> Any:
        try:
            data = self._plain(value)
        except Exception as error:
            raise InvalidValue(f"payload must be {self.payload_type!r}: {error}") from error
        try:
            self._build(data)
        except Exception as error:
            problem = f"payload can't be read back as {self.payload_type!r} once it is written: {error}"
            raise InvalidValue(problem) from error
        if data is None:
            raise InvalidValue(f"payload would be JSON's null, which is read as no payload: {value!r}")
        return data

    def load(self, data: Any) -> Any:
        try:
            return self._build(data)
        except Exception as error:
            raise InvalidValue(f"the stored payload is no {self.payload_type!r}: {error}") from error


def _converters(payload_type: Any) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
    """How to turn an object into plain JSON data and back."""
    try:
        from pydantic import PydanticSchemaGenerationError, TypeAdapter
    except ImportError:
        if dataclasses.is_dataclass(payload_type) and isinstance(payload_type, type):
            return dataclasses.asdict, lambda data: payload_type(**data)
        raise InvalidValue(
            f"payload_type {payload_type!r} needs Pydantic (pip install 'fairqueue[pydantic]');"
            " without it a payload is JSON, bytes or a dataclass"
        ) from None
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(payload_type)
    except PydanticSchemaGenerationError as error:  # its own way out leads to objects that can't be written
        raise InvalidValue(
            f"payload_type {payload_type!r} has, or is, a class that Pydantic can't turn into JSON and back:"
            " use a dataclass or a Pydantic model, or convert it yourself and let the payload be JSON"
        ) from error

    def plain(value: Any) -> Any:
        checked = adapter.validate_python(value)
        return adapter.dump_python(checked, mode="json", by_alias=False, round_trip=True, warnings="error")

    def build(data: Any) -> Any:
        # From JSON text, not from the data: strict types, and those with a form for JSON only, tell the difference.
        # The engine's json_deserializer may have made Decimals of its numbers.
        return adapter.validate_json(json.dumps(data, default=float), by_alias=True, by_name=True)

    return plain, build


def _refuse(problem: str, _data: Any) -> NoReturn:
    raise InvalidValue(problem)
