"""Latency

From commit to the beginning of the handler, idle and at 10 %, 50 % and 90 % of what a worker can do. One fq.Worker
with notifications and one without, which looks each second, by turns with the same Poisson arrivals at 50 channels.
Their times are fixed beforehand, so that a slow queue doesn't slow them down (an open system, as Schroeder et al. have
it, NSDI 2006; the mistake is called coordinated omission). Handlers sleep for 5 ms; load is the share of the rate at
which the same worker drains a backlog, measured before. A turn begins with an idle worker. A message's time is from the
moment in which its COMMIT is sent until its handler begins; workers and producers are processes of their own.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from benchmarks.measuring import Bench, Case, Size, open_connections
from benchmarks.processes import Child
from benchmarks.records import Record, percentile, ratio_record, value_record
from benchmarks.systems import OURS, SYSTEMS, Fill
from benchmarks.workers import CONCURRENCY, SERVICE, Arrival, Sent, produce, work

#: The queues: the worker of one is notified, that of the other polls.
_NOTIFIED, _POLLED = "default", "polled"
#: As tables call them.
_NAMES = {_NOTIFIED: OURS, _POLLED: "polling"}
_CHANNELS = 50
#: Shares of the capacity, in %.
_LOADS = {"quick": (10, 90), "full": (10, 50, 90), "tiny": (50,)}
#: Seconds of a turn under load.
_SECONDS = {"quick": 1.0, "full": 8.0, "tiny": 0.1}
#: Messages of each way in a round of the idle case.
_IDLE = {"quick": 2, "full": 12, "tiny": 1}
#: Messages of a drain, and drains.
_DRAIN = {"quick": (500, 3), "full": (2_000, 5), "tiny": (40, 1)}
#: Seconds between two messages of a way in the idle case, at least: more than between two looks.
_REST = 1.05


def cases(size: Size) -> list[Case]:
    drain = _DRAIN[size.name][0] * _DRAIN[size.name][1] / 400
    under_load = len(_LOADS[size.name]) * 2 * (_SECONDS[size.name] + 0.3)
    seconds = 5 + drain + size.rounds * (under_load + _IDLE[size.name] * 1.3)
    return [Case("idle and under load", measure, seconds)]


#: By queue: the milliseconds from commit to start of each message, and by how many it was sent late.
Waits = dict[str, tuple[list[float], list[float]]]


@dataclass
class Running:
    """The processes, and where they are."""

    producers: Child
    #: By queue.
    workers: dict[str, Child]
    #: For backlogs.
    connection: Any

    def capacity(self, messages: int) -> float:
        """Messages a second that begin while there is a backlog."""
        worker = self.workers[_NOTIFIED]
        worker.send(messages)
        SYSTEMS[OURS].fill(self.connection, Fill(messages, _CHANNELS, "0"))
        times: list[float] = sorted(at for _number, at in worker.receive())
        return (messages - 1) / (times[-1] - times[0])

    def turn(self, arrivals: Sequence[Arrival]) -> Waits:
        """Have the messages come, and begin."""
        due = Counter(arrival.queue for arrival in arrivals)
        for queue in due:
            self.workers[queue].send(due[queue])
        self.producers.send(arrivals)
        sent: list[Sent] = self.producers.receive()
        return {
            queue: (
                [(at - sent[number].committed) * 1000 for number, at in begun],
                [sent[number].late * 1000 for number, _at in begun],
            )
            for queue in due
            for begun in [self.workers[queue].receive()]
        }


@contextmanager
def _running(bench: Bench) -> Iterator[Running]:
    with bench.databases([SYSTEMS[OURS]]) as databases, ExitStack() as stack:
        connections = stack.enter_context(open_connections(bench.systems, databases))
        ways = {_NOTIFIED: True, _POLLED: False}
        dsn = databases[OURS]
        children = [Child(produce, dsn), *(Child(work, dsn, queue, notify) for queue, notify in ways.items())]
        for act in (Child.end, Child.close):  # the other way round: all are told, before the first is waited for
            for child in children:
                stack.callback(act, child)
        for child in children:
            child.receive()
        yield Running(children[0], dict(zip(ways, children[1:], strict=True)), connections[OURS])


def measure(bench: Bench) -> Iterable[Record]:
    if OURS not in bench.systems:
        return
    rounds = range(bench.size.rounds)
    messages, drains = _DRAIN[bench.size.name]
    with _running(bench) as running:
        capacities = [running.capacity(messages) for _ in range(drains)]
        slots: dict[str, int | str] = {"slots": CONCURRENCY, "service": f"{SERVICE * 1000:g} ms"}
        yield value_record("capacity of the worker", OURS, slots, capacities, "1/s")
        bench.place.checkpoint()
        yield from _records("idle", [_idle(running, _IDLE[bench.size.name], number) for number in rounds])
        for load in _LOADS[bench.size.name]:
            rate, seconds = median(capacities) * load / 100, _SECONDS[bench.size.name]
            yield from _records(f"{load} %", [_under_load(running, rate, seconds, number) for number in rounds])


def _idle(running: Running, messages: int, number: int) -> Waits:
    """Messages that come one at a time, each to a worker that waits: to the one and to the other, by turns."""
    dice = random.Random(number)  # noqa: S311
    arrivals, at = [], 0.0
    for _ in range(messages):
        for queue in _NAMES:
            arrivals.append(Arrival(at, queue, "c0"))
            at += (_REST + dice.uniform(0, 0.5)) / len(_NAMES)
    return running.turn(arrivals)


def _under_load(running: Running, rate: float, seconds: float, number: int) -> Waits:
    found: Waits = {}
    for queue in _NAMES if number % 2 == 0 else reversed(_NAMES):
        dice = random.Random(number)  # noqa: S311  # the same arrivals for both
        arrivals, at = [], 0.0
        while at < seconds:
            arrivals.append(Arrival(at, queue, f"c{dice.randrange(_CHANNELS)}"))
            at += dice.expovariate(rate)
        found |= running.turn(arrivals)
    return found


def _records(load: str, rounds: list[Waits]) -> Iterator[Record]:
    polling = _NAMES[_POLLED]
    parts = parts_of(min(len(waits[queue][0]) for waits in rounds for queue in _NAMES))
    for part, of in parts.items():
        case: dict[str, int | str] = {"load": load, "of": part}
        notified, polled = ([of(waits[queue][0]) for waits in rounds] for queue in (_NOTIFIED, _POLLED))
        # The value is of all messages, the ratio of those of a round.
        of_all = {queue: of([wait for waits in rounds for wait in waits[queue][0]]) for queue in _NAMES}
        figure = "from commit to start"
        yield ratio_record(figure, OURS, case, notified, "ms", reference=polling, of=polled, value=of_all[_NOTIFIED])
        yield value_record(figure, polling, case, polled, "ms", value=of_all[_POLLED])
    part = "p99" if "p99" in parts else "longest"
    for queue, name in _NAMES.items():
        late = [parts[part](waits[queue][1]) for waits in rounds]
        yield value_record(f"producers behind their schedule, {part}", name, {"load": load}, late, "ms")


def parts_of(messages: int) -> dict[str, Callable[[Sequence[float]], float]]:
    """What is said of the waits of so many messages: no percentile that would be the longest of them."""
    percents = [percent for percent in (50, 95, 99) if percent == 50 or messages * (100 - percent) >= 100]
    return {**{f"p{percent}": partial(percentile, percent=percent) for percent in percents}, "longest": max}
