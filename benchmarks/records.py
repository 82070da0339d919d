"""What a scenario returns: one record a figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

__all__ = ["Record", "Wanted", "at_least", "at_most", "percentile", "ratio_record", "value_record"]


@dataclass(frozen=True)
class Wanted:
    """What a figure is to reach."""

    sign: str
    bound: float

    def holds(self, value: float) -> bool:
        return value >= self.bound if self.sign == "≥" else value <= self.bound

    def __str__(self) -> str:
        return f"{self.sign} {self.bound:g}"


def at_least(bound: float) -> Wanted:
    return Wanted("≥", bound)


def at_most(bound: float) -> Wanted:
    return Wanted("≤", bound)


@dataclass(frozen=True)
class Record:
    """One figure of one system in one case."""

    figure: str
    system: str
    #: What was varied: batch, consumers, channels, ...
    case: dict[str, int | str]
    value: float
    unit: str
    #: What `value` was measured against in the same run, and the median of the ratios of all pairs.
    reference: str | None = None
    ratio: float | None = None
    #: The lowest and the highest of the ratios, and how many pairs there were.
    low: float | None = None
    high: float | None = None
    pairs: int | None = None
    #: What is wanted of the ratio, or, where there is none, of the value; and whether that is reached.
    wanted: str | None = None
    reached: bool | None = None
    #: Of each repetition, for those who want to look closer.
    values: list[float] = field(default_factory=list)
    #: Likewise of the reference.
    of: list[float] = field(default_factory=list)


def value_record(
    figure: str,
    system: str,
    case: Mapping[str, int | str],
    values: Sequence[float],
    unit: str,
    *,
    wanted: Wanted | None = None,
    value: float | None = None,
) -> Record:
    """A figure that stands for itself: the median of its repetitions, or another ``value`` of them."""
    shown = median(values) if value is None else value
    return Record(
        figure,
        system,
        dict(case),
        shown,
        unit,
        wanted=str(wanted) if wanted else None,
        reached=wanted.holds(shown) if wanted else None,
        values=list(values),
    )


def ratio_record(
    figure: str,
    system: str,
    case: Mapping[str, int | str],
    values: Sequence[float],
    unit: str,
    *,
    reference: str,
    of: Sequence[float],
    wanted: Wanted | None = None,
    value: float | None = None,
) -> Record:
    """A figure over that of the reference: the median of the ratios of pairs that were measured side by side."""
    # A reference that got nothing done at all is no measure: the pair is left out.
    ratios = [value / other for value, other in zip(values, of, strict=True) if other]
    ratio = median(ratios) if ratios else math.nan
    return Record(
        figure,
        system,
        dict(case),
        median(values) if value is None else value,
        unit,
        reference=reference,
        ratio=ratio if ratios else None,
        low=min(ratios, default=None),
        high=max(ratios, default=None),
        pairs=len(ratios),
        wanted=str(wanted) if wanted else None,
        reached=bool(ratios) and wanted.holds(ratio) if wanted else None,
        values=list(values),
        of=list(of),
    )


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest value that so many percent are not above."""
    ordered = sorted(values)
    return float(ordered[max(0, -(-len(ordered) * percent // 100) - 1)])
