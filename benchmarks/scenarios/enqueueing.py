"""Enqueueing

Throughput by the ORM and in bulk, against the same INSERT into a bare table. The bare table has the same columns,
defaults and indexes, without trigger and check; the client's code is the same, and goes to the one schema or the
other.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from sqlalchemy import create_engine, event
from sqlalchemy.orm import Session

import fairqueue as fq
from benchmarks.measuring import Bench, Case, Size, alternate
from benchmarks.records import Record, at_least, ratio_record
from benchmarks.systems import OURS, SYSTEMS, payload_of
from fairqueue import embedded

BARE = "bare"
_CHANNELS = 1_000

_BARE_SQL = """
    CREATE SCHEMA bare;
    CREATE TABLE bare.message (LIKE fairqueue.message INCLUDING ALL EXCLUDING CONSTRAINTS);
    CREATE FUNCTION bare.clock() RETURNS timestamptz LANGUAGE sql VOLATILE PARALLEL SAFE RETURN clock_timestamp();
    CREATE FUNCTION bare.unix_ms(at timestamptz) RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE
        RETURN floor(extract(epoch FROM at AT TIME ZONE 'UTC') * 1000)::bigint;
"""


def _orm(session: Session, payload: Any, n: int, first: int) -> None:
    for number in range(n):
        session.add(fq.Message(f"c{(first + number) % _CHANNELS}", payload))
    session.commit()


def _many(session: Session, payload: Any, n: int, first: int) -> None:
    fq.enqueue_many(session, [{"channel": f"c{(first + i) % _CHANNELS}", "payload": payload} for i in range(n)])
    session.commit()


def _copy(session: Session, payload: Any, n: int, first: int) -> None:
    fq.enqueue_copy(session, ({"channel": f"c{(first + i) % _CHANNELS}", "payload": payload} for i in range(n)))
    session.commit()


@dataclass(frozen=True)
class Way:
    name: str
    #: Messages a transaction.
    n: int
    act: Callable[[Session, Any, int, int], None]
    wanted: float


_WAYS = [
    Way("session.add", 1, _orm, 0.8),
    Way("session.add", 100, _orm, 0.8),
    Way("enqueue_many", 1_000, _many, 0.5),
    Way("enqueue_copy", 10_000, _copy, 0.5),
]
#: Messages of one measurement, by messages a transaction.
_MESSAGES = {
    "quick": {1: 300, 100: 3_000, 1_000: 10_000, 10_000: 20_000},
    "full": {1: 1_500, 100: 10_000, 1_000: 40_000, 10_000: 100_000},
    "tiny": {1: 2, 100: 20, 1_000: 50, 10_000: 50},
}
#: Seconds of a pair for each message, roughly.
_ESTIMATE = {1: 0.0025, 100: 0.0003, 1_000: 0.00008, 10_000: 0.00005}
#: Synchronous commits, and asynchronous ones, which show the server's work where the disk would hide it.
_DURABILITY = {"quick": ("on", "off"), "full": ("on", "off"), "tiny": ("off",)}


def cases(size: Size) -> list[Case]:
    return [
        Case(
            f"{way.name}, {way.n} a transaction, {payload} B, synchronous_commit {durability}",
            partial(measure, way, payload, durability),
            1.5 + size.rounds * _MESSAGES[size.name][way.n] * _ESTIMATE[way.n],
        )
        for way in _WAYS
        for payload in size.payloads
        for durability in _DURABILITY[size.name]
        # One message a transaction shows what the disk hides; the others say nothing new.
        if durability == "off" or way.n == 1 or size.name == "full"
    ]


def measure(way: Way, size: int, durability: str, bench: Bench) -> Iterable[Record]:
    if OURS not in bench.systems:
        return
    messages, act = _MESSAGES[bench.size.name][way.n], way.act
    n = min(way.n, messages)
    payload = json.loads(payload_of(size))
    with bench.databases([SYSTEMS[OURS]]) as databases:
        engine = create_engine(embedded.sqlalchemy_url(databases[OURS]), pool_size=1)

        @event.listens_for(engine, "connect")
        def durable(connection: Any, record: object) -> None:
            connection.execute(f"SET synchronous_commit = {durability}")
            connection.commit()

        try:
            with engine.begin() as connection:
                connection.exec_driver_sql(_BARE_SQL)
            targets = {
                OURS: engine,
                BARE: engine.execution_options(schema_translate_map={"fairqueue": BARE}),
            }
            for target in targets.values():
                with Session(target) as session:
                    act(session, payload, n, 0)  # statements are compiled and prepared

            bench.place.checkpoint()

            def once(name: str) -> float:
                start = time.perf_counter()
                for first in range(0, messages, n):
                    with Session(targets[name]) as session:
                        act(session, payload, n, first)
                return messages / (time.perf_counter() - start)

            rates = alternate([OURS, BARE], bench.size.rounds, once)
        finally:
            engine.dispose()
    case: dict[str, int | str] = {
        "way": way.name,
        "a transaction": n,
        "payload": size,
        "synchronous_commit": durability,
    }
    figure = "messages enqueued"
    yield ratio_record(
        figure, OURS, case, rates[OURS], "1/s", reference="bare table", of=rates[BARE], wanted=at_least(way.wanted)
    )
