"""Whether a message is the one that a test expects, and how to say why not."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from fairqueue.models import Message
from fairqueue.schedule import EPOCH

__all__ = ["Expected", "report"]

_SHOWN = 5

_MOST_DIFFERENCES = 8
_WIDTH = 200

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 60
_repr.maxdict = _repr.maxlist = _repr.maxtuple = 10


@dataclass(frozen=True)
class Expected:
    """What is said of a message; the rest isn't compared. ``at`` is in Unix milliseconds."""

    fields: Mapping[str, Any]

    def differences(self, message: Message) -> list[str]:
        """What is different about it, in words; nothing: it is such a message."""
        found = [] if message.leased_until is None else ["it is leased"]
        for name, expected in self.fields.items():
            if name in {"payload", "containing"}:
                found += _differences("payload", expected, message.payload, whole=name == "payload")
            elif name == "at":
                if message.dequeue_at != expected:
                    found.append(f"at is {_moment(message.dequeue_at)}, expected {_moment(expected)}")
            else:
                found += _differences(name, expected, getattr(message, name), whole=True)
        return found

    def __str__(self) -> str:
        texts = {name: _moment(value) if name == "at" else _short(value) for name, value in self.fields.items()}
        return ", ".join(f"{name}={text}" for name, text in texts.items())


def report(expected: Expected, count: int, matching: list[Message], others: list[tuple[list[str], Message]]) -> str:
    """Why there should be ``count`` that match: those that do, or the closest of the others, with their differences."""
    wanted = f"{count} message{'' if count == 1 else 's'}" + (f" with {expected}" if expected.fields else "")
    lines = [f"expected {wanted}; enqueued: {len(matching)}"]
    lines += [f"  {_line(message)}" for message in matching[:_SHOWN]]
    if len(matching) > _SHOWN:
        lines.append(f"  ... and {len(matching) - _SHOWN} more")
    if len(matching) < count:
        if not others:
            lines.append("There are no others." if matching else "There are none that this session sees.")
        else:
            lines.append("The closest others:")
            # Of equals, those first that were enqueued first: sorting leaves them as they are.
            for differences, message in sorted(others, key=lambda other: len(other[0]))[:_SHOWN]:
                lines += [f"  {_line(message)}", *(f"      {text}" for text in differences[:_MOST_DIFFERENCES])]
                if len(differences) > _MOST_DIFFERENCES:
                    lines.append(f"      ... and {len(differences) - _MOST_DIFFERENCES} more")
            if len(others) > _SHOWN:
                lines.append(f"  ... and {len(others) - _SHOWN} more")
    return "\n".join(lines)


def _line(message: Message) -> str:
    key = "" if message.key is None else f", key {message.key!r}"
    return f"{message.id}: queue {message.queue!r}, channel {message.channel!r}{key}, {_short(message.payload)}"


def _differences(place: str, expected: Any, found: Any, *, whole: bool) -> Iterator[str]:
    """``whole``: a dict has nothing but what is expected."""
    if isinstance(expected, dict) and isinstance(found, dict):
        for name, value in expected.items():
            if name in found:
                yield from _differences(f"{place}[{name!r}]", value, found[name], whole=whole)
            else:
                yield f"{place}[{name!r}] is missing, expected {_short(value)}"
        for name in found.keys() - expected.keys() if whole else ():
            yield f"{place}[{name!r}] is {_short(found[name])}, expected nothing"
    elif isinstance(expected, list | tuple) and isinstance(found, list) and len(expected) == len(found):
        for number, value in enumerate(expected):
            yield from _differences(f"{place}[{number}]", value, found[number], whole=True)
    elif _is_flag(expected, found) or expected != found:
        yield f"{place} is {_short(found)}, expected {_short(expected)}"


def _is_flag(expected: object, found: object) -> bool:
    """Just one of two numbers is True or False, which in Python are equal to 1 and 0, and in JSON are not."""
    flags = [isinstance(value, bool) for value in (expected, found) if isinstance(value, int | float)]
    return sorted(flags) == [False, True]


def _moment(milliseconds: int) -> str:
    try:
        return (EPOCH + timedelta(milliseconds=milliseconds)).isoformat(timespec="milliseconds")
    except OverflowError:  # as a priority can be
        return str(milliseconds)


def _short(value: object) -> str:
    text = _repr.repr(value)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."
