"""How a worker waits while nothing more is eligible: for news, for the time that something waits for, or the next poll.

News is a notification of the database, or that one of the worker's own messages has ended, which may make room under a
limit. Nobody is notified when a time has come: so the database is asked when that will be (``queue_due.sql``).
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from sqlalchemy import Double, select
from sqlalchemy.exc import SQLAlchemyError

from fairqueue._functions import SchemaFunction

from .database import Database
from .jobs import Signal
from .listening import Listener
from .logs import log
from .wire import can_listen

if TYPE_CHECKING:
    from . import Worker

__all__ = ["Idler"]

#: Seconds before the database is asked when something is due: a question that a busy worker need not ask. Not for as
#: long where something was due last time, and not for less than that at all.
_UNASKED, _GLANCE = 0.1, 0.01


class Idler:
    """Between a dequeue that found less than there are places for, and the next one.

    :param news: what is set when there may be something to do.
    """

    def __init__(self, worker: Worker, database: Database, news: Signal) -> None:
        self._poll = worker.poll
        self._database = database
        self._news = news
        self._when_due = select(SchemaFunction("queue_due", worker.queue, type_=Double()))
        self._unasked = _UNASKED
        #: Right now.
        self.waiting = False
        #: How often, since the last message, nothing was left of what was due.
        self.in_vain = 0
        self.listener: Listener | None = None
        if worker.notify and can_listen(worker.engine):
            self.listener = Listener(database, worker.queue, news.set, busy=lambda: not self.waiting)
        elif worker.notify:
            log.warning(
                "the driver %s can't hear notifications of the database, so queue %r is polled each %g s: begin the"
                " engine's URL with postgresql+psycopg://. Worker(notify=False) says that it is meant to be so",
                worker.engine.dialect.driver,
                worker.queue,
                worker.poll,
            )

    async def idle(self) -> None:
        """Wait for something to happen, or ask to be notified of it; then it is time for another dequeue."""
        self.waiting = True
        listener = self.listener
        if listener is None or not listener.works or listener.listens:
            await self._doze()
        elif not await self._news.wait(listener.pause()):
            await listener.ask(otherwise=self._news.wait, patience=self._poll)
        self.waiting = False

    async def _doze(self) -> None:
        """Until the next poll, or until something may be served of which nobody is notified: its time has come."""
        # Longer by chance, so that workers which were started together don't stay together.
        pause = self._poll * random.uniform(1, 1.2)  # noqa: S311
        unasked = min(pause, self._unasked)
        if await self._news.wait(unasked) or unasked == pause:
            return
        try:
            due = await self._database.run(lambda session: session.scalars(self._when_due).one(), alone=True)
        except (SQLAlchemyError, OSError):
            due = None  # the next dequeue says what is wrong
        if due is not None and due < 0:  # who was there has left a part of ever so much to others
            self.in_vain = 0
        # Where others were there first, ever later: not all have to come for each message that a rate lets out.
        if due is not None and (due := max(due, _GLANCE * 2**self.in_vain)) < pause:
            self._unasked = _GLANCE
            if not await self._news.wait(due):
                self.in_vain += 1
        else:
            self._unasked = _UNASKED
            await self._news.wait(pause - unasked)
