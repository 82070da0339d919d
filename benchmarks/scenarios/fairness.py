"""Fairness

Who is served when, with one noisy tenant and with many of different sizes. All messages are there before the first
one is served. Places count messages: place 19 means that 19 messages of others were served before. With several
consumers the order is that of the server's clock. A batch is one call, or as many calls where one takes one message.

* *Noisy first*: 1,000 messages of one tenant (300 in the quick run), then as many of 19 quiet ones. A queue that takes
  turns serves each quiet one within the first round.
* *Zipf*: tenants with message counts like 1 / rank ** 1.1, arriving mixed. The Jain index is 1 where everybody gets
  what max-min fairness entitles them to and 1/n where one of n gets all. It is taken over windows of service, each
  against what the tenants had left at its beginning; counts alone mislead, as who has little can't get more.

Waits in seconds are those of consumers that begin with a cold queue and do no work, unless the load says so. Where
fetching is all the work, a queue that isn't fair is through with everything sooner: with batches and several consumers,
quiet tenants wait up to four times as long in ours, though they come far sooner in the order. So it is measured again
with messages that take 5 ms; there it is the order that counts.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from statistics import fmean, median

from benchmarks.consumers import Outcome, Task
from benchmarks.measuring import Bench, Case, Size, alternate
from benchmarks.records import Record, at_most, percentile, ratio_record, value_record
from benchmarks.systems import LIMIT, OURS, System

QUIET = 19
_FAIR = ("channel-row", "partition-by", "blocks")
_SYSTEMS = {
    "quick": (OURS, LIMIT, *_FAIR),
    "full": (OURS, LIMIT, "stalled-workers", "priority", *_FAIR),
    "tiny": (OURS, LIMIT),
}
#: By load: batch and consumers.
_GRID = [(batch, consumers) for batch in (1, 10, 100) for consumers in (1, 4, 16)]
_NOISY_CELLS = {"quick": [(1, 4), (10, 4)], "full": _GRID, "tiny": [(10, 2)]}
_ZIPF_CELLS = {"quick": [(10, 4)], "full": _GRID, "tiny": [(10, 2)]}
_WORK_CELLS = {"quick": [(10, 4)], "full": [(1, 4), (10, 4), (10, 16)], "tiny": [(10, 2)]}
#: Seconds that a message takes, where it takes any.
_WORK = 0.005
#: Those in which all systems take part, in a full run.
_FOR_ALL = {(1, 1), (1, 16), (10, 4), (100, 16)}
#: Messages of the noisy tenant, and of all quiet ones together.
_NOISY = {"quick": 300, "full": 1_000, "tiny": 20}
#: PostgreSQL's synchronous_commit. It makes no difference to places.
_DURABILITY = {"quick": "off", "full": "on", "tiny": "off"}
#: Seconds for all messages; who takes longer has no figures.
_PATIENCE = {"quick": 5.0, "full": 30.0, "tiny": 15.0}
#: Messages and tenants of the Zipf load.
_ZIPF = {"quick": (1_000, 50), "full": (5_000, 200), "tiny": (60, 6)}


def cases(size: Size) -> list[Case]:
    messages = _ZIPF[size.name][0]
    found = [
        Case(
            f"{load}, batch {batch}, {consumers} consumer{'s' if consumers > 1 else ''}",
            partial(measured, batch, consumers),
            (2 * size.rounds + len(_taking_part(size, batch, consumers)) - 2) * seconds,
        )
        for load, cells, measured, seconds in (
            ("noisy first", _NOISY_CELLS, noisy_first, 0.2 + _NOISY[size.name] / 800),
            ("Zipf", _ZIPF_CELLS, zipf, 0.2 + messages / 2_500),
        )
        for batch, consumers in cells[size.name]
    ]
    return found + [
        Case(
            f"Zipf with work, batch {batch}, {consumers} consumers",
            partial(zipf_with_work, batch, consumers),
            2 * size.rounds * (0.2 + messages / 2_500 + messages * _WORK / consumers),
        )
        for batch, consumers in _WORK_CELLS[size.name]
    ]


def _taking_part(size: Size, batch: int, consumers: int) -> tuple[str, ...]:
    return _SYSTEMS[size.name] if size.name != "full" or (batch, consumers) in _FOR_ALL else (OURS, LIMIT)


def noisy_first(batch: int, consumers: int, bench: Bench) -> Iterable[Record]:
    noisy = _NOISY[bench.size.name]
    arrivals = ["noisy"] * noisy + [f"quiet{i % QUIET}" for i in range(noisy)]
    case: dict[str, int | str] = {"load": "noisy first", "batch": batch, "consumers": consumers}
    systems = _taking_part(bench.size, batch, consumers)
    for name, runs in _serve(bench, arrivals, batch, consumers, systems=systems).items():
        first, middle = [], []
        for order in runs:
            worst, usual = places_of_quiet([channel for _, channel in order])
            first.append(worst)
            middle.append(usual)
        # A round, and as many as others were just taking.
        wanted = at_most(QUIET + (consumers if consumers > 1 else 0)) if name == OURS else None
        yield value_record("worst first-service place", name, case, first, "place", wanted=wanted, value=max(first))
        yield value_record("median place of quiet tenants", name, case, middle, "place")


def places_of_quiet(order: Sequence[str]) -> tuple[float, float]:
    """The worst place at which a quiet tenant was first served, and the median place of all their messages."""
    places: dict[str, list[int]] = {}
    for place, channel in enumerate(order):
        places.setdefault(channel, []).append(place)
    quiet = [served for channel, served in places.items() if channel != "noisy"]
    return float(max(served[0] for served in quiet)), float(median(place for served in quiet for place in served))


def zipf(batch: int, consumers: int, bench: Bench) -> Iterable[Record]:
    sizes, arrivals, quiet = _zipf(bench)
    case: dict[str, int | str] = {"load": "Zipf(1.1)", "batch": batch, "consumers": consumers}
    systems = _taking_part(bench.size, batch, consumers)
    found = _serve(bench, arrivals, batch, consumers, systems=systems)
    for name, runs in found.items():
        indexes = [jain_over_windows(sizes, [channel for _, channel in order]) for order in runs]
        yield value_record("Jain index, mean of windows", name, case, [fmean(found) for found in indexes], "0 to 1")
        yield value_record("Jain index, worst window", name, case, [min(found) for found in indexes], "0 to 1")
        for percent in (50, 95, 99):
            places = [percentile([p for p, (_, c) in enumerate(order) if c in quiet], percent) for order in runs]
            yield value_record("place of quiet tenants", name, {**case, "of": f"p{percent}"}, places, "place")
    yield from _waits(case, found, quiet)


def zipf_with_work(batch: int, consumers: int, bench: Bench) -> Iterable[Record]:
    _, arrivals, quiet = _zipf(bench)
    load = f"Zipf(1.1), {_WORK * 1000:g} ms a message"
    case: dict[str, int | str] = {"load": load, "batch": batch, "consumers": consumers}
    yield from _waits(case, _serve(bench, arrivals, batch, consumers, systems=(OURS, LIMIT), work=_WORK), quiet)


def _zipf(bench: Bench) -> tuple[Counter[str], list[str], set[str]]:
    """How many messages each tenant has, in which order they arrive, and which tenants are quiet."""
    messages, tenants = _ZIPF[bench.size.name]
    dice = random.Random(1996)  # noqa: S311
    weights = [1 / rank**1.1 for rank in range(1, tenants + 1)]
    arrivals = [f"t{i}" for i in range(tenants)]  # each at least one
    arrivals += [f"t{i}" for i in dice.choices(range(tenants), weights, k=messages - tenants)]
    dice.shuffle(arrivals)
    sizes = Counter(arrivals)
    # The half of the tenants with the fewest messages.
    quiet = {tenant for tenant, _ in sizes.most_common()[tenants // 2 :]}
    return sizes, arrivals, quiet


def _waits(
    case: Mapping[str, int | str], runs: Mapping[str, list[list[tuple[float, str]]]], quiet: set[str]
) -> Iterable[Record]:
    waits = {
        (name, percent): [percentile([at for at, c in order if c in quiet], percent) for order in orders]
        for name, orders in runs.items()
        for percent in (50, 95, 99)
    }
    for (name, percent), found in waits.items():
        where = {**case, "of": f"p{percent}"}
        yield value_record("wait of quiet tenants", name, where, found, "s")
        if name == OURS and (of := waits.get((LIMIT, percent))):
            yield ratio_record("our wait of quiet tenants", name, where, found, "s", reference=LIMIT, of=of)


def _serve(
    bench: Bench, channels: Sequence[str], batch: int, consumers: int, *, systems: Sequence[str], work: float = 0.0
) -> dict[str, list[list[tuple[float, str]]]]:
    """For each system and repetition: seconds since the consumers began and channel, in the order of service."""
    rows = [(channel, bench.payload) for channel in channels]
    unfinished: set[str] = set()

    def once(name: str) -> list[tuple[float, str]]:
        system: System = bench.systems[name]
        if name in unfinished:
            return []
        with bench.databases([system]) as databases:
            with system.connected(databases[name]) as connection:
                system.enqueue(connection, rows)
            patience = _PATIENCE[bench.size.name]
            task = Task(batch, patience, timed=True, warm=0, durability=_DURABILITY[bench.size.name], work=work)
            order = in_order(bench.consumers.run(consumers, databases[name], name, task))
        if len(order) < len(rows):
            unfinished.add(name)
            bench.note(
                f"{name}, batch {batch}, consumers {consumers}: no figures,"
                f" as it served {len(order):,} of {len(rows):,} messages in {patience:g} s"
            )
        return order

    names = [system.name for system in bench.taking_part(systems)]
    # Those that a ratio is taken of, in pairs; once is enough to see what the others do.
    runs = alternate([name for name in names if name in (OURS, LIMIT)], bench.size.rounds, once)
    runs |= alternate([name for name in names if name not in runs], 1, once)
    return {name: orders for name, orders in runs.items() if name not in unfinished}


def in_order(outcomes: Sequence[Outcome]) -> list[tuple[float, str]]:
    """Seconds since the first consumer began and channel, in the order of service."""
    start = min(outcome.begun for outcome in outcomes)
    served = sorted((*entry[:1], consumer, *entry[1:]) for consumer, o in enumerate(outcomes) for entry in o.order)
    # A batch has one time, that of its first message: it was taken in one go.
    begun: dict[tuple[int, int], float] = {}
    for at, consumer, call, _place, _channel in served:
        begun.setdefault((consumer, call), at)
    served.sort(key=lambda entry: (begun[entry[1], entry[2]], *entry[1:4]))
    return [(begun[entry[1], entry[2]] - start, entry[4]) for entry in served]


def jain_over_windows(sizes: Mapping[str, int], order: Sequence[str]) -> list[float]:
    """The Jain index of each window of service, over what max-min fairness entitled each tenant to.

    A window is ten rounds of those that have something left, and slides by a quarter of that, until one is left alone.
    """
    left = Counter(sizes)
    indexes, start = [], 0
    while len(waiting := {tenant: count for tenant, count in left.items() if count}) > 1:
        window = order[start : start + 10 * len(waiting)]
        served = Counter(window)
        entitled = max_min(waiting, len(window))
        shares = [served[tenant] / due for tenant, due in entitled.items()]
        squares = sum(share**2 for share in shares)
        indexes.append(sum(shares) ** 2 / (len(shares) * squares) if squares else 0.0)
        step = -(-len(window) // 4)
        left -= Counter(order[start : start + step])
        start += step
    return indexes


def max_min(demands: Mapping[str, int], capacity: int) -> dict[str, float]:
    """What each gets when nobody can get more but at the cost of somebody who has less."""
    shares: dict[str, float] = {}
    rest = float(capacity)
    for number, (tenant, demand) in enumerate(sorted(demands.items(), key=lambda item: item[1])):
        shares[tenant] = min(float(demand), rest / (len(demands) - number))
        rest -= shares[tenant]
    return shares
