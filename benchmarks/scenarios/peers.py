"""Peers: fairness and throughput beside queues from package registries

Each in a database of its own on the same server, with the same settings, by turns; ours is in every round. The payloads
have 100 bytes, the tables are vacuumed and analyzed before each measurement, after the backlog was filled up.

* *Fairness*: messages of one noisy tenant, then as many of 19 quiet ones; four consumers that take ten at a time (one
  where a call fetches one), or the peer's own worker. Commits don't wait for the disk, as places have no time in them.
* *Fetch and complete*: four consumer processes call what the peer has for fetching and completing, in batches, for up
  to a second or until nothing is left. Handlers, heartbeats and polling don't take part; the calls of asyncio are
  made one after the other in an event loop that each consumer keeps. Each takes one message before the clock starts, as
  sessions plan their statements anew after a vacuum. Enqueueing isn't timed; of what it leaves to our dequeues, the
  news of which channels have something, a backlog that is made at once leaves one note for each channel, where messages
  of their own transactions leave one each. What that costs is in Cost. The limit, which is no peer, shows how far one
  table comes here without being fair, with history. Ours is there twice: as it is by default, with a history row for
  each message, and without history beside those that keep nothing of a message that is done (PGMQ, Procrastinate).
* *Workers*: who only has a worker runs it in one process with a handler that does nothing, 4 or 100 messages at a time.
  Two have one message of each of the 20 tenants at a time, so never more than 20: Chancy, with a queue for each tenant,
  whether 4 or 100 are asked for, and DBOS where it is 100. The rate is that of completions, from the first message's
  beginning until none is left or the time is over. Ours has a plain handler, in threads. It is there twice: with
  `prefetch=100`, which has so many more stand by from the beginning, and as it is by default, where it finds out how
  many.

Ours is to be three times as fast as what tries to be fair, and as fast as other Python packages in their best batch, or
with as many at a time as suits them best of those measured; so is our worker as it is by default. Who keeps finished
messages (DBOS, Chancy, Awa, Oban, pg-boss; PgQueuer a log, ours a history) does so here. Consumers wait for the disk at
each fetch, as at each completion; fq.Worker doesn't for its dequeues, as a lost lease is only a redelivery. pg-boss is
spoken to by a pipe, as it runs in Node.js. The order in which peers serve is that in which their calls return.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from functools import cache, partial
from statistics import median
from typing import TypeVar

import psycopg
from psycopg.sql import SQL, Identifier

from benchmarks.consumers import Task, rate
from benchmarks.measuring import Bench, Case, Size, alternate, vacuum
from benchmarks.processes import Child
from benchmarks.records import Record, Wanted, at_least, at_most, ratio_record, value_record
from benchmarks.scenarios.fairness import QUIET, in_order, places_of_quiet
from benchmarks.systems import LIMIT, OURS, OURS_WITHOUT_HISTORY, Fill, System
from benchmarks.systems.fair import Fairqueue
from benchmarks.systems.peers import OUR_DEFAULT_WORKER, OUR_WORKER, PEERS, Peer, Working
from benchmarks.systems.peers.base import Served, work

T = TypeVar("T")

_FETCHED = tuple(name for name, peer in PEERS.items() if not isinstance(peer, Working))
_WORKERS = tuple(name for name, peer in PEERS.items() if isinstance(peer, Working) and name != OUR_WORKER)
_CONSUMERS = 4
#: Messages of the noisy tenant, and of all quiet ones together.
_NOISY = {"quick": 500, "full": 1_000, "tiny": 20}
#: Seconds for all of them.
_PATIENCE = {"quick": 20.0, "full": 60.0, "tiny": 20.0}
#: Repetitions of what has no time in it.
_REPEATS = {"quick": 1, "full": 3, "tiny": 1}


@dataclass(frozen=True)
class Load:
    messages: int
    tenants: int
    batches: tuple[int, ...]


@dataclass(frozen=True)
class Work:
    messages: int
    tenants: int
    #: How many messages a worker has at a time.
    at_a_time: tuple[int, ...]
    #: Of one measurement. Chancy writes what it has completed once a second or so.
    seconds: float


_LOADS = {
    "quick": [Load(10_000, 1_000, (1, 100))],
    "full": [
        Load(20_000, 20, (1, 10, 100)),
        Load(20_000, 1_000, (1, 10, 100)),
        Load(100_000, 1_000, (1, 10, 100)),
        Load(50_000, 10_000, (100,)),
    ],
    "tiny": [Load(500, 5, (1, 10))],
}
#: Seconds of one measurement of consumers.
_SECONDS = {"quick": 0.3, "full": 1.0, "tiny": 0.05}
#: Of the workers, which would take half of a quick run.
_WORK = {"full": Work(5_000, 20, (4, 100), 10.0), "tiny": Work(20, 4, (4,), 5.0)}


def cases(size: Size) -> list[Case]:
    repeats = _REPEATS[size.name]
    found = [Case("fairness", fairness, 6.0 * repeats * (len(PEERS) + 1))]
    for load in _LOADS[size.name]:
        label = f"fetch and complete, {load.messages:,} messages of {load.tenants:,} tenants"
        rounds = len(load.batches) * size.rounds * (len(_FETCHED) + 3)
        found.append(Case(label, partial(fetching, load), load.messages / 600 + rounds * (_SECONDS[size.name] + 0.5)))
    if worked := _WORK.get(size.name):
        seconds = len(worked.at_a_time) * (15 + size.rounds * (len(_WORKERS) + 1) * (worked.seconds / 2 + 1))
        found.append(Case("workers", partial(working, worked), seconds))
    return found


def fairness(bench: Bench) -> Iterable[Record]:
    noisy = _NOISY[bench.size.name]
    rows = [("noisy", bench.payload)] * noisy + [(f"quiet{i % QUIET}", bench.payload) for i in range(noisy)]
    systems = _taking_part(bench, (OURS, *PEERS))
    versions = {f"{system.package} {system.version()}" for system in systems.values() if isinstance(system, Peer)}
    bench.note(f"versions: {', '.join(sorted(versions))}")

    def once(name: str) -> tuple[float, float]:
        system = systems[name]
        with bench.databases([system]) as databases:
            dsn = databases[name]
            _without_disk(dsn)
            with system.connected(dsn) as connection:
                system.enqueue(connection, rows)
            vacuum(dsn)
            order = _order(bench, system, dsn)
        left = Counter(channel for channel, _ in rows) - Counter(order)
        # With more than half of the quiet ones' messages, and all tenants, the figures don't depend on the rest.
        if 2 * (left.total() - left["noisy"]) > noisy or len(set(order)) <= QUIET:
            raise TimeoutError(
                f"it served {len(order):,} of {len(rows):,} messages in {_PATIENCE[bench.size.name]:g} s"
            )
        return places_of_quiet([*order, *left.elements()])

    for name, places in _by_turns(bench, systems, _REPEATS[bench.size.name], once).items():
        case: dict[str, int | str] = {"load": "noisy first"}
        first, middle = ([place[part] for place in places] for part in (0, 1))
        wanted = at_most(QUIET + _CONSUMERS) if name in (OURS, OUR_WORKER) else None
        yield value_record("worst first-service place", name, case, first, "place", wanted=wanted, value=max(first))
        yield value_record("median place of quiet tenants", name, case, middle, "place")


def _order(bench: Bench, system: System, dsn: str) -> list[str]:
    patience = _PATIENCE[bench.size.name]
    if isinstance(system, Working):
        with _processes([system]) as processes:
            return _serve(processes[system.name], dsn, patience).order
    task = Task(10 if system.batches else 1, patience, timed=True, warm=0)
    return [channel for _, channel in in_order(bench.consumers.run(_CONSUMERS, dsn, system.name, task))]


def fetching(load: Load, bench: Bench) -> Iterable[Record]:
    systems = _taking_part(bench, (OURS, OURS_WITHOUT_HISTORY, LIMIT, *_FETCHED))
    seconds = _SECONDS[bench.size.name]
    found: dict[int, dict[str, list[float]]] = {}
    fills = dict.fromkeys(systems, Fill(0, load.tenants, bench.payload))
    with _databases(bench, systems) as database:

        def once(name: str, batch: int) -> float:
            system, dsn = systems[name], database(name)
            with system.connected(dsn) as connection:
                fills[name] = system.fill_up(connection, fills[name], load.messages)
            vacuum(dsn)
            # It has made sessions forget their plans. More calls would take in, for us, what is to count.
            bench.consumers.run(_CONSUMERS, dsn, name, Task(1, 0.0, warm=1))
            return rate(bench.consumers.run(_CONSUMERS, dsn, name, Task(batch, seconds, warm=0)))

        for batch in load.batches:
            chosen = {name: system for name, system in systems.items() if system.batches or batch == 1}
            bench.place.checkpoint()
            found[batch] = _by_turns(bench, chosen, bench.size.rounds, partial(once, batch=batch))
    case: dict[str, int | str] = {"backlog": load.messages, "tenants": load.tenants}
    ours = [OURS, OURS_WITHOUT_HISTORY]
    yield from _ratios("messages fetched and completed", ours, systems, found, case=case, varied="batch")


def working(load: Work, bench: Bench) -> Iterable[Record]:
    systems = _taking_part(bench, (OUR_WORKER, *_WORKERS))
    found = {count: _worked(bench, load, systems, count) for count in load.at_a_time}
    case: dict[str, int | str] = {"backlog": load.messages, "tenants": load.tenants}
    yield from _ratios(
        "messages worked on", [OUR_WORKER, OUR_DEFAULT_WORKER], systems, found, case=case, varied="at a time"
    )


def _worked(bench: Bench, load: Work, systems: Mapping[str, System], at_a_time: int) -> dict[str, list[float]]:
    """Rates of workers that have so many messages at a time."""
    systems = {name: copy(system) for name, system in systems.items()}
    for system in systems.values():
        assert isinstance(system, Working)
        system.at_a_time = at_a_time
    with _databases(bench, systems) as database, _processes(systems.values()) as processes:

        def once(name: str) -> float:
            system, dsn = systems[name], database(name)
            assert isinstance(system, Working)
            missing = load.messages - system.left(dsn)
            with system.connected(dsn) as connection:
                system.fill(connection, Fill(missing, load.tenants, bench.payload))
            vacuum(dsn)
            return _serve(processes[name], dsn, load.seconds).rate

        bench.place.checkpoint()
        return _by_turns(bench, systems, bench.size.rounds, once)


def _wanted(system: System, best: bool) -> Wanted | None:
    """Three times the rate of what tries to be fair; as much as any other in Python at its best batch."""
    if system.name == LIMIT or isinstance(system, Fairqueue):
        return None
    if system.fair:
        return at_least(3)
    return at_least(1) if best and system.name != "pg-boss" else None


def _ratios(
    figure: str,
    ours: Sequence[str],
    systems: Mapping[str, System],
    found: Mapping[int, Mapping[str, list[float]]],
    *,
    case: Mapping[str, int | str],
    varied: str,
) -> Iterator[Record]:
    """The rates found with each number of what was varied, and ours over the others'."""
    best = {
        name: max((number for number in found if name in found[number]), key=lambda number: median(found[number][name]))
        for name in {name for rates in found.values() for name in rates}
    }
    for number, rates in found.items():
        where = {**case, varied: number}
        for name, values in rates.items():
            yield value_record(figure, name, where, values, "1/s")
        for mine in (name for name in ours if name in rates):
            over = f"{figure}, over the peer" if mine == ours[0] else f"{figure} by {mine}, over the peer"
            # Without history only beside those that keep nothing either.
            others = [name for name in rates if name not in ours and (systems[mine].keeps or not systems[name].keeps)]
            for name in others:
                wanted = _wanted(systems[name], best[name] == number)
                yield ratio_record(over, mine, where, rates[mine], "1/s", reference=name, of=rates[name], wanted=wanted)


def _taking_part(bench: Bench, names: Iterable[str]) -> dict[str, System]:
    """Those that are here, by name. The page says in which versions, and why others aren't."""
    systems: dict[str, System] = {}
    for system in bench.taking_part(names):
        if isinstance(system, Peer) and (reason := system.prepare()):
            bench.note(f"{system.name} was left out: {reason}")
            continue
        systems[system.name] = system
    return systems


def _by_turns(
    bench: Bench, systems: Mapping[str, System], rounds: int, measure: Callable[[str], T]
) -> dict[str, list[T]]:
    """Those that met no error, whatever the others' packages raise."""
    failed: set[str] = set()

    def once(name: str) -> T | None:
        if name in failed:
            return None
        try:
            return measure(name)
        except Exception as error:
            if name in (OURS, OUR_WORKER):
                raise
            failed.add(name)
            bench.failed += 1
            bench.note(f"no figures of {name}: {type(error).__name__}: {' '.join(str(error).split())[:200]}")
            return None

    found = alternate(list(systems), rounds, once)
    return {
        name: [value for value in values if value is not None] for name, values in found.items() if name not in failed
    }


@contextmanager
def _databases(bench: Bench, systems: Mapping[str, System]) -> Iterator[Callable[[str], str]]:
    """Gives the DSN of each. They are made when they are asked for: one that can't be made costs only its figures."""
    with ExitStack() as stack:
        yield cache(lambda name: stack.enter_context(bench.place.database(systems[name])))
        bench.consumers.release()


def _without_disk(dsn: str) -> None:
    """Commits don't wait for the disk: for places, which have no time in them."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        database = Identifier(connection.info.dbname)
        connection.execute(SQL("ALTER DATABASE {} SET synchronous_commit = off").format(database))


@contextmanager
def _processes(systems: Iterable[System]) -> Iterator[dict[str, Child]]:
    """A process for each worker."""
    children = {system.name: Child(work, system) for system in systems}
    try:
        for child in children.values():
            child.receive()
        yield children
    finally:
        for child in children.values():
            child.close()
        for child in children.values():
            child.end()


def _serve(process: Child, dsn: str, seconds: float) -> Served:
    process.send((dsn, seconds))
    served: Served = process.receive()
    return served
