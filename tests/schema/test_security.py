"""The functions do what they say whatever is on the caller's search_path.

What each role may do is in operating/test_roles.py.
"""

import pytest
from psycopg import errors
from psycopg.sql import SQL, Identifier
from sqlalchemy import text
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import put, sql, take
from tests.fixtures.connections import Raw
from tests.observing import observer, value

# Of the tables, the functions and the operators that fairqueue uses, with other contents.
EVIL = """
CREATE SCHEMA evil;
CREATE TABLE evil.message (LIKE fairqueue.message INCLUDING DEFAULTS INCLUDING IDENTITY);
CREATE TABLE evil.signal (LIKE fairqueue.signal INCLUDING DEFAULTS);
CREATE TABLE evil.lane (LIKE fairqueue.lane);
CREATE TABLE evil.rotation (LIKE fairqueue.rotation);
CREATE TABLE evil.channel (LIKE fairqueue.channel INCLUDING DEFAULTS INCLUDING INDEXES);
CREATE TABLE evil.queue (LIKE fairqueue.queue INCLUDING DEFAULTS INCLUDING INDEXES);
CREATE TABLE evil.dead_message (LIKE fairqueue.dead_message INCLUDING DEFAULTS);
CREATE TABLE evil.history (LIKE fairqueue.history INCLUDING DEFAULTS);
CREATE FUNCTION evil.clock_timestamp() RETURNS timestamptz LANGUAGE plpgsql AS $$ BEGIN RAISE 'evil'; END $$;
CREATE FUNCTION evil.format(text, VARIADIC text[]) RETURNS text LANGUAGE plpgsql AS $$ BEGIN RAISE 'evil'; END $$;
CREATE FUNCTION evil.equal(text, text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE 'evil'; END $$;
CREATE FUNCTION evil.equal(bigint, bigint) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE 'evil'; END $$;
CREATE FUNCTION evil.less(double precision, double precision) RETURNS boolean
    LANGUAGE plpgsql AS $$ BEGIN RAISE 'evil'; END $$;
CREATE OPERATOR evil.= (LEFTARG = text, RIGHTARG = text, FUNCTION = evil.equal);
CREATE OPERATOR evil.= (LEFTARG = bigint, RIGHTARG = bigint, FUNCTION = evil.equal);
CREATE OPERATOR evil.<= (LEFTARG = double precision, RIGHTARG = double precision, FUNCTION = evil.less);
CREATE TEMP TABLE message (LIKE fairqueue.message INCLUDING DEFAULTS);
CREATE TEMP TABLE signal (LIKE fairqueue.signal);
CREATE TEMP TABLE lane (LIKE fairqueue.lane);
CREATE TEMP TABLE rotation (LIKE fairqueue.rotation);
CREATE TEMP TABLE channel (LIKE fairqueue.channel);
CREATE TEMP TABLE queue (LIKE fairqueue.queue);
CREATE TEMP TABLE dead_message (LIKE fairqueue.dead_message);
CREATE TEMP TABLE history (LIKE fairqueue.history);
CREATE TEMP TABLE history_default (LIKE fairqueue.history);
"""

TABLES = ("message", "signal", "lane", "rotation", "channel", "queue", "dead_message", "history")

# Of every function of ours one in the schema evil that takes the same and raises an error.
EVIL_FUNCTIONS = """
SELECT format('CREATE FUNCTION evil.%I(%s) RETURNS void LANGUAGE plpgsql AS $$ BEGIN RAISE ''evil''; END $$',
    proname, oidvectortypes(proargtypes))
FROM pg_proc
WHERE pronamespace = 'fairqueue'::regnamespace AND prorettype <> 'trigger'::regtype
"""

# A call of each function that runs with its owner's rights, in this order, and the first value it returns.
CALLS = {
    "channel_set": ("'acme', weight => 2, max_size => 100, overflow => 'drop'", ""),
    "queue_set": ("'default', max_attempts => 20, channel_max_size => 50", ""),
    "message_create": ("'acme', delay_seconds => 0, key => 'k', on_conflict => 'replace'", 3),
    "message_create_many": (
        "'{default}', '{acme}', '{k}', '{1}', '{x}', NULL, '{0}', '{1}', '{1}', '{1}', 'replace'",
        ("1", "3"),
    ),
    "queue_listen": ("'default'", None),
    "queue_due": ("'default'", None),
    "queue_unlisten": ("'default'", True),
    "message_dequeue": ("'default', 3, 60", None),
    "message_heartbeat": ("'{1}', '{1}'", ("1", "extended")),
    "message_fail": ("'{1}', '{1}', 'broken', 0", ("1", "failed")),
    "message_defer": ("'{2}', '{1}'", ("2", "deferred")),
    "message_complete": ("'{3}', '{1}'", ("3", "completed")),
    "message_ending": ("'{3}'", None),
    "message_redrive": ("'{3}'", ("3", "not_found")),
    "message_cancel": ("'{1}'", ("1", "cancelled")),
    "history_add": ("'2100-01-01', false", ""),
    "history_maintain": ("", True),
    "history_release": ("'2020-01-01', 0, 0", ""),
    "stage_create": (f"'{'0' * 32}', 1", None),
    "stage_drop": (f"'{'0' * 32}'", 1),
    "stage_clean": ("", 0),
    "load_claim": ("'part'", None),
    "load_count": ("'part', 1", None),
    "load_enter": (f"'{'0' * 32}', '{{}}', '{{}}', 'job'", ("0", "0", "f")),
    "feed_move": ("'archive', '7', 7", ""),
    "feed_forget": ("'archive'", True),
    "queue_repair": ("'default'", ""),
    "queue_check": ("", None),
}


class TestSearchPath:
    def test_each_function_has_its_own(self, raw: Raw, database_url: str) -> None:
        """Exactly the schema and, last, pg_temp; but for those whose names were bound when they were made, and those
        that touch no table (IMMUTABLE), which no other than their caller's own rights can be used with."""
        connection = observer(raw, database_url)
        functions = connection.execute(
            "SELECT proname, proconfig, prosqlbody IS NOT NULL, provolatile, prosecdef FROM pg_proc"
            " WHERE pronamespace = 'fairqueue'::regnamespace"
        ).fetchall()
        assert len(functions) > 20
        for name, config, is_bound, volatile, is_definer in functions:
            paths = [setting for setting in config or [] if setting.startswith("search_path=")]
            if is_bound or volatile == "i":
                assert not is_definer, name
            else:
                assert paths == ["search_path=fairqueue, pg_temp"], name

    def test_hostile_objects_change_nothing(self, raw: Raw, database_url: str) -> None:
        connection = observer(raw, database_url)
        connection.execute(EVIL.encode())
        for (create,) in connection.execute(EVIL_FUNCTIONS.encode()).fetchall():
            connection.execute(create)
        connection.execute("SET search_path = evil, pg_temp, pg_catalog")
        assert value(connection, "SELECT count(*) FROM message") == 0, "which is evil.message"

        connection.execute("INSERT INTO fairqueue.message (channel) VALUES ('acme'), ('acme')")
        found: list[tuple[object, ...]] = []
        for function, (arguments, expected) in CALLS.items():
            if function == "message_cancel":
                connection.execute("UPDATE fairqueue.message SET dequeue_at = 0")
            found = connection.execute(f"SELECT fairqueue.{function}({arguments})".encode()).fetchall()
            if expected is not None:
                assert found == [(expected,)], function
        assert found == [], "which are the differences that queue_check found"
        connection.execute("RESET search_path")
        for place in ("evil", "pg_temp"):
            for table in TABLES:
                assert value(connection, f"SELECT count(*) FROM {place}.{table}") == 0
        assert value(connection, "SELECT last_value FROM evil.message_id_seq") == 1

    def test_none_is_forgotten(self, raw: Raw, database_url: str) -> None:
        """Every function with its owner's rights is called above, the trigger functions by what the calls do."""
        definers = observer(raw, database_url).execute(
            "SELECT proname FROM pg_proc WHERE pronamespace = 'fairqueue'::regnamespace AND prosecdef"
            " AND prorettype <> 'trigger'::regtype"
        )
        assert {name for (name,) in definers} == CALLS.keys()

    def test_hostile_settings_come_back(self, raw: Raw, database_url: str) -> None:
        """A dequeue plans in its own way, and leaves the session as it was."""
        connection = observer(raw, database_url)
        connection.execute("SET search_path = pg_temp; SET enable_indexscan = off; SET jit = on")
        connection.execute("INSERT INTO fairqueue.message (channel) VALUES ('acme')")
        before = connection.execute("SELECT name, setting FROM pg_settings ORDER BY name").fetchall()
        assert value(connection, "SELECT id FROM fairqueue.message_dequeue()") == 1
        assert connection.execute("SELECT name, setting FROM pg_settings ORDER BY name").fetchall() == before


class TestPrivileges:
    def test_definers_are_not_for_the_public(self, raw: Raw, database_url: str) -> None:
        """Trigger functions included: whoever may execute one may hang it on a table of his own."""
        connection = observer(raw, database_url)
        public = connection.execute(
            "SELECT p.proname FROM pg_proc p LEFT JOIN aclexplode(p.proacl) a ON a.grantee = 0"
            " WHERE p.pronamespace = 'fairqueue'::regnamespace AND p.prosecdef"
            " AND (p.proacl IS NULL OR a.privilege_type = 'EXECUTE')"
        ).fetchall()
        assert public == []

    def test_nobody_hangs_our_triggers_on_his_own_table(self, raw: Raw, database_url: str) -> None:
        """They run with the owner's rights, so this would be a way to signal in other tenants' names."""
        owner, nobody = observer(raw, database_url), observer(raw, database_url)
        role = SQL("{}").format(Identifier(f"{value(owner, 'SELECT current_database()')} nobody"))
        owner.execute(SQL("CREATE ROLE {0}; GRANT USAGE ON SCHEMA fairqueue TO {0}").format(role))
        try:
            nobody.execute(SQL("SET ROLE {}").format(role))
            nobody.execute("CREATE TEMP TABLE mine (queue text, channel text, name text, dequeue_at bigint, id bigint)")
            functions = owner.execute(
                "SELECT p.oid::regprocedure::text FROM pg_proc p WHERE p.pronamespace = 'fairqueue'::regnamespace"
                " AND p.prorettype = 'trigger'::regtype AND p.prosecdef"
            ).fetchall()
            assert len(functions) > 5
            for (function,) in functions:
                with pytest.raises(errors.InsufficientPrivilege):
                    nobody.execute(f"CREATE TRIGGER evil AFTER INSERT ON mine EXECUTE FUNCTION {function}".encode())
            nobody.close()
        finally:
            owner.execute(SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(role))


class TestHostileNames:
    """What a tenant may call itself, or send, is never a part of a statement."""

    NAMES = ("'; DROP TABLE fairqueue.message; --", '" OR 1=1', "$$ x $$", "%s %(x)s %%", ":name", "\\'", "{acme}", "*")

    @pytest.mark.parametrize("name", NAMES)
    def test_everywhere(self, session: Session, name: str) -> None:
        """As a queue, a channel, a key, a payload, a worker, an error; through each way in."""
        session.merge(fq.Queue(name, channel_max_size=9))
        session.merge(fq.Channel(name, name, weight=2))
        session.flush()  # SQLAlchemy 2.0 doesn't do it before a statement that knows no models
        session.execute(fq.pause(queue=name, channel=name))
        session.execute(fq.resume(queue=name, channel=name))
        fq.enqueue(session, name, {name: name}, queue=name)
        fq.enqueue_many(session, [{"channel": name, "queue": name, "payload": name}])
        fq.enqueue_copy(session, [{"channel": name, "queue": name, "payload": name}])
        fq.enqueue_unique(session, name, "old", queue=name, key=name, on_conflict="ignore")
        fq.enqueue_unique(session, name, name, queue=name, key=name, on_conflict="replace")
        session.commit()
        batch = session.scalars(fq.dequeue(queue=name, limit=9, worker=name)).all()
        session.commit()
        assert [(m.channel, m.payload) for m in batch] == [(name, {name: name}), *[(name, name)] * 3]
        assert session.execute(fq.fail(batch[0], name)).one().result == "failed"
        assert [row.result for row in session.execute(fq.complete(batch[1:]))] == ["completed"] * 3
        session.merge(fq.Channel(name, name, max_size=1))
        session.commit()
        with pytest.raises(fq.ChannelFull) as error:
            fq.enqueue_many(session, [{"channel": name, "queue": name}])
        assert str(error.value).startswith("channel ")


def test_who_was_given_delete_needs_no_right_to_signals(session: Session) -> None:
    """A lease that counted is deleted by a role of the application's: its trigger tells of that with its owner's."""
    role = f'"{session.scalar(text("SELECT current_database()"))} cleaner"'
    session.merge(fq.Channel("acme", max_concurrency=1))
    put(session, "acme", 2)
    assert take(session, 9) == ["acme"]
    sql(session, f"CREATE ROLE {role}")
    try:
        sql(session, f"GRANT USAGE ON SCHEMA fairqueue TO {role}")
        sql(session, f"GRANT SELECT, DELETE ON fairqueue.message TO {role}")
        session.execute(text(f"SET LOCAL ROLE {role}"))
        session.execute(text("DELETE FROM fairqueue.message WHERE leased_until IS NOT NULL"))
        session.commit()
        assert take(session, 9) == ["acme"]
    finally:
        session.rollback()
        sql(session, f"DROP OWNED BY {role}")
        sql(session, f"DROP ROLE {role}")
