"""What scenarios measure with: rounds that alternate, sizes, and the case as the unit of progress."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psycopg

from fairqueue import embedded

from .consumers import Consumers
from .place import Place
from .records import Record
from .systems import SYSTEMS, System, payload_of

T = TypeVar("T")


@dataclass(frozen=True)
class Size:
    """How much is measured. Every scenario has what is its own in a dict of this name in its module."""

    name: str
    #: Pairs of each ratio.
    rounds: int
    #: Likewise, where many figures stand near their goals.
    near: int
    #: Bytes of the payloads.
    payloads: tuple[int, ...]


QUICK = Size("quick", rounds=5, near=5, payloads=(100,))
FULL = Size("full", rounds=7, near=15, payloads=(100, 2000))
TINY = Size("tiny", rounds=1, near=1, payloads=(100,))
SIZES = {size.name: size for size in (QUICK, FULL, TINY)}


@dataclass(frozen=True)
class Case:
    """One thing that a scenario measures; progress and the time left go by these."""

    label: str
    run: Callable[[Bench], Iterable[Record]]
    #: Roughly how many seconds it takes on two cores.
    seconds: float = 1.0


@dataclass
class Bench:
    """What a case has at hand."""

    place: Place
    consumers: Consumers
    size: Size
    #: Those that take part, by name; fewer where the caller chose some, or a package is missing.
    systems: dict[str, System]
    server: embedded.Server | None = None
    #: What has to be said beside the figures, such as what was left out and why.
    notes: list[str] = field(default_factory=list)
    #: Cases that could not be measured.
    failed: int = 0
    #: Why the others can't take part, by name.
    missing: Mapping[str, str] = field(default_factory=dict)

    def taking_part(self, names: Iterable[str]) -> list[System]:
        """Those of these that are here; the page says of the others why not."""
        names = list(names)
        for name in names:
            if name in self.missing:
                self.note(f"{name} was left out: {self.missing[name]}")
        return [self.systems[name] for name in names if name in self.systems]

    @property
    def payload(self) -> str:
        return payload_of(self.size.payloads[0])

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    @contextlib.contextmanager
    def databases(self, systems: Iterable[System]) -> Iterator[dict[str, str]]:
        """A database for each system, by name: its DSN."""
        with contextlib.ExitStack() as stack:
            yield {system.name: stack.enter_context(self.place.database(system)) for system in systems}
            self.consumers.release()


def alternate(subjects: Sequence[str], rounds: int, measure: Callable[[str], T]) -> dict[str, list[T]]:
    """Measure all subjects in each round, each of them in each place, and after others, as often as the rest.

    What is measured twice in a row may be slower the second time. Forwards and backwards by turns, that would be the
    first and the last of several each other round, and never those in between. So each round begins one subject
    further, and inside it they come in a zigzag, by which neighbours don't stay neighbours: Williams, "Experimental
    designs balanced for the estimation of residual effects of treatments", 1949.
    """
    results: dict[str, list[T]] = {subject: [] for subject in subjects}
    zigzag = [-(place + 1) // 2 if place % 2 else place // 2 for place in range(len(subjects))]  # 0, -1, 1, -2, 2, ...
    for number in range(rounds):
        for step in zigzag:
            subject = subjects[(number + step) % len(subjects)]
            results[subject].append(measure(subject))
    return results


def vacuum(dsn: str) -> None:
    """As autovacuum leaves a table after a while, and with statistics; so it doesn't come while we measure.

    The tables of the system: those of PostgreSQL's own catalog are more, and change little.
    """
    with psycopg.connect(dsn, autocommit=True) as connection:
        tables = connection.execute(
            "SELECT c.oid::regclass::text FROM pg_class c"
            " WHERE c.relkind IN ('r', 'p') AND c.relnamespace::regnamespace::text !~ '^(pg_|information_schema)'"
        )
        connection.execute(f"VACUUM (ANALYZE) {', '.join(name for (name,) in tables)}".encode())


def chosen(names: Iterable[str]) -> tuple[dict[str, System], dict[str, str]]:
    """The systems of these names that can take part, and for each other one why not."""
    found, missing = {}, {}
    for name in names:
        if reason := SYSTEMS[name].missing():
            missing[name] = reason
        else:
            found[name] = SYSTEMS[name]
    return found, missing


@contextlib.contextmanager
def open_connections(systems: Mapping[str, System], databases: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """One connection of each system to its database."""
    with contextlib.ExitStack() as stack:
        yield {name: stack.enter_context(systems[name].connected(dsn)) for name, dsn in databases.items()}


def backend_cpu(pid: int) -> float | None:
    """Seconds that a process of this machine has spent on a CPU; None where that can't be known."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    except (OSError, ValueError, IndexError):
        return None
