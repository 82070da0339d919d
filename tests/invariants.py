"""What must hold in the database between any two transactions, as queries that return the rows for which it doesn't.

They are stated so that each of them is enough to break the queue: a message that isn't reachable is never served, a
lane below the virtual time is never looked at, a bound that is too high hides what lies below it.
"""

from sqlalchemy import Connection, text

INVARIANTS = {
    "every ready message can be reached": """
        SELECT m.queue, m.channel, m.dequeue_at, m.id
        FROM (SELECT DISTINCT ON (queue, channel) * FROM message WHERE leased_until IS NULL
              ORDER BY queue, channel, dequeue_at, id) m
        WHERE NOT EXISTS (
            SELECT FROM lane l
            WHERE l.queue = m.queue AND l.channel = m.channel AND l.state IN ('ready', 'waiting')
                AND (l.head_at, l.head_id) <= (m.dequeue_at, m.id)
                AND (l.state = 'ready' OR l.due <= greatest(m.dequeue_at, unix_ms(clock_timestamp()))))
        AND NOT EXISTS (
            SELECT FROM signal s LEFT JOIN rotation r ON r.queue = s.queue
            WHERE s.queue = m.queue AND s.channel = m.channel
                AND (s.dequeue_at, s.message_id) <= (m.dequeue_at, m.id)
                AND (r.queue IS NULL OR s.xid >= r.news_from OR s.xid = ANY (r.news_open)))""",
    "every signal is still to be read": """
        SELECT s.*, r.news_from, r.news_open
        FROM signal s JOIN rotation r ON r.queue = s.queue
        WHERE s.xid < r.news_from AND s.xid <> ALL (r.news_open)""",
    "every ready lane comes after the one that was served last": """
        SELECT l.*, r.vtime, r.vsince FROM lane l JOIN rotation r ON r.queue = l.queue
        WHERE l.state = 'ready' AND (l.tag, l.since) <= (r.vtime, r.vsince)""",
    "no two lanes became ready at once": """
        SELECT queue, since, array_agg(channel) FROM lane WHERE state = 'ready'
        GROUP BY queue, since HAVING count(*) > 1""",
    "no lane has an activation to come": """
        SELECT l.*, r.activations FROM lane l JOIN rotation r ON r.queue = l.queue
        WHERE l.since > r.activations""",
    "a channel has one lane": """
        SELECT queue, channel, count(*) FROM lane GROUP BY queue, channel HAVING count(*) > 1""",
    "a queue has one rotation": """
        SELECT queue, count(*) FROM rotation GROUP BY queue HAVING count(*) > 1""",
    "no lease ends before lease_floor": """
        SELECT m.id, m.leased_until, r.lease_floor
        FROM message m LEFT JOIN rotation r ON r.queue = m.queue
        WHERE m.leased_until IS NOT NULL AND (r.queue IS NULL OR m.leased_until < r.lease_floor)""",
    "no lane is due before due_floor": """
        SELECT l.*, r.due_floor FROM lane l JOIN rotation r ON r.queue = l.queue
        WHERE l.state = 'waiting' AND l.due < r.due_floor""",
    "a leased message has an attempt": """
        SELECT id, attempt FROM message WHERE leased_until IS NOT NULL AND attempt < 1""",
}


def check_invariants(connection: Connection, schema: str = "fairqueue") -> None:
    """Fail with the rows that break an invariant."""
    connection.execute(text("SELECT set_config('search_path', :schema, true)"), {"schema": schema})
    for promise, query in INVARIANTS.items():
        broken = connection.execute(text(query)).all()
        assert not broken, f"{promise}, but: {broken[:10]}"
