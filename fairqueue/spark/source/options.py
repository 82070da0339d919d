"""The options of the data source, checked: an unknown one is an error, as a misspelt one would do something else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from fairqueue.errors import InvalidValue
from fairqueue.spark.engine.place import Place

__all__ = ["Options"]

_PLACE = {"url", "schema", "passfile"}
# Spark's own, which come along; and that of enqueue().
_HIDDEN = {"checkpointlocation", "queryname", "__datasource_name__", "__run__"}

_Default = TypeVar("_Default", int, None)


class Options:
    """What the user said, by lower-case name.

    :param given: as Spark hands them over; it doesn't tell upper from lower case.
    :param known: the names, in lower case, that mean something here, beside those of the place.
    """

    def __init__(self, given: Mapping[str, str], known: set[str]) -> None:
        self._given = {name.lower(): value for name, value in given.items()}
        unknown = sorted(self._given.keys() - known - _PLACE - _HIDDEN)
        if unknown:
            raise InvalidValue(f"unknown option {unknown[0]!r}: known are {', '.join(sorted(known | _PLACE))}")

    @property
    def place(self) -> Place:
        return Place(
            url=self._given.get("url"),
            schema=self._given.get("schema", "fairqueue"),
            passfile=self._given.get("passfile"),
        )

    def text(self, name: str) -> str | None:
        value = self._given.get(name)
        if value == "":
            raise InvalidValue(f"option {name} must not be empty")
        return value

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """One of the choices; the first one if it isn't given."""
        value = self._given.get(name, choices[0])
        if value not in choices:
            raise InvalidValue(f"option {name} must be {' or '.join(choices)}, not {value!r}")
        return value

    def number(self, name: str, default: _Default) -> int | _Default:
        """A whole number of 1 or more."""
        value = self._given.get(name)
        if value is None:
            return default
        if not value.isascii() or not value.isdigit() or not 1 <= int(value) < 2**62:
            raise InvalidValue(f"option {name} must be a whole number of 1 or more, not {value!r}")
        return int(value)
