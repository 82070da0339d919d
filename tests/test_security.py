"""G14: the functions do what they say whatever is on the caller's search_path, and each role only what is its own."""

import psycopg
import pytest
from psycopg import errors
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.exc import ProgrammingError
from sqlalchemy.orm import Session

import fairqueue as fq
from fairqueue import schema
from tests.fixtures.connections import Raw
from tests.observing import observer, rows, value

# Of the tables, the functions and the operators that fairqueue uses, with other contents.
EVIL = """
CREATE SCHEMA evil;
CREATE TABLE evil.message (LIKE fairqueue.message INCLUDING DEFAULTS INCLUDING IDENTITY);
CREATE TABLE evil.signal (LIKE fairqueue.signal INCLUDING DEFAULTS);
CREATE TABLE evil.lane (LIKE fairqueue.lane);
CREATE TABLE evil.rotation (LIKE fairqueue.rotation);
CREATE TABLE evil.channel (LIKE fairqueue.channel INCLUDING DEFAULTS INCLUDING INDEXES);
CREATE FUNCTION evil.scheduler_turn(text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN RAISE 'evil'; END $$;
CREATE FUNCTION evil.unix_ms(timestamptz) RETURNS bigint LANGUAGE plpgsql AS $$ BEGIN RAISE 'evil'; END $$;
CREATE FUNCTION evil.lease_results(bigint[], bigint[], text) RETURNS TABLE (id bigint, result text)
    LANGUAGE plpgsql AS $$ BEGIN RAISE 'evil'; END $$;
CREATE FUNCTION evil.lease_list(bigint[], integer[]) RETURNS TABLE (id bigint, attempt integer, n bigint)
    LANGUAGE plpgsql AS $$ BEGIN RAISE 'evil'; END $$;
CREATE FUNCTION evil.check_seconds(text, double precision, double precision) RETURNS void
    LANGUAGE plpgsql AS $$ BEGIN RAISE 'evil'; END $$;
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
"""

# What each role is granted, and nothing else; `fairqueue grant` is to give the same.
ROLES = """
CREATE ROLE {0}_producer LOGIN; CREATE ROLE {0}_worker LOGIN; CREATE ROLE {0}_observer LOGIN;
CREATE ROLE {0}_nobody LOGIN;
GRANT USAGE ON SCHEMA fairqueue TO {0}_producer, {0}_worker, {0}_observer, {0}_nobody;
GRANT INSERT ON fairqueue.message TO {0}_producer;
GRANT EXECUTE ON FUNCTION fairqueue.message_dequeue, fairqueue.message_complete, fairqueue.message_fail,
    fairqueue.message_defer, fairqueue.message_heartbeat, fairqueue.message_cancel TO {0}_worker;
GRANT SELECT ON ALL TABLES IN SCHEMA fairqueue TO {0}_observer;
"""


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
        connection.execute("SET search_path = evil, pg_temp, pg_catalog")
        assert value(connection, "SELECT count(*) FROM message") == 0, "which is evil.message"

        connection.execute("INSERT INTO fairqueue.message (channel) VALUES ('acme'), ('acme')")
        connection.execute("SELECT fairqueue.message_create('acme', delay_seconds => 0)")
        connection.execute("SELECT fairqueue.channel_set('acme', weight => 2)")
        leased = connection.execute("SELECT id, attempt FROM fairqueue.message_dequeue('default', 3, 60)").fetchall()
        assert leased == [(1, 1), (2, 1), (3, 1)]
        for verb, told in {"heartbeat": "extended", "fail": "failed"}.items():
            query = f"SELECT result FROM fairqueue.message_{verb}('{{1}}', '{{1}}')"
            assert value(connection, query) == told
        assert value(connection, "SELECT result FROM fairqueue.message_defer('{2}', '{1}')") == "deferred"
        assert value(connection, "SELECT result FROM fairqueue.message_complete('{3}', '{1}')") == "completed"
        assert value(connection, "SELECT result FROM fairqueue.message_complete('{3}', '{1}')") == "not_found"
        assert value(connection, "SELECT result FROM fairqueue.message_cancel('{1}')") == "cancelled"
        connection.execute("UPDATE fairqueue.message SET dequeue_at = 0")
        assert value(connection, "SELECT id FROM fairqueue.message_dequeue()") == 2
        connection.execute("RESET search_path")
        for place in ("evil", "pg_temp"):
            for table in ("message", "signal", "lane", "rotation", "channel"):
                assert value(connection, f"SELECT count(*) FROM {place}.{table}") == 0

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

    @pytest.fixture
    def roles(self, raw: Raw, database_url: str) -> str:
        """The prefix of four roles, of this test's database alone."""
        owner = observer(raw, database_url)
        prefix = str(value(owner, "SELECT current_database()"))
        owner.execute(ROLES.format(prefix).encode())
        return prefix

    @pytest.fixture(autouse=True)
    def _drop_roles(self, raw: Raw, database_url: str, request: pytest.FixtureRequest) -> object:
        yield
        if "roles" in request.fixturenames:
            owner = observer(raw, database_url)
            prefix = value(owner, "SELECT current_database()")
            for role in ("producer", "worker", "observer", "nobody"):
                owner.execute(f"DROP OWNED BY {prefix}_{role}; DROP ROLE {prefix}_{role}".encode())

    def become(self, raw: Raw, database_url: str, role: str) -> psycopg.Connection:
        connection = observer(raw, database_url)
        connection.execute(f"SET ROLE {role}".encode())
        return connection

    def refused(self, connection: psycopg.Connection, *statements: str) -> None:
        for statement in statements:
            with pytest.raises(errors.InsufficientPrivilege):
                connection.execute(statement.encode())

    def test_producer(self, raw: Raw, database_url: str, roles: str) -> None:
        """INSERT on message, by which the triggers do the rest; it can neither read messages nor take them."""
        producer = self.become(raw, database_url, f"{roles}_producer")
        producer.execute("INSERT INTO fairqueue.message (channel, payload) VALUES ('acme', '1')")
        with producer.cursor().copy("COPY fairqueue.message (channel) FROM STDIN") as copy:
            copy.write_row(["acme"])
        self.refused(
            producer,
            "SELECT payload FROM fairqueue.message",
            "UPDATE fairqueue.message SET dequeue_at = 0",
            "DELETE FROM fairqueue.message",
            "TRUNCATE fairqueue.message",
            "INSERT INTO fairqueue.signal (queue, channel) VALUES ('default', 'globex')",
            "INSERT INTO fairqueue.lane SELECT FROM fairqueue.lane",
            "INSERT INTO fairqueue.channel (name) VALUES ('acme')",
            "SELECT fairqueue.channel_set('acme', weight => 1000)",
            "SELECT fairqueue.message_dequeue()",
            "SELECT fairqueue.message_complete('{1}', '{0}')",
            "SELECT fairqueue.message_cancel('{1}')",
        )
        assert rows(observer(raw, database_url)) == {"message": 2, "signal": 2}

    def test_producer_through_the_orm(self, raw: Raw, database_url: str, roles: str) -> None:
        """What returns ids, as Session.add() does, has to be let read them, and the defaults beside them."""
        engine = create_engine(database_url, connect_args={"options": f"-c role={roles}_producer"})
        with Session(engine) as session:
            assert fq.enqueue_copy(session, [{"channel": "acme", "delay": 1}]) == 1
            session.commit()
            with pytest.raises(ProgrammingError, match="permission denied"):
                fq.enqueue_many(session, [{"channel": "acme"}])
        observer(raw, database_url).execute(
            f"GRANT SELECT (id, dequeue_at, attempt, created_at) ON fairqueue.message TO {roles}_producer".encode()
        )
        with Session(engine) as session:
            fq.enqueue_many(session, [{"channel": "acme", "delay": 1}])
            fq.enqueue(session, "acme")
            fq.enqueue(session, "acme", delay=1)
            session.commit()
            with pytest.raises(ProgrammingError, match="permission denied"):
                session.execute(text("SELECT payload FROM fairqueue.message"))
        engine.dispose()

    def test_worker(self, raw: Raw, database_url: str, roles: str) -> None:
        """EXECUTE alone: it works on messages and has no other way to them."""
        observer(raw, database_url).execute(
            "INSERT INTO fairqueue.message (channel) SELECT 'acme' FROM generate_series(1, 5)"
        )
        worker = self.become(raw, database_url, f"{roles}_worker")
        assert len(worker.execute("SELECT * FROM fairqueue.message_dequeue('default', 4)").fetchall()) == 4
        for id_, verb in enumerate(("heartbeat", "complete", "fail", "defer"), 1):
            query = f"SELECT result FROM fairqueue.message_{verb}('{{{id_}}}', '{{1}}')"
            assert value(worker, query) in {"extended", "completed", "failed", "deferred"}
        assert value(worker, "SELECT result FROM fairqueue.message_cancel('{5}')") == "cancelled"
        self.refused(
            worker,
            "SELECT FROM fairqueue.message",
            "INSERT INTO fairqueue.message (channel) VALUES ('acme')",
            "DELETE FROM fairqueue.message",
            "SELECT FROM fairqueue.lane",
            "UPDATE fairqueue.rotation SET vtime = 0",
            "SELECT fairqueue.message_create('acme')",
            "SELECT fairqueue.channel_set('acme')",
            "SELECT fairqueue.scheduler_tidy('default', 1000000000000, 0)",
        )

    def test_observer(self, raw: Raw, database_url: str, roles: str) -> None:
        """Sees everything, changes nothing."""
        watching = self.become(raw, database_url, f"{roles}_observer")
        assert rows(watching) == {}
        assert value(watching, "SELECT fairqueue.schema_version()") == schema.HEAD
        self.refused(
            watching,
            "INSERT INTO fairqueue.message (channel) VALUES ('acme')",
            "DELETE FROM fairqueue.message",
            "SELECT fairqueue.message_dequeue()",
            "SELECT fairqueue.message_cancel('{1}')",
        )

    def test_nobody(self, raw: Raw, database_url: str, roles: str, engine: Engine) -> None:
        """With USAGE on the schema and nothing else, no function writes or reads anything."""
        with Session(engine) as session:
            fq.enqueue(session, "acme")
            session.commit()
        before = rows(observer(raw, database_url))
        nobody = self.become(raw, database_url, f"{roles}_nobody")
        self.refused(
            nobody,
            "SELECT FROM fairqueue.message",
            "SELECT fairqueue.message_create('acme')",
            "SELECT fairqueue.message_dequeue()",
            "SELECT fairqueue.message_cancel('{1}')",
            "SELECT fairqueue.channel_set('acme')",
            # A function for others of fairqueue, which anybody may call: with no more than the caller's own rights.
            "SELECT fairqueue.lease_results('{1}', '{1}', '{}', '{}', 'completed')",
        )
        assert rows(observer(raw, database_url)) == before

    def test_nobody_hangs_our_triggers_on_his_own_table(self, raw: Raw, database_url: str, roles: str) -> None:
        """They run with the owner's rights, so this would be a way to signal in other tenants' names."""
        nobody = self.become(raw, database_url, f"{roles}_nobody")
        nobody.execute("CREATE TEMP TABLE mine (queue text, channel text, dequeue_at bigint, id bigint)")
        for function in ("signal_enqueued", "signal_moved", "signal_channel"):
            events = "UPDATE" if function == "signal_moved" else "INSERT"
            self.refused(
                nobody,
                f"CREATE TRIGGER evil AFTER {events} ON mine FOR EACH ROW EXECUTE FUNCTION fairqueue.{function}()",
            )
