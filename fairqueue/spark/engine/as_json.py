"""Values of Arrow's as JSON text that the queue takes."""

from __future__ import annotations

import json
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

from fairqueue.errors import InvalidValue
from fairqueue.payloads import json_text

__all__ = ["checked", "text_of"]


def checked(text: str) -> str:
    """Text that says it is JSON."""
    return json_text(json.loads(text), "payload")


def text_of(value: Any) -> str:
    """Structs, maps and arrays as JSON."""
    return json_text(_plain(value), "payload")


def _name(key: Any) -> str:
    """The key of a map, which has the form of a value; a decimal needn't fit into a double."""
    if isinstance(key, str | Decimal):
        return str(key)
    plain = _plain(key)
    return plain if isinstance(plain, str) else json.dumps(plain)


def _plain(value: Any) -> Any:
    """What JSON has a form for; times in ISO 8601, time spans in seconds, binary in hexadecimal digits."""
    if isinstance(value, dict):
        return {_name(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, Decimal):
        if value == value.to_integral_value():
            return int(value)
        number = float(value)
        if Decimal(repr(number)) != value:
            raise InvalidValue(
                f"payload holds the decimal {value}, which has more digits than a double: cast it to a string, or make"
                " the payload by to_json"
            )
        return number
    if isinstance(value, timedelta):
        value = value.total_seconds()
    elif isinstance(value, bytes):
        value = value.hex()
    return value
