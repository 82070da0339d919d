"""What is simulated: one scenario, or a grid of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

from fairqueue._checks import check_choice, check_count, check_number
from fairqueue.errors import InvalidValue

from .schedulers import SCHEDULERS

__all__ = ["SERVICE_LAWS", "WORKLOADS", "Scenario", "grid"]

WORKLOADS = ("zipf", "burst", "diurnal", "split", "file")
SERVICE_LAWS = ("exponential", "constant", "lognormal")


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A queue, its workers, and what its tenants do. Scenarios that differ in scheduler only have the same messages.

    ::

        from fairqueue.spark.simulation import Scenario, run

        for row in run(Scenario(tenants=100, workers=5, load=1.1, messages=5_000)):
            print(row["group"], row["wait_p99"])

    :param scheduler: ``arrival``, ``round_robin`` or ``fair``.
    :param workload: ``zipf``: tenant number k sends in proportion to 1 / k ** ``skew``; ``burst``: the first tenant
        uploads ``upload`` messages at once, the others send equally; ``diurnal``: as zipf, with a rate that rises and
        falls; ``split``: the first tenant sends half of all messages, under ``names`` names, and the others equally;
        ``file``: the ``arrivals`` of a file.
    :param load: what is offered, of what the workers can do: above 1, the backlog grows. An upload comes on top.
    :param messages: how many, all in all.
    :param service: seconds that a message keeps a worker, on average.
    :param service_law: how that varies: ``exponential``, ``constant``, or ``lognormal`` with a sigma of 1.
    :param upload: with ``burst``; None: a tenth of the messages.
    :param swing: with ``diurnal``, how far the rate goes from its mean, 0 to 1.
    :param cycles: with ``diurnal``, how many days there are between the first message and the last.
    :param weights: of the tenants, that with the greatest demand first; the last is that of all others.
    :param max_concurrency: of each channel.
    :param interval_ms: milliseconds between two messages of a channel; 0: none.
    :param burst: how many messages of a channel may go at once after a pause.
    :param arrivals: with ``file``, a CSV or Parquet file with the columns ``at`` (seconds), ``channel``, and, where
        wanted, ``cost`` and ``service_seconds``. Its own figures take the place of ``tenants``, ``load`` and
        ``messages``. Each Spark task reads it, so it has to be where executors find it.
    :raises InvalidValue: if a value can't be.
    """

    scheduler: str = "fair"
    workload: str = "zipf"
    tenants: int = 1_000
    workers: int = 10
    load: float = 0.9
    messages: int = 100_000
    service: float = 1.0
    service_law: str = "exponential"
    skew: float = 1.0
    upload: int | None = None
    swing: float = 0.8
    cycles: float = 2.0
    names: int = 10
    weights: tuple[float, ...] = (1.0,)
    max_concurrency: int | None = None
    interval_ms: int = 0
    burst: int = 1
    arrivals: str | None = None
    seed: int = 1

    def __post_init__(self) -> None:
        check_choice("scheduler", self.scheduler, *SCHEDULERS)
        check_choice("workload", self.workload, *WORKLOADS)
        check_choice("service_law", self.service_law, *SERVICE_LAWS)
        for name, (least, most) in _NUMBERS.items():
            object.__setattr__(self, name, check_number(name, getattr(self, name), least, most))
        for name, (least, most) in _COUNTS.items():
            if getattr(self, name) is not None or name not in _OPTIONAL:
                check_count(name, getattr(self, name), least, most)
        weights: Any = self.weights
        if not isinstance(weights, list | tuple) or not weights:
            raise InvalidValue(f"weights must be a tuple of at least one number, not {weights!r}")
        object.__setattr__(self, "weights", tuple(check_number("weights", weight, 0.01, 1000) for weight in weights))
        self._check_together()

    def _check_together(self) -> None:
        if (self.workload == "file") != (self.arrivals is not None):
            way_out = "name the file" if self.arrivals is None else "use the workload 'file'"
            raise InvalidValue(f"arrivals must not be {self.arrivals!r} with the workload {self.workload!r}: {way_out}")
        if self.upload is not None and self.upload >= self.messages:
            raise InvalidValue(f"upload must be less than the {self.messages} messages in all, not {self.upload}")


_NUMBERS = {
    "load": (0.001, 1000.0),
    "service": (0.0001, 1e6),
    "skew": (0.0, 10.0),
    "swing": (0.0, 1.0),
    "cycles": (0.01, 1e6),
}
_COUNTS = {
    "tenants": (2, 10_000_000),
    "workers": (1, 1_000_000),
    "messages": (2, 1_000_000_000),
    "upload": (1, 1_000_000_000),
    "names": (1, 10_000_000),
    "max_concurrency": (1, 2**31 - 1),
    "interval_ms": (0, 1_000_000_000),
    "burst": (1, 1_000_000),
    "seed": (0, 2**63 - 1),
}
_OPTIONAL = {"upload", "max_concurrency"}


def grid(**values: Any) -> list[Scenario]:
    """All combinations: a list is varied, anything else holds for all; the last list varies fastest.

    ::

        from fairqueue.spark.simulation import grid

        scenarios = grid(tenants=[100, 1_000], load=[0.9, 1.1], scheduler=["arrival", "fair"], messages=5_000)
        assert len(scenarios) == 8

    :param values: fields of :class:`Scenario`.
    :raises InvalidValue: if one of the scenarios can't be, or a list is empty.
    """
    known = {each.name for each in fields(Scenario)}
    for name, value in values.items():
        if name not in known:
            raise InvalidValue(f"{name!r} is no field of a scenario: use {', '.join(sorted(known))}")
        if value == []:
            raise InvalidValue(f"{name} must have at least one value, not []")
    lists: Mapping[str, list[Any]] = {
        name: value if isinstance(value, list) else [value] for name, value in values.items()
    }
    return [Scenario(**dict(zip(lists, combination, strict=True))) for combination in product(*lists.values())]
