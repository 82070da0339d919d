"""What can be done with a queue, who may do it, and a role of each kind to try it with."""

import psycopg
from psycopg.sql import SQL, Identifier
from sqlalchemy import Engine, create_engine

import fairqueue as fq
from fairqueue import roles
from tests.fixtures.connections import Raw
from tests.observing import observer, value

NOBODY = "nobody"
VALUES = "VALUES ('q', 'acme', 'k', '1', '', 0, 1, 1, 1)"
GIVEN = ("queue", "channel", "key", "payload", "body", "dequeue_at", "cost", "max_attempts", "backoff")
MANY = "'{{q}}', '{{acme}}', '{{k}}', '{{1}}', '{{x}}', NULL, '{{1}}', '{{1}}', '{{1}}', '{{1}}'"
INSERT = "INSERT INTO {q}.message (channel) VALUES ('acme')"
RUN = "0" * 32
LEASE = "'{{2}}', '{{1}}'"
PRODUCER, WORKER, OBSERVER, OPERATOR, PIPELINE = ({str(kind)} for kind in roles.KINDS)
EVERYBODY: set[str] = {*roles.KINDS, NOBODY}
READERS = OBSERVER | OPERATOR | PIPELINE

# What can be done with a queue, and who may. Message 1 is ready, 2 is leased, 3 is a dead letter.
ACTS: dict[str, tuple[set[str], str]] = {
    "insert": (PRODUCER | PIPELINE, f"INSERT INTO {{q}}.message ({', '.join(GIVEN)}) {VALUES}"),
    "insert and read": (PRODUCER | PIPELINE, INSERT + " RETURNING id, dequeue_at, attempt, forgiven, created_at"),
    "insert an id": (set(), "INSERT INTO {q}.message (id, channel) OVERRIDING SYSTEM VALUE VALUES (9, 'acme')"),
    "insert an attempt": (set(), "INSERT INTO {q}.message (channel, attempt) VALUES ('acme', 1)"),
    "insert a lease": (set(), "INSERT INTO {q}.message (channel, leased_until) VALUES ('acme', now())"),
    "insert and ignore": (PIPELINE, INSERT + " ON CONFLICT (queue, channel, key) WHERE key IS NOT NULL DO NOTHING"),
    "message_create": (PRODUCER, "SELECT {q}.message_create('acme', key => 'k', on_conflict => 'replace')"),
    "message_create_many": (PRODUCER, f"SELECT {{q}}.message_create_many({MANY}, 'ignore')"),
    "message_ending": (PRODUCER | OPERATOR, "SELECT {q}.message_ending('{{3}}')"),
    "read ids": (PRODUCER | READERS, "SELECT id FROM {q}.message"),
    "read payloads": (READERS, "SELECT payload FROM {q}.message"),
    "read keys": (READERS, "SELECT key FROM {q}.message"),
    "read channels": (READERS, "SELECT channel FROM {q}.message"),
    "read errors": (READERS, "SELECT error FROM {q}.message"),
    "change a message": (set(), "UPDATE {q}.message SET dequeue_at = 0"),
    "delete a message": (set(), "DELETE FROM {q}.message"),
    "truncate": (set(), "TRUNCATE {q}.message"),
    "lock": (set(), "LOCK TABLE {q}.message IN SHARE MODE"),
    "lock a row": (set(), "SELECT id FROM {q}.message FOR UPDATE"),
    "hang a trigger": (set(), "CREATE TRIGGER t AFTER INSERT ON {q}.message EXECUTE FUNCTION trigger_in()"),
    "draw an id": (set(), "SELECT nextval('{q}.message_id_seq')"),
    "message_dequeue": (WORKER, "SELECT {q}.message_dequeue()"),
    "message_complete": (WORKER, "SELECT {q}.message_complete(" + LEASE + ")"),
    "message_fail": (WORKER, "SELECT {q}.message_fail(" + LEASE + ", 'broken')"),
    "message_defer": (WORKER, "SELECT {q}.message_defer(" + LEASE + ")"),
    "message_heartbeat": (WORKER, "SELECT {q}.message_heartbeat(" + LEASE + ")"),
    "message_cancel": (WORKER | OPERATOR, "SELECT {q}.message_cancel('{{1}}')"),
    "queue_due": (WORKER, "SELECT {q}.queue_due()"),
    "queue_listen": (WORKER, "SELECT {q}.queue_listen('default')"),
    "queue_unlisten": (WORKER, "SELECT {q}.queue_unlisten('default')"),
    "queue_notify": (set(), "SELECT {q}.queue_notify('default')"),
    "message_redrive": (OPERATOR, "SELECT {q}.message_redrive('{{3}}')"),
    "message_finish": (set(), "SELECT {q}.message_finish('{{1}}', 'dropped')"),
    "message_enter": (set(), "SELECT {q}.message_enter(9, 0, 'q', 'acme', 'k', '1', '', 0, 1, 1, 1, true)"),
    "channel_surplus": (READERS, "SELECT {q}.channel_surplus('default', 'acme', 1)"),
    "read dead letters": (READERS, "SELECT payload FROM {q}.dead_message"),
    "delete dead letters": (OPERATOR, "DELETE FROM {q}.dead_message WHERE id = 3"),
    "change dead letters": (set(), "UPDATE {q}.dead_message SET error = ''"),
    "make dead letters": (set(), "INSERT INTO {q}.dead_message SELECT * FROM {q}.dead_message"),
    "read history": (READERS, "SELECT error FROM {q}.history"),
    "write history": (set(), "DELETE FROM {q}.history"),
    "history_add": (set(), "SELECT {q}.history_add('2100-01-01', false)"),
    "history_maintain": (OPERATOR, "SELECT {q}.history_maintain()"),
    "history_release": (PIPELINE, "SELECT {q}.history_release('2020-01-01', 0, 0)"),
    "read policies": (READERS, "SELECT weight FROM {q}.channel"),
    "insert a channel": (OPERATOR, "INSERT INTO {q}.channel (name) VALUES ('acme')"),
    "change a channel": (OPERATOR, "UPDATE {q}.channel SET weight = NULL WHERE name = 'globex'"),
    "delete a channel": (OPERATOR, "DELETE FROM {q}.channel WHERE name = 'globex'"),
    "insert a queue": (OPERATOR, "INSERT INTO {q}.queue (name) VALUES ('q')"),
    "change a queue": (OPERATOR, "UPDATE {q}.queue SET max_attempts = 3"),
    "delete a queue": (OPERATOR, "DELETE FROM {q}.queue WHERE name = 'q'"),
    "truncate policies": (set(), "TRUNCATE {q}.channel"),
    "channel_set": (OPERATOR, "SELECT {q}.channel_set('acme', max_size => 1)"),
    "queue_set": (OPERATOR, "SELECT {q}.queue_set('q', channel_max_size => 1)"),
    "queue_check": (OPERATOR, "SELECT {q}.queue_check()"),
    "queue_repair": (OPERATOR, "SELECT {q}.queue_repair()"),
    "read lanes": (READERS, "SELECT tag FROM {q}.lane"),
    "change lanes": (set(), "UPDATE {q}.lane SET tag = 0"),
    "change the rotation": (set(), "UPDATE {q}.rotation SET vtime = 0"),
    "signal": (set(), "INSERT INTO {q}.signal (queue, channel, urgent) VALUES ('default', 'acme', true)"),
    "read signals": (READERS, "SELECT channel FROM {q}.signal"),
    "scheduler_turn": (EVERYBODY, "SELECT {q}.scheduler_turn('another queue')"),
    "scheduler_rebuild": (set(), "SELECT {q}.scheduler_rebuild('default', 1, 1, 1, NULL, now(), 1, false, '', 1)"),
    "stage_create": (PIPELINE, f"SELECT {{q}}.stage_create('{RUN}', 1)"),
    "stage_drop": (PIPELINE, f"SELECT {{q}}.stage_drop('{RUN}')"),
    "stage_clean": (PIPELINE | OPERATOR, "SELECT {q}.stage_clean()"),
    "load_enter": (PIPELINE, f"SELECT {{q}}.load_enter('{RUN}', '{{{{}}}}', '{{{{}}}}', 'job')"),
    "load_claim": (PIPELINE, "SELECT {q}.load_claim('job')"),
    "load_count": (PIPELINE, "SELECT {q}.load_count('job', 7)"),
    "read loads": (READERS, "SELECT name FROM {q}.load"),
    "write loads": (set(), "INSERT INTO {q}.load (name, epoch) VALUES ('job', 0)"),
    "write stages": (set(), f"INSERT INTO {{q}}.stage (name, run) VALUES ('message', '{RUN}')"),
    "feed_horizon": (PIPELINE, "SELECT {q}.feed_horizon()"),
    "feed_move": (PIPELINE, "SELECT {q}.feed_move('archive', '7', 7)"),
    "feed_forget": (OPERATOR, "SELECT {q}.feed_forget('archive')"),
    "write feeds": (set(), "DELETE FROM {q}.feed"),
    "schema_serves": (EVERYBODY, "SELECT {q}.schema_serves()"),
    "schema_version": (EVERYBODY, "SELECT {q}.schema_version()"),
    "clock": (EVERYBODY, "SELECT {q}.unix_ms({q}.clock())"),
    "replace the clock": (set(), "CREATE OR REPLACE FUNCTION {q}.clock() RETURNS timestamptz RETURN now()"),
    "create a table": (set(), "CREATE TABLE {q}.mine ()"),
    "drop a table": (set(), "DROP TABLE {q}.signal"),
}  # fmt: skip


class Roles:
    """A role of each kind, and one with USAGE alone, in a schema."""

    def __init__(self, raw: Raw, url: str, place: str) -> None:
        self.raw, self.url, self.place = raw, url, place
        self.owner = observer(raw, url)
        self.database: str = value(self.owner, "SELECT current_database()")
        self.kinds = sorted(EVERYBODY)

    def name(self, kind: str) -> str:
        return f'{self.database} "{kind}"; %s :x'

    def grant(self, engine: Engine) -> None:
        """To each what is of its kind."""
        with engine.begin() as connection:
            for kind in roles.KINDS:
                roles.grant(connection, self.name(kind), kind, schema=self.place)

    def create(self, engine: Engine) -> None:
        for kind in self.kinds:
            self.owner.execute(SQL("CREATE ROLE {}").format(Identifier(self.name(kind))))
        self.grant(engine)
        nobody = (Identifier(self.place), Identifier(self.name(NOBODY)))
        self.owner.execute(SQL("GRANT USAGE ON SCHEMA {} TO {}").format(*nobody))

    def drop(self) -> None:
        for kind in self.kinds:
            role = Identifier(self.name(kind))
            self.owner.execute(SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(role))

    def become(self, kind: str) -> psycopg.Connection:
        connection = self.raw(self.url)
        connection.execute(SQL("SET ROLE {}").format(Identifier(self.name(kind))))
        connection.commit()
        return connection

    def engine(self, kind: str) -> Engine:
        """For one connection at a time, in this role and this schema."""
        return create_engine(
            "postgresql+psycopg://", creator=lambda: self.become(kind), execution_options=fq.in_schema(self.place)
        )


def rights_of(connection: psycopg.Connection, role: str, place: str = "fairqueue") -> set[tuple[str, str]]:
    """What the catalog says of a role: table, column or function, and privilege; but for the partitions of history."""
    query = """
        SELECT c.relname, a.privilege_type
        FROM pg_class c CROSS JOIN aclexplode(c.relacl) a
        WHERE c.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = %(place)s)
            AND a.grantee = (SELECT oid FROM pg_roles WHERE rolname = %(role)s)
        UNION ALL
        SELECT c.relname || '.' || t.attname, a.privilege_type
        FROM pg_class c JOIN pg_attribute t ON t.attrelid = c.oid CROSS JOIN aclexplode(t.attacl) a
        WHERE c.relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = %(place)s)
            AND a.grantee = (SELECT oid FROM pg_roles WHERE rolname = %(role)s)
        UNION ALL
        SELECT p.proname, a.privilege_type
        FROM pg_proc p CROSS JOIN aclexplode(p.proacl) a
        WHERE p.pronamespace = (SELECT oid FROM pg_namespace WHERE nspname = %(place)s)
            AND a.grantee = (SELECT oid FROM pg_roles WHERE rolname = %(role)s)
        """
    found = connection.execute(query.encode(), {"place": place, "role": role})
    return {(name, privilege) for name, privilege in found if not name.startswith("history_2")}
