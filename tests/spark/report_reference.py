"""The figures of a report in plain Python: one message, one window, one moment after another. Slow, and to be believed.

Rows are dicts with the columns of history and messages; times inside are microseconds since 1970.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

Row = dict[str, Any]
Tenant = tuple[str, str]


@dataclass(frozen=True)
class Life:
    """A message, or a further outcome of one (``first`` is false)."""

    first: bool
    cost: float
    outcome: str | None
    created: int
    due: int
    started: int | None
    left: int | None
    leased: int | None
    finished: int | None

    @property
    def ended(self) -> int | None:
        return self.finished if self.leased is not None else None


def micros(at: datetime | None) -> int | None:
    return None if at is None else (at - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def lives_of(history: Iterable[Row], live: Iterable[Row]) -> dict[Tenant, list[Life]]:
    rows = [dict(row, id=row["message_id"]) for row in history]
    rows += [
        dict(row, outcome=None, finished_at=None, leased_at=row["leased_at"] if row["leased_until"] else None)
        for row in live
    ]
    rows.sort(key=lambda row: micros(row["finished_at"]) or 2**63)
    seen = set()
    found = defaultdict(list)
    for row in rows:
        name = (row["queue"], row["channel"], row["id"])
        found[name[:2]].append(_life(row, first=name not in seen))
        seen.add(name)
    return found


def _life(row: Row, *, first: bool) -> Life:
    created = micros(row["created_at"])
    leased, finished = micros(row["leased_at"]), micros(row["finished_at"])
    started = micros(row["first_leased_at"])
    if started is None:
        started = leased
    scheduled = min(max(row["dequeue_at"], 0), 253_402_300_799_000) * 1000
    assert created is not None
    due = created if started is not None and scheduled > started else max(created, scheduled)
    left = started if started is not None else finished
    if row["outcome"] not in (None, "completed", "dead"):
        leased = None
    if leased is not None and finished is not None:
        leased = min(leased, finished)
    return Life(
        first,
        row["cost"],
        row["outcome"],
        created,
        due,
        None if started is None else max(started, due),
        None if left is None else max(left, due),
        leased,
        finished,
    )


def quantile(values: list[float], at: float) -> float | None:
    if not values:
        return None
    values = sorted(values)
    place = at * (len(values) - 1)
    low = int(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low])


def spread(name: str, values: list[float]) -> Row:
    quantiles = {f"{name}_{short}": quantile(values, at) for short, at in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))}
    return {**quantiles, f"{name}_max": max(values, default=None)}


def starvation(lives: list[Life], known: int, end: int) -> list[tuple[int, float]]:
    """When each interval ended, and how many seconds it took: moment by moment."""
    waits = [(life.due, end if life.left is None else min(life.left, end)) for life in lives if life.first]
    starts = {life.started for life in lives if life.first and life.started is not None and life.started < end}
    moments = sorted({each for wait in waits for each in wait})
    found: list[tuple[int, int]] = []
    began: int | None = None
    for at, following in zip(moments, [*moments[1:], None], strict=True):
        waiting = following is not None and any(due <= at and following <= left for due, left in waits)
        if began is not None and (at in starts or not waiting):
            found.append((began, at))
            began = None
        if waiting and began is None:
            began = at
    return [(min(to, end - 1), (to - max(since, known)) / 1e6) for since, to in found if to > max(since, known)]


def entitlements(demands: list[float], weights: list[float], capacity: float) -> list[float]:
    """Max-min by weight: all are filled at the same speed by weight until they have enough or nothing is left."""
    shares = [0.0] * len(demands)
    hungry = {place for place, demand in enumerate(demands) if demand > 0}
    while hungry and capacity > 1e-12:
        step = min((demands[place] - shares[place]) / weights[place] for place in hungry)
        step = min(step, capacity / sum(weights[place] for place in hungry))
        for place in hungry:
            shares[place] += step * weights[place]
            capacity -= step * weights[place]
        hungry = {place for place in hungry if demands[place] - shares[place] > 1e-12}
    return shares


@dataclass(frozen=True)
class Reference:
    """All tables, as dicts by (queue, channel, window), (queue, window) and (queue, channel)."""

    channel_windows: dict[tuple[str, str, datetime], Row]
    queue_windows: dict[tuple[str, datetime], Row]
    channels: dict[Tenant, Row]


def compute(
    history: list[Row],
    live: list[Row],
    weights: dict[tuple[str, str | None], float],
    window: timedelta,
    *,
    since: datetime | None = None,
    until: datetime | None = None,
) -> Reference:
    lives = lives_of(history, live)
    every = [life for each in lives.values() for life in each]
    latest = max(
        at for life in every for at in (life.created, life.started, life.leased, life.finished) if at is not None
    )
    end = micros(until) or latest + 1
    start = micros(since) or min(life.created for life in every if life.first)
    known = start
    if since is None:  # older outcomes may have been dropped
        known = max(start, min(life.finished for life in every if life.finished is not None))
    length = window // timedelta(microseconds=1)

    by_window: dict[tuple[str, str, datetime], Row] = {}
    for tenant, each in lives.items():
        starved = starvation(each, known, end)
        for number in range(start // length, (end - 1) // length + 1):
            begin, close = max(number * length, start), min((number + 1) * length, end)
            row = _window(each, begin, close)
            if any(row[name] for name in _PRESENT):
                row["starved"] = max((seconds for at, seconds in starved if begin <= at < close), default=None)
                row["weight"] = weights.get(tenant, weights.get((tenant[0], None), 1.0))
                by_window[*tenant, datetime.fromtimestamp(begin / 1e6, UTC)] = row
    by_queue = _queue_windows(by_window, length, known)
    return Reference(by_window, by_queue, _channels(lives, by_window, start, end))


_PRESENT = ("enqueued", "started", "served", "dead", "cancelled", "dropped", "backlog", "in_flight")


def _window(lives: list[Life], begin: int, close: int) -> Row:
    def inside(at: int | None) -> bool:
        return at is not None and begin <= at < close

    new = [life for life in lives if life.first]
    started = [life for life in new if inside(life.started)]
    waiting = [life for life in new if life.due < close and (life.left is None or life.left >= close)]
    taken = [life for life in lives if life.leased is not None and life.leased < close]
    ended = [life for life in lives if inside(life.ended)]
    outcomes = {"served": "completed", "dead": "dead", "cancelled": "cancelled", "dropped": "dropped"}
    return {
        "enqueued": sum(inside(life.created) for life in new),
        "started": len(started),
        **{
            name: sum(life.outcome == known and inside(life.finished) for life in lives)
            for name, known in outcomes.items()
        },
        "backlog": len(waiting),
        "cost_backlog": sum(life.cost for life in waiting),
        "in_flight": sum(life.finished is None or life.finished >= close for life in taken),
        "busy": sum(
            max(0, min(close if life.ended is None else life.ended, close) - max(life.leased or 0, begin)) / 1e6
            for life in taken
        ),
        "cost_started": sum(life.cost for life in started),
        **spread("wait", [((life.started or 0) - life.due) / 1e6 for life in started]),
        **spread("service", [((life.ended or 0) - (life.leased or 0)) / 1e6 for life in ended]),
    }


def _queue_windows(by_window: dict[tuple[str, str, datetime], Row], length: int, known: int) -> dict[Any, Row]:
    found: dict[Any, Row] = {}
    for key in sorted({(queue, at) for queue, _, at in by_window}):
        rows = {channel: row for (queue, channel, at), row in by_window.items() if (queue, at) == key}
        capacity = sum(row["cost_started"] for row in rows.values())
        demands = [row["cost_started"] + row["cost_backlog"] for row in rows.values()]
        shares = entitlements(demands, [row["weight"] for row in rows.values()], capacity)
        flying, busy = (sum(row[name] for row in rows.values()) for name in ("in_flight", "busy"))
        had = []
        for row, share in zip(rows.values(), shares, strict=True):
            row["entitled"] = share
            row["share"] = row["cost_started"] / capacity if capacity else None
            row["noisy"] = (row["in_flight"] >= 30 and row["in_flight"] > 0.1 * flying) or row["busy"] > 0.1 * busy
            if share > 0:
                had.append(row["cost_started"] / share)
        level = max(share / row["weight"] for row, share in zip(rows.values(), shares, strict=True))
        weights = [row["weight"] for row in rows.values() if row["backlog"]] or [row["weight"] for row in rows.values()]
        messages = sum(row["started"] for row in rows.values())
        short = capacity - min(weights) * level * messages  # by how much a share is less than a message
        complete = (micros(key[1]) or 0) // length * length + length > known
        found[key] = {
            "channels": len(rows),
            "enqueued": sum(row["enqueued"] for row in rows.values()),
            "served": sum(row["served"] for row in rows.values()),
            "backlog": sum(row["backlog"] for row in rows.values()),
            "jain": sum(had) ** 2 / (len(had) * sum(x * x for x in had)) if had and any(had) and complete else None,
            "worst_ratio": min(had) if had and complete else None,
            "low_ratio": sorted(had)[math.ceil(0.1 * len(had)) - 1] if had and complete else None,
        }
        if abs(short) > 1e-9 * capacity:  # else rounding decides
            found[key]["coarse"] = short > 0
    return found


def _channels(
    lives: dict[Tenant, list[Life]], by_window: dict[tuple[str, str, datetime], Row], start: int, end: int
) -> dict[Tenant, Row]:
    found = {}
    for tenant, each in lives.items():
        windows = {at: row for (queue, channel, at), row in by_window.items() if (queue, channel) == tenant}
        if not windows:
            continue
        whole = _window(each, start, end)
        del whole["cost_backlog"], whole["in_flight"]
        starved = [row["starved"] for row in windows.values() if row["starved"] is not None]
        found[tenant] = whole | {
            "starved": max(starved, default=None),
            "noisy_windows": sum(row["noisy"] for row in windows.values()),
        }
    return found
