"""Faults that come from outside: processes killed and stopped, connections ended, crashes, and a clock that is set."""

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable

import psycopg

from fairqueue import embedded
from tests.faults.crew import Crew
from tests.faults.place import LEASE
from tests.faults.witness import Witness
from tests.fixtures.postgres import libpq


class Troubles:
    def __init__(self, server: embedded.Server, url: str, crew: Crew, witness: Witness, dice: random.Random) -> None:
        self.server, self.url, self.crew, self.witness, self.dice = server, url, crew, witness, dice
        self.seen: Counter[str] = Counter()
        #: When processes that are stopped go on.
        self.stopped: dict[int, float] = {}
        begin = time.monotonic()
        length = crew.until - begin
        self.next = begin
        #: Two at least, one of each kind.
        crashes = max(2, round(length / 10))
        self.crashes = [begin + length * (n + 1) / (crashes + 1) for n in range(crashes)]
        self.kinds: dict[Callable[[], None], float] = {
            self.kill: 5,
            self.stop: 3,
            self.terminate: 5,
            self.set_clock: 3,
        }

    def make(self) -> None:
        """Some trouble, if it is time for it."""
        now = time.monotonic()
        self.crew.replace_the_dead()
        self.go_on(now)
        if self.crashes and now >= self.crashes[0]:
            self.crashes.pop(0)
            self.crash()
        elif now >= self.next:
            (kind,) = self.dice.choices(list(self.kinds), list(self.kinds.values()))
            kind()
            self.seen[kind.__name__] += 1
            self.next = now + self.dice.uniform(0.05, 0.4)

    def go_on(self, now: float) -> None:
        for pid, until in list(self.stopped.items()):
            if until <= now:
                del self.stopped[pid]
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def end(self) -> None:
        self.go_on(float("inf"))

    def kill(self) -> None:
        self.crew.signal(self.dice, signal.SIGKILL)

    def stop(self) -> None:
        """For longer than its lease, or not."""
        process = self.crew.signal(self.dice, signal.SIGSTOP)
        if process is not None and process.pid is not None:
            self.stopped[process.pid] = time.monotonic() + self.dice.uniform(0.3, 2) * LEASE

    def terminate(self) -> None:
        with psycopg.connect(libpq(self.url), autocommit=True) as connection:
            connection.execute(
                """
                SELECT pg_terminate_backend(pid) FROM (
                    SELECT pid FROM pg_stat_activity
                    WHERE backend_type = 'client backend' AND pid NOT IN (pg_backend_pid(), %s)
                    ORDER BY random() LIMIT 2) AS chosen
                """,
                [self.witness.connection.info.backend_pid],
            )

    def set_clock(self) -> None:
        """By minutes, in either direction."""
        set_clock(self.url, self.dice.uniform(-600, 600))

    def crash(self) -> None:
        """The server dies, by its own decision or without any, and recovers from its log."""
        self.witness.close()
        if len(self.crashes) % 2:
            self.seen["immediate stop"] += 1
        else:
            self.seen["kill -9"] += 1
            os.kill(self.server.pid, signal.SIGKILL)
        self.server.restart("immediate")
        self.witness.connect()


def set_clock(url: str, offset: float) -> None:
    with psycopg.connect(libpq(url)) as connection:
        connection.execute("UPDATE public.clock_offset SET seconds = %s", [offset])
        connection.execute("INSERT INTO public.lease_log (queue) VALUES (NULL)")
