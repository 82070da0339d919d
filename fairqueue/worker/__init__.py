"""Working on the messages of a queue.

::

    import fairqueue as fq

    app = fq.Worker(engine, queue="default", concurrency=10)

    @app.handler
    def transcode(message, session):
        session.add(Result(document=message.payload["document"]))

``fairqueue worker shop.jobs:app`` runs it, where ``shop/jobs.py`` is that module; so does ``app.run()``. Run as many of
these processes as you like, on as many machines: they share the queue fairly and keep its limits exactly.

**Handlers.** A plain function runs in a thread, an async one as a task. One that takes ``(message, session)`` works in
a session whose commit also completes the message: both happen, or neither. That is how work is done exactly once,
whatever crashes. One that takes ``(message)`` alone does what can't be in the database anyway; its completions are sent
in batches, and after a crash it may be called again.

The session's transaction is the worker's to end. Where a handler ends it itself, what it wrote until then stands or
falls without its message: the log warns of that, once. Savepoints (``session.begin_nested()``) are its own business.

**When it fails.** An exception rolls the session back. The message is tried again after a growing pause, until its
attempts are used up, when it is a dead letter, and the log has an error. ``@app.handler(dead=(ValueError,),
cancel=(DocumentGone,))`` says which exceptions are worth no further attempt, and which mean that there is nothing to do
any more. A handler can return or raise :class:`Retry`, :class:`DeadLetter`, :class:`Cancel` and :class:`Defer` too
(:mod:`fairqueue.worker.decisions`).

**In a program of your own.** In an event loop, such as the lifespan of a web application, or beside a plain program::

    async with app:                                     # stops, and finishes what it has begun, at the end
        ...

    with app:                                           # the same, in a thread with an event loop of its own
        ...

Neither waits for a database that can't be reached: the worker goes on trying, and says so in the log. Give the engine
time limits, as drivers are patient with a host that doesn't answer: ``connect_timeout``, and those in docs/workers.md.

**When it stops.** On SIGTERM, SIGINT or SIGHUP it takes on nothing more and finishes what it has, for ``grace``
seconds at most; then it hands the rest back, with no attempt used up. :meth:`Worker.run` returns 0 if all were
finished, 3 if not.

**What it sends.** While it has free slots and finds nothing to do, it looks each ``poll`` seconds, when the database
notifies it, and when a time has come that something waits for: a delay, the rate of a channel, the end of a pause. It
asks for notifications only then: a busy worker costs producers nothing. Its leases and heartbeats don't wait for the
disk, as a lost one is no more than a redelivery; completions do, as the server is set.

Limitations: an async handler that blocks the event loop blocks the heartbeats too, and the leases run out. A plain
handler can't be stopped: after the time of grace its message is handed back while its thread goes on, and what it then
writes in its session is rolled back. LISTEN needs a connection that is the worker's own; behind a pooler in transaction
mode (with ``prepare_threshold=None`` among psycopg's ``connect_args``) the worker notices that nothing arrives, says so
in the log and polls. Producers can't PREPARE TRANSACTION while a worker waits for notifications; ``notify=False`` if
they do.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any, Self, TypeVar, overload

import anyio
from anyio.abc import TaskStatus
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_scoped_session, async_sessionmaker
from sqlalchemy.orm import Session, scoped_session, sessionmaker

from fairqueue._checks import check_count, check_flag, check_name, check_seconds
from fairqueue._signals import given_back, stops
from fairqueue.errors import FairqueueError, InvalidValue, SchemaVersionError
from fairqueue.models import Message, TypedMessage
from fairqueue.models.messages import check_message_type
from fairqueue.schema import check_dialect

from .database import CLOSING, backoff, in_a_line, place
from .decisions import Cancel, DeadLetter, Decision, Defer, Retry, apply
from .handlers import Errors, Handled, Handler
from .logs import log
from .running import Run
from .sessions import async_engines, check_isolation, check_pool, check_schema

__all__ = [
    "Cancel",
    "DeadLetter",
    "Decision",
    "Defer",
    "Handled",
    "Handler",
    "Retry",
    "Worker",
    "apply",
    "run",
]

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


#: What :func:`run` returns when messages were handed back unfinished.
HANDED_BACK = 3


class Worker:
    """Works on the messages of one queue.

    :param engine: an Engine or an AsyncEngine, for its own statements and, unless told otherwise, the handler's.
    :param queue: whose messages.
    :param concurrency: how many at a time, in this process: 1 to 10,000.
    :param prefetch: how many more to lease ahead, to stand by in this process: tenants that come now come after them.
        None: as many as slots take up during two dequeues, so that they wait less for these. That is none where
        handlers take a second, and 100 where they take no time (:mod:`fairqueue.worker.pace`). They are handed back
        when the oldest of them has stood by for a second. A number, 0 to 10,000, has so many stand by for as long as it
        takes.
    :param lease: for how many seconds (or a timedelta), 1 or more, messages are leased; leases are extended while their
        handlers run, so this is how long the messages of a killed worker wait.
    :param poll: seconds (or a timedelta) between two looks while there is nothing to do and no notification comes.
    :param grace: seconds (or a timedelta) that handlers have to finish once the worker is to stop.
    :param notify: whether to be woken by notifications of the database. Drivers other than psycopg and asyncpg can't
        hear them: the log says so, once for each start.
    :param name: kept with the messages and in their history; the host and process unless given.
    :param message_type: the class whose ``payload_type`` the payloads are read as.
    :param session: makes the session of a plain handler; ``Session(engine)`` unless given.
    :param async_session: makes the session of an async handler; ``AsyncSession(engine, expire_on_commit=False)`` unless
        given.
    :raises InvalidValue: naming the parameter.
    """

    def __init__(
        self,
        engine: Engine | AsyncEngine,
        *,
        queue: str = "default",
        concurrency: int = 10,
        prefetch: int | None = None,
        lease: float | timedelta = 30,
        poll: float | timedelta = 1,
        grace: float | timedelta = 30,
        notify: bool = True,
        name: str | None = None,
        message_type: type[TypedMessage[Any]] = Message,
        session: Callable[[], Session] | None = None,
        async_session: Callable[[], AsyncSession] | None = None,
    ) -> None:
        if not isinstance(engine, Engine | AsyncEngine):
            raise InvalidValue(f"engine must be an Engine or an AsyncEngine, not {type(engine).__name__}")
        check_dialect(engine.dialect)
        if isinstance(engine, Engine) and engine.dialect.is_async:
            raise InvalidValue(
                f"engine is an Engine of the async driver {engine.dialect.driver}: make it with create_async_engine(),"
                " or with a URL of postgresql+psycopg://"
            )
        self.engine = engine
        self.queue = check_name("queue", queue)
        self.concurrency = check_count("concurrency", concurrency, 1, 10_000)
        self.prefetch = None if prefetch is None else check_count("prefetch", prefetch, 0, 10_000)
        self.lease = check_seconds("lease", lease, 1)
        self.poll = check_seconds("poll", poll, 0.001)
        self.grace = check_seconds("grace", grace, 0)
        self.notify = check_flag("notify", notify)
        self._name = None if name is None else check_name("name", name)
        self.message_type = check_message_type(message_type)
        self.session = _factory("session", session, (async_sessionmaker, async_scoped_session, AsyncSession))
        self.async_session = _factory("async_session", async_session, (sessionmaker, scoped_session, Session))
        #: What :meth:`handler` was given; None before.
        self.registered: Handler | None = None
        self._run: Run | None = None
        self._task: asyncio.Task[int]
        self._exits: ExitStack

    @property
    def name(self) -> str:
        """As given; else the host and the process, which is the one that asks: this one may have been forked since."""
        return f"{socket.gethostname()[:200]}:{os.getpid()}" if self._name is None else self._name

    @overload
    def handler(self, function: F, /) -> F: ...
    @overload
    def handler(self, /, *, dead: Errors = (), cancel: Errors = ()) -> Callable[[F], F]: ...
    def handler(self, function: Any = None, /, *, dead: Errors = (), cancel: Errors = ()) -> Any:
        """Decorate the one function that handles the messages, ``f(message)`` or ``f(message, session)``.

        A second parameter that has a default gets a session only if its name is ``session``.

        :param dead: exceptions (a class or a tuple) after which the message is a dead letter at once.
        :param cancel: exceptions after which the message is cancelled.
        :raises InvalidValue: if the worker has a handler already, or has no sessions of the kind that it takes; if the
            function yields, or takes other parameters; or if ``dead`` or ``cancel`` are no exception classes.
        """
        if function is None:
            return lambda function: self._register(Handler(function, dead=dead, cancel=cancel))
        return self._register(Handler(function, dead=dead, cancel=cancel))

    def _register(self, handler: Handler) -> Callable[..., Any]:
        if self.registered is not None:
            raise InvalidValue(
                f"queue {self.queue!r} has a handler already, {self.registered.name}: another queue is another Worker"
            )
        engine = self.engine
        if handler.takes_session and handler.is_async and self.async_session is None:
            if not isinstance(engine, AsyncEngine):
                raise InvalidValue(
                    f"{handler.name} is async and takes a session, but engine is an Engine:"
                    " give an AsyncEngine, or async_session=async_sessionmaker(...)"
                )
            self.async_session = async_sessionmaker(engine, expire_on_commit=False)
        if handler.takes_session and not handler.is_async and self.session is None:
            if not isinstance(engine, Engine):
                raise InvalidValue(
                    f"{handler.name} is no async function and takes a session, but engine is an AsyncEngine:"
                    " give an Engine, or session=sessionmaker(...)"
                )
            self.session = sessionmaker(engine)
        self.registered = handler
        return handler.function

    def run(self) -> int:
        """Work until SIGTERM, SIGINT or SIGHUP. Returns the exit code: 0, or 3 if messages were handed back unfinished.

        :raises SchemaVersionError: if fairqueue isn't installed, or in another version.
        :raises FairqueueError: if it has no handler, or is running already; or outside the main thread, as only that
            one can handle signals: use ``with worker:`` there.
        :raises InvalidValue: if the engine's pool has too few connections, or the handler's sessions lead to another
            schema.
        :raises sqlalchemy.exc.SQLAlchemyError: if the database refuses what it asks for at first, as for want of a
            right. Later, and while it can't be reached, the worker goes on trying.
        """
        return run(self)

    async def run_async(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> int:
        """Work until :meth:`stop`, in this event loop. Returns how many messages were handed back unfinished.

        To cancel it is a :meth:`stop`, too: it ends, as cancelled, when those at hand are done.

        Raises what :meth:`run` does, but may be in any thread.

        :param task_status: told when it has begun, for ``await tasks.start(worker.run_async)`` in a task group.
        """
        if self.registered is None:
            raise FairqueueError(
                f"the worker of queue {self.queue!r} has no handler: decorate a function with @handler"
            )
        if self._run is not None:
            raise FairqueueError(
                f"the worker of queue {self.queue!r} is running already: for more at a time raise its concurrency, or"
                " make another Worker of the queue"
            )
        check_pool(self, self.registered)
        check_schema(self, self.registered)
        self._run = run = Run(self, task_status.started)
        try:
            with run.looking:  # a stop doesn't wait for a server that hangs
                await self._look(run)
            return await run.to_its_end()
        except asyncio.CancelledError:
            raise
        except BaseException:
            if run.begun:  # who awaits this task may do so at the very end only, and it has to be known now
                log.exception("%s has failed, and works no more", self.name)
            raise
        finally:
            run.threads.close()
            self._run = None

    async def _look(self, run: Run) -> None:
        """Wait for the database; and for its schema and rights, if whoever started the worker waits no more."""

        def lost() -> None:
            if not run.begun:
                log.warning("%s hasn't reached its database yet: %s", self.name, place(self.engine.url))
            run.begin()

        failures = 0
        while True:
            try:
                await run.database.insist("look at the schema", run.database.look, patience=1, lost=lost)
                check_isolation(self, run.handler)
                return
            except (SchemaVersionError, SQLAlchemyError) as error:
                if not run.begun:
                    raise
                failures += 1
                log.error("%s can't begin, and tries again: %s", self.name, in_a_line(error))
                await anyio.sleep(backoff(failures))

    def stop(self) -> None:
        """Take on no more messages and end when those at hand are done; again: don't wait for them.

        From the event loop, another thread, or a signal handler. It does nothing while the worker doesn't run: where it
        may come early, ``await tasks.start(worker.run_async)`` before.
        """
        self._stop(hurry=True)

    def _stop(self, *, hurry: bool) -> None:
        if (run := self._run) is not None:  # another thread may just be ending it
            run.threads.call_soon(partial(run.stop, hurry=hurry))

    def __enter__(self) -> Self:
        from anyio.from_thread import start_blocking_portal

        with ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal())
            future, _ = portal.start_task(partial(_run_alone, self))
            stack.callback(future.result)
            stack.callback(self._stop, hurry=False)
            self._exits = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    async def __aenter__(self) -> Self:
        started = _Started()
        task = asyncio.create_task(self.run_async(task_status=started))
        task.add_done_callback(lambda _: started.started())
        try:
            await started.event.wait()
        except BaseException:
            task.cancel()
            with anyio.CancelScope(shield=True):
                await asyncio.gather(task, return_exceptions=True)
            raise
        if task.done():
            task.result()
        self._task = task
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop(hurry=False)
        with anyio.CancelScope(shield=True):  # in a scope that is cancelled, too
            await self._task


class _Started(TaskStatus[None]):
    def __init__(self) -> None:
        self.event = anyio.Event()

    def started(self, value: None = None) -> None:
        self.event.set()


def run(*workers: Worker) -> int:
    """Run workers in this process until SIGTERM, SIGINT or SIGHUP; a second one of the first two hurries them.

    SIGHUP, of a closed terminal, keeps what else it means: ignored as by nohup, or handled by the program.

    :returns: the exit code: 0, or 3 if messages were handed back unfinished.
    :raises SchemaVersionError: as :meth:`Worker.run`, also all else, when the others have finished what they have.
    """
    if threading.current_thread() is not threading.main_thread():
        raise FairqueueError(
            "run() needs the main thread, as it handles signals: call it there, or use `with worker:` here"
        )
    with given_back():
        return anyio.run(_run_all, workers)


async def _run_all(workers: Sequence[Worker]) -> int:
    async def obey(signals: AsyncIterator[signal.Signals]) -> None:
        async for number in signals:
            for worker in workers:
                # A closed terminal sends two by itself: its shell's, and the system's.
                worker._stop(hurry=number != signal.SIGHUP)

    with anyio.open_signal_receiver(*stops()) as signals:
        obeying = asyncio.create_task(obey(signals))
        running = [asyncio.create_task(worker.run_async()) for worker in workers]
        try:
            await asyncio.wait(running, return_when=asyncio.FIRST_EXCEPTION)
            for worker in workers:  # if one has failed, the others finish what they have
                worker._stop(hurry=False)
            await asyncio.wait(running)
        finally:
            obeying.cancel()
            await _dispose(*workers)
    return HANDED_BACK if sum(task.result() for task in running) else 0


async def _run_alone(worker: Worker, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> int:
    """In an event loop that ends with the worker."""
    own = () if worker._run is not None else (worker,)  # one that runs already is refused, and keeps its connections
    try:
        return await worker.run_async(task_status=task_status)
    finally:
        await _dispose(*own)


async def _dispose(*workers: Worker) -> None:
    """With the event loop end the connections of AsyncEngines: of which workers may share one."""
    for engine in {engine for worker in workers for engine in async_engines(worker)}:
        with anyio.move_on_after(CLOSING, shield=True):
            await engine.dispose()


def _factory(field: str, given: T, others: tuple[type, ...]) -> T:
    if given is not None and not callable(given):
        raise InvalidValue(f"{field} must make sessions, as a sessionmaker does, not be {given!r}")
    kind: Any = given  # a class, or what makes them
    if issubclass(kind if isinstance(kind, type) else type(kind), others):
        raise InvalidValue(f"{field} must make the other kind of session, not be {given!r}")
    return given
