"""Bad input to what works on messages gets one clear error, before anything is sent: leases, endings, waiting."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import put
from tests.wrong import INF, LOST, NAMES, NAN, NOT_JSON


class TestLeases:
    @pytest.mark.parametrize("limit", [0, -1, 10_001, True, 1.5, "1", None, NAN])
    def test_limit(self, limit: Any) -> None:
        with pytest.raises(fq.InvalidValue, match=r"^limit must be a whole number from 1 to 10000, not"):
            fq.dequeue(limit=limit)

    @pytest.mark.parametrize("lease", [0, -1, NAN, INF, True, "30", None, timedelta(0), timedelta(days=-1), 1e9])
    def test_lease(self, lease: Any) -> None:
        for statement in (fq.dequeue, lambda lease: fq.heartbeat((1, 1), lease=lease)):
            with pytest.raises(fq.InvalidValue, match=r"^lease must be between 0.001 and 315576000 seconds, not"):
                statement(lease=lease)

    @pytest.mark.parametrize("delay", [-1, NAN, INF, True, "30", timedelta(days=-1)])
    def test_delay(self, delay: Any) -> None:
        for statement in (fq.fail, fq.defer):
            with pytest.raises(fq.InvalidValue, match=r"^delay must be between 0 and 315576000 seconds, not"):
                statement((1, 1), delay=delay)

    @pytest.mark.parametrize("retry", [None, 0, "no"])
    def test_retry(self, retry: Any) -> None:
        with pytest.raises(fq.InvalidValue, match=r"^retry must be True or False, not"):
            fq.fail((1, 1), retry=retry)

    @pytest.mark.parametrize("name", [name for name in NAMES.values() if name is not None])
    def test_worker(self, name: Any) -> None:
        with pytest.raises(fq.InvalidValue, match=r"^worker (must|holds)"):
            fq.dequeue(worker=name)

    @pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
    def test_queue(self, name: Any) -> None:
        with pytest.raises(fq.InvalidValue, match=r"^queue (must|holds)"):
            fq.dequeue(queue=name)

    @pytest.mark.parametrize("state", NOT_JSON, ids=range(len(NOT_JSON)))
    def test_state(self, state: Any) -> None:
        with pytest.raises(fq.InvalidValue, match=r"^state (must be|holds)"):
            fq.defer((1, 1), state=state)

    @pytest.mark.parametrize("given", [7, None, 1.5, "ab", [7], [(1,)], (1, 2, 3), [("1", 1)], fq.Message("acme")])
    @pytest.mark.parametrize("statement", [fq.complete, fq.fail, fq.defer, fq.heartbeat])
    def test_no_leases(self, statement: Callable[[Any], object], given: Any) -> None:
        with pytest.raises(fq.InvalidValue, match=r"^a lease is a LeasedMessage from dequeue\(\) or a pair"):
            statement(given)

    @pytest.mark.parametrize("given", [1.5, True, "ab", ["1"], [None], fq.History()])
    @pytest.mark.parametrize(
        "statement", [fq.cancel, fq.redrive, fq.ending, lambda given: fq.wait_for(LOST, given, timeout=0)]
    )
    def test_no_messages(self, statement: Callable[[Any], object], given: Any) -> None:
        with pytest.raises(fq.InvalidValue, match=r"^a message is an id, a Message, a LeasedMessage or"):
            statement(given)

    def test_no_ids(self) -> None:
        """Numbers out of a URL, that no column could hold."""
        expected = rf"^id must be a whole number from {-(2**63)} to {2**63 - 1}, not {2**63}$"
        for statement in (fq.cancel, fq.redrive, fq.ending):
            with pytest.raises(fq.InvalidValue, match=expected):
                statement([2**63])
        with pytest.raises(fq.InvalidValue, match=expected):
            fq.complete((2**63, 1))
        with pytest.raises(fq.InvalidValue, match=rf"^attempt must be a whole number from .*, not {2**31}$"):
            fq.complete((1, 2**31))

    def test_leases_among_ids(self, session: Session) -> None:
        """Does the caller mean what is still its own, or the message?"""
        put(session, "acme")
        (leased,) = session.scalars(fq.dequeue()).all()
        leases: list[Any] = [leased, (leased.id, leased.attempt)]
        for lease in leases:
            with pytest.raises(fq.InvalidValue, match=r"^messages must be all leases or none of them, but 1 of 2 are:"):
                fq.cancel([lease, 7])

    @pytest.mark.parametrize("given", [(1,), (1, 2, 3), [(1, "1")], [(1, 1, 1)]])
    def test_what_is_no_pair(self, given: Any) -> None:
        """To cancel it would make a difference whether two numbers are two messages, or a lease."""
        statements: list[Callable[[Any], object]] = [fq.cancel, fq.complete]
        for statement in statements:
            with pytest.raises(fq.InvalidValue, match=r"^a lease is a LeasedMessage from dequeue\(\) or a pair"):
                statement(given)

    def test_nothing_to_redrive(self) -> None:
        redrive: Any = fq.redrive
        for arguments, text in (
            ({}, "one of messages and queue must be given, not none"),
            ({"messages": None}, "one of messages and queue must be given, not none"),
            ({"messages": [1], "queue": "default"}, "one of messages and queue must be given, not both"),
            ({"messages": [1], "channel": "acme"}, "channel 'acme' must be given with its queue, not with messages"),
            ({"queue": ""}, "queue must have 1 to 255 characters, not 0"),
            ({"queue": "default", "channel": "x" * 256}, "channel must have 1 to 255 characters, not 256"),
        ):
            with pytest.raises(fq.InvalidValue, match=f"^{text}$"):
                redrive(**arguments)


class TestWaiting:
    @pytest.mark.parametrize("timeout", [-1, NAN, INF, True, "30", timedelta(days=-1), 1e9])
    def test_timeout(self, timeout: Any) -> None:
        with pytest.raises(fq.InvalidValue, match=r"^timeout must be between 0 and 315576000 seconds, not"):
            fq.wait_for(LOST, 1, timeout=timeout)

    def test_engine(self, session: Session, engine: Engine) -> None:
        """What has a transaction sees no end of others."""
        with engine.connect() as connection:
            for given in (session, connection, create_async_engine(LOST.url).connect(), None, str(engine.url)):
                with pytest.raises(fq.InvalidValue, match=r"^engine must be an Engine or an AsyncEngine, not \w+:"):
                    fq.wait_for(given, 1, timeout=0)  # type: ignore[call-overload]

    @pytest.mark.parametrize("error", [7, b"broken", {}])
    def test_error(self, error: Any) -> None:
        with pytest.raises(fq.InvalidValue, match=r"^error must be text or an exception, not"):
            fq.fail((1, 1), error)

    def test_error_of_any_text(self, session: Session) -> None:
        """What a handler died of is not to be lost for a character that PostgreSQL can't store."""
        fq.enqueue(session, "acme")
        [message] = session.scalars(fq.dequeue())
        session.execute(fq.fail(message, FileNotFoundError("caf\udce9\x00.pdf"), delay=0))
        [message] = session.scalars(fq.dequeue())
        assert message.error == "FileNotFoundError: caf?.pdf"
