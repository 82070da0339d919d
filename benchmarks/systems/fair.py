"""fairqueue, by the functions that every language calls."""

from __future__ import annotations

from typing import Any, ClassVar

import psycopg
from sqlalchemy import create_engine

from fairqueue import embedded, schema

from .base import SQLSystem, value_of


class Fairqueue(SQLSystem):
    name = "fairqueue"
    about = "this project, by its SQL functions over psycopg, without SQLAlchemy"
    fair = True

    enqueue_sql = "INSERT INTO fairqueue.message (channel, payload) VALUES (%(channel)s, %(payload)s::jsonb)"
    fill_sql = """
        INSERT INTO fairqueue.message (channel, payload, dequeue_at)
        SELECT %(prefix)s || i %% %(channels)s, %(payload)s::jsonb,
            fairqueue.unix_ms(fairqueue.clock()) + %(delay_ms)s
        FROM generate_series(%(start)s::bigint, %(start)s::bigint + %(messages)s - 1) i
    """
    dequeue_sql: ClassVar[str] = (
        "SELECT id, attempt, channel, payload{at}"
        " FROM fairqueue.message_dequeue('default', %(n)s::integer, %(lease)s::double precision)"
    )
    complete_sql = (
        "SELECT id FROM fairqueue.message_complete(%(ids)s::bigint[], %(attempts)s::integer[])"
        " WHERE result = 'completed'"
    )
    backlog_sql = "SELECT count(*) FROM fairqueue.message"
    #: What gives the queue its policy; None: it has that of all queues.
    policy_sql: ClassVar[str | None] = None

    def install(self, dsn: str) -> None:
        engine = create_engine(embedded.sqlalchemy_url(dsn))
        with engine.begin() as connection:
            schema.install(connection)
            if self.policy_sql:
                connection.exec_driver_sql(self.policy_sql)
        engine.dispose()

    def settle(self, connection: psycopg.Connection[Any]) -> None:
        """Fold all signals. A dequeue of a paused queue does, as it finds nothing to serve."""
        connection.execute("SELECT fairqueue.queue_set('default', paused => true)")
        while value_of(connection, "SELECT EXISTS (SELECT FROM fairqueue.signal)"):
            assert not self.dequeue(connection, 10_000)
        connection.execute("DELETE FROM fairqueue.queue")  # as it was
        if self.policy_sql:
            connection.execute(self.policy_sql.encode())
        self.complete(connection, self.dequeue(connection, 1))


class FairqueueWithoutHistory(Fairqueue):
    name = "fairqueue-no-history"
    about = "the same with history_days = 0: nothing is left of a message that is done"
    keeps = False
    policy_sql = "SELECT fairqueue.queue_set('default', history_days => 0)"
