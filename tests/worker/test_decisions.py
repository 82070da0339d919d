"""What becomes of a message when its handler fails, or says what is to become of it."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import select, text
from sqlalchemy.orm import Session

import fairqueue as fq
from fairqueue.testing import drain
from fairqueue.worker import Handler
from tests.acts import put, wait_until
from tests.fixtures.workers import EngineOf, WorkerOf
from tests.worker.working import WITH_SESSION, act, add_effects, effects, is_empty, wait_for_endings

pytestmark = pytest.mark.shared_database


class Gone(Exception):
    pass


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("not even this")


def group(*errors: BaseException) -> BaseException:
    return BaseExceptionGroup("of tasks", [*errors])


def raised_for(cause: BaseException, decision: fq.Retry, *, implied: bool = False) -> fq.Retry:
    """As ``raise decision from cause`` has it; or ``raise decision`` where the cause was caught."""
    if implied:
        decision.__context__ = cause
    else:
        decision.__cause__ = cause
    return decision


def fate(session: Session) -> str:
    """What became of the one message: how it ended, or what it waits for."""
    session.rollback()
    if dead := session.scalars(select(fq.DeadMessage)).all():
        return f"dead: {dead[0].error}"
    if ended := session.execute(select(fq.History.outcome, fq.History.error)).all():
        return f"{ended[0].outcome}: {ended[0].error}"
    columns = "leased_until, forgiven, error, state, dequeue_at > fairqueue.unix_ms(fairqueue.clock()) + 1e6 AS later"
    row = session.execute(text(f"SELECT attempt, {columns} FROM fairqueue.message")).one_or_none()
    if row is None or row.leased_until is not None or not row.attempt:
        return ""  # it is about to happen
    return f"attempt {row.attempt - row.forgiven}, later {row.later}, state {row.state}: {row.error}"


DECISIONS: dict[str, tuple[Callable[[], object], str]] = {
    "Retry": (lambda: fq.Retry("not yet", delay=3600), "attempt 1, later True, state None: not yet"),
    "Retry of an error": (lambda: fq.Retry(Gone("x"), delay=3600), "attempt 1, later True, state None: Gone: x"),
    "DeadLetter": (lambda: fq.DeadLetter("useless"), "dead: useless"),
    "DeadLetter class": (lambda: fq.DeadLetter, "dead: "),
    "Cancel": (lambda: fq.Cancel("not needed"), "cancelled: not needed"),
    "Cancel class": (lambda: fq.Cancel, "cancelled: None"),
    "Cancel of what can't be stored": (lambda: fq.Cancel("a\x00b\udcff"), "cancelled: ab?"),
    "Defer": (lambda: fq.Defer(delay=3600, state={"page": 2}), "attempt 0, later True, state {'page': 2}: None"),
}


CASES = [("plain session", decision, False) for decision in DECISIONS]
CASES += [("async session", decision, True) for decision in DECISIONS]
CASES += [(kind, "Defer", False) for kind in ("plain", "async", "async session", "asyncpg session")]
CASES += [(kind, "Cancel", True) for kind in ("plain", "async", "plain session", "asyncpg session")]


@pytest.mark.parametrize(("kind", "decision", "raised"), CASES)
def test_decisions(kind: str, decision: str, raised: bool, session: Session, worker_of: WorkerOf) -> None:
    """What is returned commits with the handler's writes; what is raised undoes them. No other attempt follows."""
    make, expected = DECISIONS[decision]
    add_effects(session)
    (id_,) = put(session, "acme")

    def body(message: fq.LeasedMessage[Any], own: Session | None) -> object:
        act(message, own)
        made: Any = make()
        if raised:
            raise made
        return made

    with worker_of(kind, body):
        wait_until(lambda: fate(session))
    assert fate(session) == expected
    assert effects(session) == ([(id_, 1)] if kind in WITH_SESSION and not raised else [])


ERRORS: dict[str, tuple[Callable[[], BaseException], str]] = {
    "any": (lambda: KeyError("x"), "attempt 1, later True, state None: KeyError: 'x'"),
    "dead": (lambda: UnicodeDecodeError("utf-8", b"x", 0, 1, "bad"), "dead: UnicodeDecodeError: 'utf-8' codec"),
    "cancel": (lambda: Gone("the user \udcff"), "cancelled: Gone: the user ?"),
    "alone in a group": (lambda: group(group(Gone("twice"))), "cancelled: Gone: twice"),
    "a decision in a group": (lambda: group(fq.DeadLetter("useless")), "dead: useless"),
    "several in a group": (
        lambda: group(Gone("one"), ValueError("two")),
        "attempt 1, later True, state None: ExceptionGroup: of tasks (2 sub-exceptions)\nGone: one\nValueError: two",
    ),
    "unprintable": (Unprintable, "attempt 1, later True, state None: Unprintable"),
    "exit": (lambda: SystemExit(2), "attempt 1, later True, state None: SystemExit: 2"),
    "base": (lambda: BaseException("rude"), "attempt 1, later True, state None: BaseException: rude"),
    "stop": (lambda: StopIteration(1), "attempt 1, later True, state None: "),
    "retry of an error": (
        lambda: raised_for(Gone("x"), fq.Retry(delay=3600)),
        "attempt 1, later True, state None: Gone: x",
    ),
    "retry of a caught error": (
        lambda: raised_for(Gone("x"), fq.Retry(delay=3600), implied=True),
        "attempt 1, later True, state None: Gone: x",
    ),
    "retry with a reason of its own": (
        lambda: raised_for(Gone("x"), fq.Retry("busy", delay=3600)),
        "attempt 1, later True, state None: busy",
    ),
    "wrong reason": (lambda: fq.Retry(5), "attempt 1, later True, state None: InvalidValue: reason must be"),  # type: ignore[arg-type]
    "wrong state": (lambda: fq.Defer(state=object()), "attempt 1, later True, state None: InvalidValue: state must be"),
    "cancelled": (asyncio.CancelledError, "attempt 1, later True, state None: "),
}


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("kind", ["plain session", "async session"])
def test_errors(kind: str, error: str, session: Session, worker_of: WorkerOf, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever a handler raises is of its own message, and the worker goes on with the next one."""
    # pytest-xdist can't send a captured log with what is no character.
    caplog.set_level(logging.CRITICAL, "fairqueue.worker")
    make, expected = ERRORS[error]
    add_effects(session)
    session.add(fq.Queue(name="default", backoff=36000))
    put(session, "acme", payload="bad")

    def body(message: fq.LeasedMessage[Any], own: Session | None) -> object:
        act(message, own)
        if message.payload == "bad":
            raise make()
        return None

    with worker_of(kind, body, dead=(UnicodeError,), cancel=Gone, concurrency=1):
        wait_until(lambda: fate(session))
        assert fate(session).startswith(expected)
        assert effects(session) == []
        (good,) = put(session, "acme")
        wait_until(lambda: good in completed(session))


def test_a_task_that_cancels_itself(session: Session, worker_of: WorkerOf, caplog: pytest.LogCaptureFixture) -> None:
    """It leaves no traceback, so the log has to say why the message is tried again."""
    session.add(fq.Queue(name="default", backoff=36000))
    put(session, "acme")

    def body(*_: object) -> None:
        raise asyncio.CancelledError

    with worker_of("async", body):
        wait_until(lambda: fate(session))
    assert "the handler was cancelled from within" in caplog.text


def test_an_error_that_is_not_to_be_told() -> None:
    """A decision that is raised ``from None`` has no reason."""

    def work(_: object) -> None:
        try:
            raise KeyError("a secret")
        except KeyError:
            raise fq.Retry from None

    handled = Handler(work).run(SimpleNamespace(reader=None), None)  # type: ignore[arg-type]
    assert isinstance(handled.decision, fq.Retry)
    assert handled.decision.reason == ""


def test_one_that_is_raised_again() -> None:
    """An object that is raised again and again, as of a module, has each time the reason of that time."""
    later = fq.Retry(delay=60)

    def work(message: Any) -> None:
        if message.number is None:
            raise later
        try:
            raise KeyError(message.number)
        except KeyError as error:
            if message.number == 1:
                raise later from error
            raise later  # noqa: B904 - it is this that says why

    handled = [Handler(work).run(SimpleNamespace(reader=None, number=number), None) for number in (1, 2, None)]  # type: ignore[arg-type]
    decisions: list[Any] = [each.decision for each in handled]
    assert [(decision.reason, decision.delay) for decision in decisions] == [
        ("KeyError: 1", 60),
        ("KeyError: 2", 60),
        ("", 60),
    ]
    assert later.__traceback__ is None


@pytest.mark.parametrize("kind", ["plain", "async", "async session"])
def test_an_interrupt_of_a_thread(kind: str, session: Session, worker_of: WorkerOf) -> None:
    """It is no Ctrl-C, also where the thread has an event loop, but an error of its message as any other."""
    put(session, "bad", max_attempts=1)
    put(session, "good")

    def body(message: fq.LeasedMessage[Any], _: object) -> None:
        if message.channel == "bad":
            raise KeyboardInterrupt

    with worker_of(kind, body):
        assert wait_for_endings(session, 2) == {"dead": 1, "completed": 1}


def completed(session: Session) -> list[int]:
    session.rollback()
    return list(session.scalars(select(fq.History.message_id).where(fq.History.outcome == "completed")))


def savepoints(session: Session) -> None:
    with session.begin_nested():
        session.execute(text("SELECT 1"))
    session.begin_nested().rollback()
    with contextlib.suppress(ZeroDivisionError), session.begin_nested():
        raise ZeroDivisionError


def fail(session: Session) -> None:
    session.execute(text("SELECT 1 / 0"))


TRANSACTIONS: dict[str, tuple[Callable[[Session], object], bool]] = {
    "commits": (Session.commit, True),
    "rolls back": (Session.rollback, True),
    "closes": (Session.close, True),
    "savepoints": (savepoints, False),
    "fails": (fail, False),
    "flushes": (Session.flush, False),
}


@pytest.mark.parametrize("what", TRANSACTIONS)
@pytest.mark.parametrize("kind", ["plain session", "async session"])
def test_whose_transaction_it_is(
    kind: str, what: str, session: Session, worker_of: WorkerOf, caplog: pytest.LogCaptureFixture
) -> None:
    """A handler that ends it by itself gives up what it was given it for: that is said, once."""
    do, ends = TRANSACTIONS[what]
    add_effects(session)
    put(session, "acme", 3, max_attempts=1)

    def body(message: fq.LeasedMessage[Any], own: Session) -> None:
        act(message, own)
        do(own)

    with worker_of(kind, body, concurrency=1):
        wait_for_endings(session, 3)
    assert caplog.text.count("ends the transaction of its session itself") == ends


def test_attempts_are_used_up(session: Session, worker_of: WorkerOf, caplog: pytest.LogCaptureFixture) -> None:
    """Which is in the log, as an error, once."""
    put(session, "acme", max_attempts=3, backoff=0)
    attempts: list[tuple[int, str | None]] = []

    def body(message: fq.LeasedMessage[Any], _: object) -> None:
        attempts.append((message.attempt, message.error))
        raise Gone(message.attempt)

    with worker_of("plain", body):
        assert wait_for_endings(session, 1) == {"dead": 1}
    assert attempts == [(1, None), (2, "Gone: 1"), (3, "Gone: 2")]
    assert fate(session) == "dead: Gone: 3"
    (told,) = [each.getMessage() for each in caplog.records if each.levelno >= logging.ERROR]
    assert told == (
        "message 1 of channel 'acme', attempt 3: the message is a dead letter now; `fairqueue dead list` shows it"
    )


def test_work_in_steps(session: Session, worker_of: WorkerOf) -> None:
    """Deferrals hand on a state, and use up no attempt."""
    put(session, "acme", max_attempts=1)
    states: list[Any] = []

    def body(message: fq.LeasedMessage[Any], _: object) -> object:
        states.append(message.state)
        return fq.Defer(state=len(states)) if len(states) < 4 else None

    with worker_of("async session", body):
        assert wait_for_endings(session, 1) == {"completed": 1}
    assert states == [None, 1, 2, 3]


@pytest.mark.parametrize(
    ("said", "order"), [({}, ["steps", "other", "steps"]), ({"delay": 0}, ["steps", "steps", "other"])]
)
def test_the_next_step_comes_after_what_is_ready(said: dict[str, Any], order: list[str], session: Session) -> None:
    """In its own channel; unless it is told to keep its place."""
    put(session, "acme", payload="steps", priority=2)
    put(session, "acme", payload="other", priority=1)

    def body(message: fq.LeasedMessage[Any]) -> object:
        return fq.Defer(**said, state=1) if message.payload == "steps" and message.state is None else None

    assert [message.payload for message, _ in drain(session, body)] == order


@dataclass
class Upload:
    path: str


class UploadMessage(fq.TypedMessage[Upload], payload_type=Upload):
    pass


@pytest.mark.parametrize("kind", ["plain", "async session"])
def test_a_payload_that_does_not_fit(
    kind: str, session: Session, worker_of: WorkerOf, caplog: pytest.LogCaptureFixture
) -> None:
    """It is a dead letter, the handler isn't called, and the others aren't concerned."""
    put(session, "acme", payload={"path": 7})
    put(session, "acme", payload={"path": "a.pdf"})
    paths: list[str] = []

    def body(message: fq.LeasedMessage[Any], _: object) -> None:
        paths.append(message.payload.path)

    with worker_of(kind, body, message_type=UploadMessage):
        assert wait_for_endings(session, 2) == {"dead": 1, "completed": 1}
    assert paths == ["a.pdf"]
    assert fate(session).startswith("dead: InvalidValue: the stored payload is no ")
    (told,) = (record for record in caplog.records if "failed for good" in record.getMessage())
    assert ("failed for good: the stored payload is no " in told.getMessage(), told.exc_info) == (True, None)


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize("told", ["returned", "raised"])
@pytest.mark.parametrize("kind", ["plain", "async"])
def test_a_decision_that_cannot_be_sent(kind: str, told: str, session: Session, worker_of: WorkerOf) -> None:
    """It is left to its lease, and those that are sent along with it are not."""

    class Broken(fq.Retry):
        def __init__(self) -> None:  # forgets all that a Retry is made of
            pass

    put(session, "bad", payload="bad")
    put(session, "acme", 5)

    def body(message: fq.LeasedMessage[Any], _: object) -> object:
        if message.payload != "bad":
            return None
        if told == "raised":
            raise Broken from KeyError("nothing")
        return Broken()

    with worker_of(kind, body, lease=3600):
        assert wait_for_endings(session, 5) == {"completed": 5}
        put(session, "acme")
        assert wait_for_endings(session, 6) == {"completed": 6}
    session.rollback()
    assert session.scalars(select(fq.Message.channel)).all() == ["bad"]


@pytest.mark.parametrize("kind", ["coroutine", "generator", "async generator"])
def test_what_nobody_runs(kind: str, session: Session, engine_of: EngineOf) -> None:
    """A function that only hands on an async one, or one that yields, looks like a plain one: it isn't done."""
    put(session, "acme", max_attempts=1)
    done: list[object] = []

    async def coroutine(message: object) -> None:
        done.append(message)

    def generator(message: object) -> Iterator[None]:
        done.append(message)
        yield

    async def async_generator(message: object) -> AsyncIterator[None]:
        done.append(message)
        yield

    work: Any = {"coroutine": coroutine, "generator": generator, "async generator": async_generator}[kind]
    app = fq.Worker(engine_of("plain"), poll=0.05)
    app.handler(lambda message: work(message))  # noqa: PLW0108 - this is what it is about
    with app:
        assert wait_for_endings(session, 1) == {"dead": 1}
    assert fate(session).startswith(f"dead: TypeError: the handler returned <{kind.replace(' ', '_')} object ")
    assert not done
    assert is_empty(session)
