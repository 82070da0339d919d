"""How a worker ends that wasn't told to, or at a bad moment; what it leaves, and what doesn't end it."""

from typing import NoReturn

import asyncpg
import pytest
from anyio import to_thread
from sqlalchemy import event
from sqlalchemy.orm import Session

from fairqueue.worker.running import Run
from tests.acts import put, wait_until
from tests.fixtures.workers import WorkerOf
from tests.working import wait_for_endings


async def fail(_: Run, *__: object) -> NoReturn:
    raise ZeroDivisionError("mine")


class TestFailures:
    def test_in_a_with_block(
        self, worker_of: WorkerOf, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It is in the log at once, not only raised at the end of the block."""
        monkeypatch.setattr(Run, "dequeue", fail)
        with pytest.raises(ExceptionGroup), worker_of("plain", lambda *_: None, name="mine"):
            wait_until(lambda: "mine has failed, and works no more" in caplog.text)
        assert "ZeroDivisionError: mine" in caplog.text

    async def test_in_an_event_loop(
        self, worker_of: WorkerOf, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(Run, "dequeue", fail)
        with pytest.raises(ExceptionGroup):
            async with worker_of("plain", lambda *_: None, name="mine"):
                await to_thread.run_sync(wait_until, lambda: "mine has failed, and works no more" in caplog.text)
        assert "ZeroDivisionError: mine" in caplog.text

    def test_a_server_that_refuses_asyncpg(
        self, session: Session, worker_of: WorkerOf, caplog: pytest.LogCaptureFixture
    ) -> None:
        """As SQLAlchemy 2.0 lets it through: it passes."""
        put(session, "acme")
        app = worker_of("asyncpg", lambda *_: None)
        refused: list[object] = []

        def refuse(*_: object) -> None:
            if len(refused) < 3:
                refused.append(1)
                raise asyncpg.exceptions.TooManyConnectionsError("sorry, too many clients already")

        event.listen(app.engine.sync_engine, "do_connect", refuse)  # type: ignore[union-attr]
        with app:
            assert wait_for_endings(session, 1) == {"completed": 1}
        assert "can't look at the schema, trying again" in caplog.text
        assert "TooManyConnectionsError: sorry, too many clients already" in caplog.text
