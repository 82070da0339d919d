"""Hearing that a queue has something to do: LISTEN on a connection of its own.

The worker says when it is about to wait (:meth:`Listener.ask`), and only then do producers notify; see
``queue_listen.sql``. Whether notifications arrive at all is tried out by sending one to ourselves: behind a pooler in
transaction mode LISTEN succeeds and nothing ever comes. Then the worker is told by polling alone, and the log says so.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable

import anyio
from sqlalchemy import func, select

from fairqueue._functions import SchemaFunction

from .database import LONGEST, Database, backoff, in_a_line
from .logs import log
from .wire import Wire, connect, first_of

__all__ = ["Listener"]

#: Seconds that a notification to ourselves may take, and between two of them while all is well.
PROBE_TIMEOUT = 5.0
PROBE_INTERVAL = 60.0
#: Seconds before trying again what did not work.
RETRY_INTERVAL = 600.0
#: Seconds between two requests for notifications at least. A worker that is woken more often looks by itself.
THROTTLE = 0.02
#: Seconds that the database may take to answer the listener.
ANSWER_TIMEOUT = 10.0


class Listener:
    """Keeps a connection that listens, in the task that :meth:`run` is.

    :param wake: called when a notification came.
    :param busy: whether the worker isn't waiting just now; then a notification is the last until it asks again.
    """

    def __init__(self, database: Database, queue: str, wake: Callable[[], None], busy: Callable[[], bool]) -> None:
        self._database = database
        self._queue = queue
        self._wake = wake
        self._busy = busy
        self._probe = f"fairqueue_probe_{secrets.token_hex(8)}"
        self._probed = anyio.Event()
        self._asked_at = float("-inf")
        self._wanted = False
        self._changed = anyio.Event()
        self._settled = anyio.Event()
        self._asked = False
        self._awaited = False
        #: Notifications arrive.
        self.works = False
        self._has_worked = False

    @property
    def listens(self) -> bool:
        """The queue has been asked for notifications, and we aren't about to take that back."""
        return self._asked and self._wanted

    def pause(self) -> float:
        """How many seconds to wait before asking again."""
        return max(0.0, self._asked_at + THROTTLE - anyio.current_time())

    async def ask(self, otherwise: Callable[[], Awaitable[object]], patience: float) -> None:
        """From now on be notified. What came before has to be looked for once more, afterwards.

        :param otherwise: what may come before the answer; it isn't waited for any longer then.
        :param patience: seconds that the answer is waited for at most.
        """
        self._asked_at = anyio.current_time()
        self._wanted = True
        self._settled = anyio.Event()
        self._changed.set()
        self._awaited = True
        with anyio.move_on_after(min(patience, PROBE_TIMEOUT)):
            await first_of(self._settled.wait, otherwise)
        self._awaited = False

    def cease(self) -> None:
        """From now on don't be notified, if possible."""
        self._wanted = False
        self._changed.set()

    async def run(self) -> None:
        """Listen, for ever; connects again when the connection is lost."""
        failures = 0
        while True:
            began = anyio.current_time()
            try:
                async with connect(self._database) as wire:
                    await self._listen(wire)
                    pause = RETRY_INTERVAL
                    log.warning(
                        "notifications of the database do not arrive, so queue %r is polled: is there a connection"
                        " pooler in transaction mode? Worker(notify=False) says that it is meant to be so",
                        self._queue,
                    )
            except Exception as error:  # noqa: BLE001 - whatever it is, polling goes on
                # It may fail after all was well: at queue_listen, if the role mustn't call that.
                failures = 1 if anyio.current_time() - began > LONGEST else failures + 1
                pause = backoff(failures)
                log.warning("lost the connection that listens, trying again in %.1f s: %s", pause, in_a_line(error))
            finally:
                self.works = self._asked = self._wanted = False
                self._settled.set()
            await anyio.sleep(pause)

    async def _listen(self, wire: Wire) -> None:
        """For ever, unless notifications have never arrived."""
        with anyio.fail_after(ANSWER_TIMEOUT):
            await wire.listen(self._probe)
        while await self._arrives(wire):
            if not self.works:
                self.works = self._has_worked = True
                log.info("notifications of the database arrive")
                self._wake()
            with anyio.move_on_after(PROBE_INTERVAL):
                while True:
                    await self._step(wire)
        if self._has_worked:  # so it isn't a pooler; but maybe a server that is slow after a restart
            raise ConnectionError("notifications don't arrive any more")

    async def _arrives(self, wire: Wire) -> bool:
        """Whether a notification that another connection sends comes through."""
        self._probed = anyio.Event()
        with anyio.fail_after(ANSWER_TIMEOUT):
            await self._database.run(lambda session: session.execute(select(func.pg_notify(self._probe, ""))))
        with anyio.move_on_after(PROBE_TIMEOUT):
            while not self._probed.is_set():
                await self._step(wire)
        return self._probed.is_set()

    async def _step(self, wire: Wire) -> None:
        """Tell the database whether we want to be notified, where that has changed, and wait for what comes."""
        self._changed = anyio.Event()
        wanted = self._wanted and self.works
        if self._asked != wanted:
            self._asked = False  # also before the answer to queue_unlisten: by then it may be taken back already
            # Shielded: an answer that nobody reads would be taken for that of the next statement.
            with anyio.fail_after(ANSWER_TIMEOUT, shield=True):
                function = "queue_listen" if wanted else "queue_unlisten"
                answer = await wire.execute(select(SchemaFunction(function, self._queue)))
                if wanted:
                    await wire.listen(answer)
            self._asked = wanted
            if wanted and not self._awaited:
                self._wake()  # granted so late that who asked has looked before
        if self._asked == self._wanted:
            self._settled.set()
        for channel in await wire.wait(self._changed):
            self._heard(channel)

    def _heard(self, channel: str) -> None:
        if channel == self._probe:
            self._probed.set()
            return
        if self._busy():
            self.cease()
        self._wake()
