"""Figures of a report in words, for page and terminal."""

from __future__ import annotations

from datetime import timedelta

from fairqueue._words import duration, moment

from .tables import Report

__all__ = ["percentiles_are", "period_of", "seconds", "weights_are"]


def period_of(report: Report) -> str:
    return f"{moment(report.since)} to {moment(report.until)}"


def percentiles_are(report: Report) -> str:
    return f"Percentiles are {'exact' if report.exact else 'from sketches: their ranks are right to 0.1 %'}."


def weights_are(report: Report) -> str:
    return f"Weights are {'those of the policies' if report.weighted else 'taken to be 1'}."


def seconds(value: float | None) -> str:
    """A number of seconds in the unit that says most."""
    if value is not None and value < 0.95:
        return f"{1000 * value:.0f} ms"
    return duration(None if value is None else timedelta(seconds=value))
