"""What is to become of a message, as its handler says it.

A handler that returns has done its work. It may return or raise one of the decisions below instead::

    import fairqueue as fq

    def convert(message, session):
        if session.get(Document, message.payload["document"]) is None:
            return fq.Cancel("the document was deleted")
        done = convert_some_pages(message.state or 0)
        if done is not None:
            return fq.Defer(delay=1, state=done)        # goes on from there

A decision that is *returned* commits with what the handler wrote in its session. One that is *raised*, from wherever in
the code, rolls that back first, as any exception does.
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from sqlalchemy import Select
from sqlalchemy.orm import Session

from fairqueue._checks import check_seconds
from fairqueue._sessions import BIND
from fairqueue.consuming import cancel, complete, defer, error_text, fail
from fairqueue.leases import LeasedMessage, Outcome
from fairqueue.payloads import json_text

from .database import impatient

if TYPE_CHECKING:
    from fairqueue.consuming import Results

__all__ = ["COMPLETE", "Cancel", "DeadLetter", "Decision", "Defer", "Retry", "apply"]

Message = LeasedMessage[Any]


class Decision(Exception):
    """The base of all decisions; also the plain one that the work is done, where a handler just returns."""

    #: What the database says when it has done it. Anything else: the lease was over.
    outcomes: tuple[Outcome, ...] = (Outcome.COMPLETED,)
    #: For the log.
    verdict: str = "is done"

    def statement(self, leases: list[Message]) -> Results:
        return complete(leases)

    def explained(self, error: BaseException | None) -> Decision:
        """The same, with what it was raised for as its reason, unless it has one."""
        return self

    def in_ascii(self) -> Decision | None:
        """The same, with whatever isn't ASCII escaped, for a database that has no such characters; None if it is."""
        return None


class _Reasoned(Decision):
    reason = ""  # also of a class of the application's that forgets to make one

    def __init__(self, reason: str | BaseException = "") -> None:
        super().__init__(reason)
        self.reason = error_text("reason", reason)

    def explained(self, error: BaseException | None) -> Decision:
        return self if error is None or self.reason else self._for(error_text("reason", error))

    def in_ascii(self) -> Decision | None:
        return None if self.reason.isascii() else self._for(self.reason.encode("ascii", "backslashreplace").decode())

    def _for(self, reason: str) -> Decision:
        """The same for another reason. A new one: the application may raise this one again, for something else."""
        same = type(self).__new__(type(self))  # not copied: a class of the application's may be made of other things
        vars(same).update(vars(self), reason=reason)
        return same


class Retry(_Reasoned):
    """The work failed and is to be tried again, if attempts are left.

    :param reason: kept with the message as its error; the exception that it is raised for, unless given.
    :param delay: seconds or a timedelta; None: the backoff of the message or its queue.
    """

    outcomes = (Outcome.FAILED, Outcome.DEAD)
    verdict = "failed"

    def __init__(self, reason: str | BaseException = "", *, delay: float | timedelta | None = None) -> None:
        super().__init__(reason)
        self.delay = None if delay is None else check_seconds("delay", delay, 0)

    def statement(self, leases: list[Message]) -> Results:
        return fail(leases, self.reason, delay=self.delay)


class DeadLetter(_Reasoned):
    """The work failed, and no further attempt would help.

    :param reason: kept with the dead letter as its error.
    """

    outcomes = (Outcome.DEAD,)
    verdict = "failed for good"

    def statement(self, leases: list[Message]) -> Results:
        return fail(leases, self.reason, retry=False)


class Cancel(_Reasoned):
    """The work isn't needed any more.

    :param reason: kept in history.
    """

    outcomes = (Outcome.CANCELLED,)
    verdict = "is cancelled"

    def statement(self, leases: list[Message]) -> Results:
        return cancel(leases, self.reason or None)


class Defer(Decision):
    """The work is to go on later; no failure, and no attempt used up.

    :param delay: seconds or a timedelta; None: at once, but behind what is ready in its channel by then. With 0 at
        once, in its old place there, but after what the worker has leased meanwhile.
    :param state: JSON that the next attempt finds in ``message.state``; None leaves what is there.
    """

    outcomes = (Outcome.DEFERRED,)
    verdict = "goes on later"

    def __init__(self, *, delay: float | timedelta | None = None, state: Any = None) -> None:
        super().__init__()
        self.delay = None if delay is None else check_seconds("delay", delay, 0)
        if state is not None:
            json_text(state, "state")  # refused here, where the handler can be blamed
        self.state = state

    def statement(self, leases: list[Message]) -> Results:
        return defer(leases, delay=self.delay, state=self.state)


#: The decision of a handler that just returns.
COMPLETE = Decision()


def apply(
    session: Session, decision: Decision, messages: list[Message], *, patience: float | None = None
) -> list[Outcome]:
    """Send a decision to the database; the caller commits. Returns what happened to each message, in that order.

    :param patience: seconds to wait for messages that somebody else has locked; None: as long as the session does.
    """
    statement = decision.statement(messages)
    if patience is not None and isinstance(statement, Select):  # an application's own may be anything
        statement = impatient(statement, patience)
    return [Outcome(row.result) for row in session.execute(statement, bind_arguments=BIND)]
