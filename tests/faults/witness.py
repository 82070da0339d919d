"""Looks on while there is life: what must hold at any moment, each asked for by one statement, which sees one."""

import time
from collections.abc import Mapping

import psycopg

from tests.faults.place import CAPS, QUEUE_CAP
from tests.fixtures.postgres import libpq
from tests.invariants import CAPS as CAPS_OF_THE_MOMENT
from tests.invariants import INVARIANTS

# Limits that stay as they are all the time: no lease can be older than they are.
FIXED = {
    "no channel has more leases than the cap that it always had": f"""
        SELECT m.channel, l.cap, count(*), array_agg(m.id || ' ' || m.attempt)
        FROM message m JOIN (VALUES {", ".join(f"('{name}', {cap})" for name, cap in CAPS.items())}) AS l (channel, cap)
            ON l.channel = m.channel
        WHERE m.queue = 'fixed' AND m.leased_until IS NOT NULL
        GROUP BY m.channel, l.cap HAVING count(*) > l.cap""",
    "the queue has no more leases than the cap that it always had": f"""
        SELECT count(*) FROM message m WHERE m.queue = 'fixed' AND m.leased_until IS NOT NULL
        HAVING count(*) > {QUEUE_CAP}""",
}


def look(connection: psycopg.Connection, promises: Mapping[str, str]) -> None:
    for promise, query in promises.items():
        broken = connection.execute(query.encode()).fetchall()
        assert not broken, f"{promise}, but: {broken[:10]}"


class Witness:
    """On a connection of its own, which it renews after a restart of the server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.looks = 0
        self.promises = {promise: query for promise, query in INVARIANTS.items() if promise not in CAPS_OF_THE_MOMENT}
        self.promises |= FIXED
        self.connect()

    def connect(self) -> None:
        self.connection = psycopg.connect(libpq(self.url), autocommit=True, options="-c search_path=fairqueue")

    def look(self) -> None:
        look(self.connection, self.promises)
        self.looks += 1
        time.sleep(0.02)  # It is the processes that are to act, on machines of two cores as well.

    def close(self) -> None:
        self.connection.close()
