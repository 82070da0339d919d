"""One process of a random life: it acts at random (see doing) and writes down what it knows for sure.

Every transaction says with which errors it may fail, as documented; any other one ends the process with an entry in its
log, and so the test. In a life with faults, a transaction may also lose its connection: at any time, because of others,
or just before or after it has sent its COMMIT, by its own doing. And the process may kill itself.
"""

import itertools
import json
import os
import random
import signal
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

import psycopg
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

import fairqueue as fq

SERIALIZATION_FAILURE = "40001"
UNIQUE_VIOLATION = "23505"
LOCK_NOT_AVAILABLE = "55P03"
#: How a server ends connections.
LOST = {"57P01", "57P02", "57P03", "08000", "08001", "08003", "08006"}

READ_COMMITTED = "READ COMMITTED"


class Fate(Enum):
    """Of a transaction, as far as the process knows."""

    COMMITTED = "committed"
    ROLLED_BACK = "rolled back"
    #: Rolled back because of an error that is documented, or of a fault: it may be tried again.
    FAILED = "failed"
    UNKNOWN = "unknown"


class Refused(Exception):
    """The fence: another worker has, or had, the message. What was done for it is to be rolled back."""


class Cut(Exception):
    """The connection was cut after the COMMIT was sent: whether it arrived is not known."""


@dataclass(frozen=True)
class Part:
    """What a process is told at its start."""

    url: str
    name: str
    seed: str
    #: When it ends, by time.monotonic(), which is that of the machine.
    until: float
    log: Path
    #: Whether connections may be lost; and once in a while it cuts one itself, or kills itself.
    faults: bool = False


class Life:
    def __init__(self, part: Part) -> None:
        self.part = part
        self.name = part.name
        self.random = random.Random(part.seed)  # noqa: S311
        self.engine = create_engine(part.url, pool_size=1, max_overflow=0)
        self.log = os.open(part.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self.numbers = itertools.count()
        #: Messages that it knows, to do something with.
        self.ids: deque[int] = deque([0], maxlen=100)

    def live(self, acts: dict[Callable[["Life"], None], float]) -> None:
        """Act until the time is over."""
        while time.monotonic() < self.part.until:
            (act,) = self.random.choices(list(acts), list(acts.values()))
            try:
                act(self)
            except BaseException:
                self.note("broke", act.__name__, traceback.format_exc())
                raise
            self.note("did", act.__name__)

    def note(self, *entry: object) -> None:
        # In the hands of the kernel at once, whatever becomes of this process.
        os.write(self.log, json.dumps(entry).encode() + b"\n")

    def chance(self, of: float) -> bool:
        return self.random.random() < of

    def level(self) -> str:
        (level,) = self.random.choices([READ_COMMITTED, "REPEATABLE READ", "SERIALIZABLE"], [6, 2, 2])
        return level

    def pause(self) -> None:
        """Now and then a transaction stays open for a while."""
        if (which := self.random.random()) < 0.2:
            time.sleep(which / 10 if which > 0.01 else 0.4)

    def transaction(
        self,
        body: Callable[[Session], object],
        level: str = READ_COMMITTED,
        may_fail: Collection[str] = (),
        commit: bool = True,
        at_once: bool = False,
    ) -> Fate:
        """Run `body` in a transaction; `may_fail` has the SQLSTATEs that are documented for what it does.

        One that dequeues has to commit at once; others may stay open.
        """
        fate, ended_by = Fate.ROLLED_BACK, ""
        try:
            with Session(self.engine, expire_on_commit=False) as session:
                session.connection(execution_options={"isolation_level": level})
                body(session)
                if commit:
                    session.flush()
                    if not at_once:
                        self.pause()
                    fate = Fate.UNKNOWN
                    self.fault(session)
                    session.commit()
                    fate = Fate.COMMITTED
        except (Refused, Cut):
            pass
        except fq.DuplicateKey:
            if UNIQUE_VIOLATION not in may_fail:
                raise
            fate = Fate.FAILED
        except DBAPIError as error:
            ended_by = traceback.format_exc()
            state = getattr(error.orig, "sqlstate", None)
            is_lost = state in LOST or (state is None and isinstance(error.orig, psycopg.OperationalError))
            if state in may_fail:
                fate = Fate.FAILED
            elif not (self.part.faults and is_lost):
                raise
            else:
                time.sleep(0.02)  # The server may be starting: no need to ask it all the time.
                fate = Fate.FAILED if fate is Fate.ROLLED_BACK else Fate.UNKNOWN
        # There is but one: who comes next would wait for it in vain, and couldn't say why.
        pool: Any = self.engine.pool
        assert pool.checkedout() == 0, f"a transaction, {fate.value}, kept its connection. {ended_by}"
        if fate is Fate.COMMITTED:
            self.fault(None)
        return fate

    def execute(self, statement: str, **parameters: object) -> Fate:
        return self.transaction(lambda session: session.execute(text(statement), parameters))

    def fault(self, session: Session | None) -> None:
        """A fault of this process's own, once in a while; with a session that is about to commit, or without."""
        if not self.part.faults:
            return
        which = self.random.random()
        if which < 0.004:
            self.note("did", "kill itself")
            os.kill(os.getpid(), signal.SIGKILL)
        elif which < 0.012 and session is not None:
            self.note("did", "cut before COMMIT")
            self.cut(session)
        elif which < 0.02 and session is not None:
            self.note("did", "cut after COMMIT")
            driver: Any = session.connection().connection.driver_connection
            driver.pgconn.send_query(b"COMMIT")
            while driver.pgconn.flush():
                pass
            self.cut(session)
            session.invalidate()
            raise Cut

    def cut(self, session: Session) -> None:
        driver: Any = session.connection().connection.driver_connection
        with socket.socket(fileno=os.dup(driver.pgconn.socket)) as wire:
            wire.shutdown(socket.SHUT_RDWR)
