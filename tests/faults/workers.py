"""Workers whose fate is decided: one that its messages kill, and one that is stopped in the middle of its work."""

import os
import signal
import time
from multiprocessing.connection import Connection
from typing import Any

import psycopg

from tests.fixtures.postgres import libpq

DEQUEUE = "SELECT id, attempt, channel FROM fairqueue.message_dequeue('default', 1, %s)"
EFFECT = "INSERT INTO public.effect VALUES (%s, %s)"
COMPLETE = "SELECT result FROM fairqueue.message_complete(ARRAY[%s::bigint], ARRAY[%s])"


def work_until_killed(url: str, lease: float) -> None:
    """Serve messages one by one, the work of each in one transaction; those of the channel `crasher` are deadly."""
    with psycopg.connect(libpq(url)) as connection:
        while row := connection.execute(DEQUEUE, [lease]).fetchone():
            connection.commit()
            id_, attempt, channel = row
            connection.execute(EFFECT, [id_, attempt])
            connection.execute(COMPLETE, [id_, attempt])
            if channel == "crasher":
                os.kill(os.getpid(), signal.SIGKILL)
            connection.commit()


def work_late(url: str, lease: float, completes_first: bool, pipe: "Connection[Any, Any]") -> None:
    """Serve one message, with a break in the middle of its transaction; sends what the queue said of the completion."""
    with psycopg.connect(libpq(url)) as connection:
        row = connection.execute(DEQUEUE, [lease]).fetchone()
        connection.commit()
        assert row is not None
        lease_ = row[:2]
        connection.execute(EFFECT, lease_)
        result = connection.execute(COMPLETE, lease_).fetchone() if completes_first else None
        pipe.send("leased")
        pipe.recv()
        if result is None:
            result = connection.execute(COMPLETE, lease_).fetchone()
        if result == ("completed",):
            connection.commit()
        else:
            connection.rollback()
        pipe.send(result)


def take_and_hang(url: str, ready: Any) -> None:
    """A worker that leases messages, begins to complete one, and hangs."""
    with psycopg.connect(libpq(url)) as connection:
        rows = connection.execute("SELECT id, attempt FROM fairqueue.message_dequeue('default', 20, 3600)").fetchall()
        connection.commit()
        id_, attempt = rows[0]
        connection.execute("SELECT * FROM fairqueue.message_complete(ARRAY[%s], ARRAY[%s])", (id_, attempt))
        ready.set()
        time.sleep(3600)
