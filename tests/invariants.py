"""What must hold in the database between any two transactions, as queries that return the rows for which it doesn't.

What the scheduler keeps is compared with the rows that it was derived from by queue_check, which says in SQL that every
ready message can be reached, that every signal will be read, that counts are right and that no bound hides anything:
each of them enough to break the queue. tests/operating/test_check.py shows that it finds what is wrong.
"""

from collections.abc import Iterable

from sqlalchemy import Connection, TextClause, text

INVARIANTS = {
    "what the scheduler keeps agrees with the rows": "SELECT * FROM queue_check()",
    "a channel has no more leases than its max_concurrency": """
        SELECT m.queue, m.channel, count(*), min(coalesce(c.max_concurrency, q.channel_max_concurrency))
        FROM message m
        LEFT JOIN channel c ON c.queue = m.queue AND c.name = m.channel
        LEFT JOIN queue q ON q.name = m.queue
        WHERE m.leased_until IS NOT NULL
        GROUP BY m.queue, m.channel HAVING count(*) > min(coalesce(c.max_concurrency, q.channel_max_concurrency))""",
    "a queue has no more leases than its max_concurrency": """
        SELECT q.name, count(*), q.max_concurrency
        FROM message m JOIN queue q ON q.name = m.queue
        WHERE m.leased_until IS NOT NULL
        GROUP BY q.name, q.max_concurrency HAVING count(*) > q.max_concurrency""",
    "no message is alive and dead": "SELECT id FROM message JOIN dead_message USING (id)",
    "an ended message has one outcome": """
        SELECT h.message_id, array_agg(h.outcome) FROM history h WHERE h.outcome <> 'dead'
        GROUP BY h.message_id HAVING count(*) > 1""",
    "a completed message is gone": """
        SELECT h.message_id, h.outcome FROM history h
        WHERE h.outcome <> 'dead' AND (EXISTS (SELECT FROM message m WHERE m.id = h.message_id)
            OR EXISTS (SELECT FROM dead_message d WHERE d.id = h.message_id))""",
}

#: What doesn't hold for leases from before a limit was set or lowered.
CAPS = frozenset(promise for promise in INVARIANTS if "max_concurrency" in promise)


def check_invariants(connection: Connection, schema: str = "fairqueue", caps: bool = True) -> None:
    """Fail with the rows that break an invariant; without `caps`, leases may be older than limits."""
    connection.execute(text("SELECT set_config('search_path', :schema, true)"), {"schema": schema})
    broken = connection.execute(_EVERYTHING if caps else _BUT_CAPS).all()
    assert not broken, f"what must hold, and what breaks it: {broken[:10]}"


def _at_once(promises: Iterable[str]) -> TextClause:
    """One query of all: tests check thousands of times."""
    parts = (f"SELECT '{promise}' AS promise, broken::text FROM ({INVARIANTS[promise]}) broken" for promise in promises)
    return text(" UNION ALL ".join(parts))


_EVERYTHING = _at_once(INVARIANTS)
_BUT_CAPS = _at_once(promise for promise in INVARIANTS if promise not in CAPS)
