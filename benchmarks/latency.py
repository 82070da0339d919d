"""How long does a message wait for an idle worker, with notifications and without?

    python -m benchmarks.latency [pairs]

One worker of each kind, both with the usual second between two looks. By turns, so many times (6 unless told), each of
them is sent 20 messages, one at a time, at random moments. Prints the milliseconds from the beginning of the COMMIT to
the beginning of the handler: median and 95th percentile of all, and the medians of the turns. Runs on an embedded
PostgreSQL of its own.
"""

import random
import statistics
import sys
import threading
import time
from contextlib import ExitStack

from sqlalchemy import create_engine
from sqlalchemy.orm import Session

import fairqueue as fq
from fairqueue import embedded, schema

MESSAGES = 20


class Measured:
    """A worker that says when a handler began."""

    def __init__(self, url: str, name: str, *, notify: bool) -> None:
        self.name = name
        self.app = fq.Worker(create_engine(url), queue=name, notify=notify)
        self.app.handler(self._begin)
        self.began = 0.0
        self.event = threading.Event()
        self.turns: list[list[float]] = []

    def _begin(self, message: fq.LeasedMessage) -> None:
        self.began = time.perf_counter()
        self.event.set()

    def turn(self, session: Session) -> None:
        waits = []
        for _ in range(MESSAGES):
            time.sleep(random.uniform(0.1, 1.1))  # noqa: S311
            self.event.clear()
            fq.enqueue(session, "acme", queue=self.name)
            session.flush()
            start = time.perf_counter()
            session.commit()
            assert self.event.wait(60)
            waits.append((self.began - start) * 1000)
        self.turns.append(waits)

    def report(self) -> str:
        waits = sorted(wait for turn in self.turns for wait in turn)
        medians = " ".join(f"{statistics.median(turn):.1f}" for turn in self.turns)
        p95 = statistics.quantiles(waits, n=20)[-1]
        return f"{self.name:<14} median {statistics.median(waits):7.1f} ms  p95 {p95:7.1f} ms  by turns: {medians}"


def main(pairs: int = 6) -> None:
    with embedded.ephemeral() as server, ExitStack() as running:
        engine = create_engine(server.url())
        with engine.begin() as begun:
            schema.install(begun)
        measured = [
            Measured(server.url(), "notifications", notify=True),
            Measured(server.url(), "polling", notify=False),
        ]
        with Session(engine) as session:
            for each in measured:
                running.enter_context(each.app)
            for _ in range(pairs):
                for each in measured:
                    each.turn(session)
        for each in measured:
            print(each.report())


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
