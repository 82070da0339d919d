"""Handlers of every kind, so that tests can ask the same of all of them; and what became of their messages.

The fixture ``worker_of`` makes their workers.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import event, select, text
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import wait_until

#: What a handler may be, and the engine of its worker.
KINDS = ("plain", "plain session", "async", "async session", "asyncpg", "asyncpg session")
WITH_SESSION = tuple(kind for kind in KINDS if kind.endswith("session"))

#: Those whose drivers listen, each in its own way.
LISTENING = ("plain", "async", "asyncpg")
#: Seconds between two looks of a worker by itself: more than wait_until waits for anything.
RARELY = 300

Message = fq.LeasedMessage[Any]
Body = Callable[[Message, Any], object]


def handler_of(kind: str, body: Body) -> Callable[..., Any]:
    """A handler of that kind that does what the plain function ``body(message, session)`` does."""

    def plain(message: Message) -> object:
        return body(message, None)

    def plain_session(message: Message, session: Session) -> object:
        return body(message, session)

    async def asynchronous(message: Message) -> object:
        return body(message, None)

    async def asynchronous_session(message: Message, session: Any) -> object:
        return await session.run_sync(lambda plain: body(message, plain))

    if kind.startswith("plain"):
        return plain_session if kind in WITH_SESSION else plain
    return asynchronous_session if kind in WITH_SESSION else asynchronous


def add_effects(session: Session) -> None:
    """A table for what handlers do, with nothing in it."""
    columns = "message_id bigint NOT NULL, attempt integer NOT NULL"
    session.execute(text(f"CREATE TABLE IF NOT EXISTS public.effect ({columns}); DELETE FROM public.effect"))
    session.commit()


def act(message: Message, session: Session | None) -> None:
    """What a handler does, if it has a session to do it in."""
    if session is not None:
        values = {"id": message.id, "attempt": message.attempt}
        session.execute(text("INSERT INTO public.effect VALUES (:id, :attempt)"), values)


def effects(session: Session) -> list[tuple[int, int]]:
    session.rollback()
    return [tuple(row) for row in session.execute(text("SELECT * FROM public.effect ORDER BY 1, 2"))]


def endings(session: Session) -> list[str]:
    session.rollback()
    return list(session.scalars(select(fq.History.outcome)))


def wait_for_endings(session: Session, count: int, deadline: float = 30) -> Counter[str]:
    wait_until(lambda: len(endings(session)) >= count, deadline)
    return Counter(endings(session))


def is_empty(session: Session) -> bool:
    session.rollback()
    return session.scalar(select(fq.Message.id).limit(1)) is None


def leased(session: Session) -> int:
    session.rollback()
    return session.scalar(text("SELECT count(*) FROM fairqueue.message WHERE leased_until IS NOT NULL")) or 0


class Process:
    """A worker in a process of its own, whose handler is given as Python source."""

    def __init__(self, folder: Path, url: str, handler: str, **options: object) -> None:
        self.folder = folder
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        (folder / "jobs.py").write_text(PROCESS.format(url=url, folder=str(folder), options=given, handler=handler))
        self.log = folder / "log"
        with self.log.open("ab") as log:
            self.popen = subprocess.Popen([sys.executable, str(folder / "jobs.py")], stderr=log)

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.popen.send_signal(number)

    def wait(self) -> int:
        return self.popen.wait(30)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def wait_for_log(self, words: str, times: int = 1) -> None:
        wait_until(lambda: self.log.read_text().count(words) >= times)

    def say(self, word: str) -> None:
        """Let `wait_for(word)` in the handler go on."""
        (self.folder / word).touch()

    def wait_until_said(self, word: str, times: int = 1) -> None:
        """Until `say(word)` was called in the handler."""
        said = self.folder / f"{word}.said"
        wait_until(lambda: said.exists() and said.stat().st_size >= times)


PROCESS = """
import asyncio, inspect, logging, os, sys, time
from pathlib import Path
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine
import fairqueue as fq

def say(word):
    with open(Path({folder!r}, word + ".said"), "ab", buffering=0) as file:
        file.write(b".")

def wait_for(word):
    while not Path({folder!r}, word).exists():
        time.sleep(0.01)

async def wait_for_async(word):
    while not Path({folder!r}, word).exists():
        await asyncio.sleep(0.01)

{handler}

if __name__ == "__main__":
    logging.basicConfig(level="INFO", format="%(levelname)s %(message)s")
    make = create_async_engine if inspect.iscoroutinefunction(handle) else create_engine
    app = fq.Worker(make({url!r}, pool_size=15), {options})
    app.handler(handle)
    sys.exit(app.run())
"""


def wait_until_it_waits(app: fq.Worker) -> None:
    """Until the worker has nothing to do, and has asked for notifications."""

    def waits() -> bool:
        run = app._run
        if run is None or not run.idler.waiting or (listener := run.idler.listener) is None:
            return False
        # Neither is it about to look once more, as it has just been granted what it asked for, or as it has been told.
        return listener.listens and not listener._awaited and not run.news._event.is_set()

    wait_until(waits)


@contextmanager
def statements(engine: Any, containing: str) -> Iterator[list[str]]:
    """Those that the engine sends meanwhile."""
    sent: list[str] = []
    lock = threading.Lock()

    def note(_: Any, __: Any, statement: str, *___: Any) -> None:
        if containing in statement:
            with lock:
                sent.append(statement)

    engine = getattr(engine, "sync_engine", engine)
    event.listen(engine, "before_cursor_execute", note)
    try:
        yield sent
    finally:
        event.remove(engine, "before_cursor_execute", note)


def threads_of_workers() -> int:
    """How many are alive in this process, of whichever worker."""
    return len([each for each in threading.enumerate() if each.name.startswith("fairqueue-")])
