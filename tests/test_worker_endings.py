"""How a worker ends that wasn't told to, or at a bad moment; what it leaves, and what doesn't end it."""

import asyncpg
import pytest
from sqlalchemy import event
from sqlalchemy.orm import Session

from tests.acts import put
from tests.fixtures.workers import WorkerOf
from tests.working import wait_for_endings


class TestFailures:
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
