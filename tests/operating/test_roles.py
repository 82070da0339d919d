"""Each role can do its whole job, and not one thing more."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from psycopg import errors
from psycopg.sql import SQL, Identifier
from pytest_postgresql.executors import NoopExecutor
from sqlalchemy import Engine, select, text
from sqlalchemy.exc import DBAPIError, ProgrammingError
from sqlalchemy.orm import Session

import fairqueue as fq
from fairqueue import roles, schema
from fairqueue.status import status
from fairqueue.testing._databases import Databases
from tests.acts import wait_until
from tests.fixtures.connections import Raw
from tests.fixtures.databases import prepared
from tests.observing import observer, rows, value, waits_for_a_lock
from tests.operating.rights import ACTS, GIVEN, NOBODY, READERS, RUN, Roles, rights_of
from tests.pages import ROOT, blocks

STRANGE = 'My "Q"; DROP TABLE x --'


@pytest.fixture(scope="module")
def strange(databases: Databases, template: NoopExecutor) -> Iterator[str]:
    """A database to be cloned, in which there is a queue in that schema, too."""

    def install(engine: Engine) -> None:
        with engine.begin() as connection:
            schema.install(connection, STRANGE)

    with prepared(databases, template, install) as name:
        yield name


@pytest.fixture
def database_url(request: pytest.FixtureRequest, databases: Databases, template: NoopExecutor) -> Iterator[str]:
    """Of a database that has the schema which `granted` is about."""
    callspec = getattr(request.node, "callspec", None)
    is_strange = callspec is not None and callspec.params.get("granted") == STRANGE
    with databases.create(request.getfixturevalue("strange") if is_strange else template.template_dbname) as url:
        yield url


@pytest.fixture(params=["fairqueue", STRANGE], ids=["fairqueue", "strange"])
def granted(request: pytest.FixtureRequest, engine: Engine, raw: Raw, database_url: str) -> Iterator[Roles]:
    """The roles, and message 1 ready, 2 leased, 3 dead, and a policy for the channel globex."""
    with Session(engine.execution_options(**fq.in_schema(request.param))) as session:
        session.merge(fq.Channel("globex", weight=2))
        session.add_all(
            [
                fq.Message("acme", "secret", delay=3600),
                fq.Message("acme", 2, priority=1),
                fq.Message("acme", 3, priority=2, max_attempts=1),
            ]
        )
        session.flush()
        session.commit()
        dead, leased = session.scalars(fq.dequeue(limit=2)).all()
        session.execute(fq.fail(dead))
        session.commit()
        assert (leased.id, dead.id) == (2, 3)
    granted = Roles(raw, database_url, request.param)
    granted.create(engine)
    yield granted
    granted.drop()


def outcomes(granted: Roles, kind: str) -> Iterator[tuple[str, str]]:
    """What comes of each act: "done", "refused", or another error."""
    place = '"' + granted.place.replace('"', '""') + '"'
    connection = granted.become(kind)
    for act, (_, statement) in ACTS.items():
        try:
            connection.execute(statement.format(q=place).encode())
            told = "done"
        except errors.InsufficientPrivilege:
            told = "refused"
        except psycopg.Error as error:
            told = f"{type(error).__name__}: {error}"
        connection.rollback()
        yield act, told


def test_acts(granted: Roles) -> None:
    """Every act, by every role: done where it is in the table, and insufficient_privilege where it isn't."""
    wrong = [
        (kind, act, told)
        for kind in granted.kinds
        for act, told in outcomes(granted, kind)
        if told != ("done" if kind in ACTS[act][0] else "refused")
    ]
    assert wrong == []


def test_acts_are_all(granted: Roles) -> None:
    """No function that runs with the owner's rights, and no table, is missing in the table above."""
    functions = granted.owner.execute(
        "SELECT p.proname FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace"
        " WHERE n.nspname = %s AND p.prosecdef AND p.prorettype <> 'trigger'::regtype",
        (granted.place,),
    )
    assert {name for (name,) in functions} <= ACTS.keys()


def test_rights(granted: Roles, engine: Engine) -> None:
    """The same as the catalog has it, for every table, column and function; also where it is granted once more."""
    granted.grant(engine)

    def rights(kind: str) -> set[tuple[str, str]]:
        return rights_of(granted.owner, granted.name(kind), granted.place)

    basic = {(name, "EXECUTE") for name in ("clock", "unix_ms", "schema_version", "schema_serves")}
    assert rights("producer") == {
        *basic,
        *((f"message.{name}", "INSERT") for name in GIVEN),
        *((f"message.{name}", "SELECT") for name in ("id", "dequeue_at", "attempt", "forgiven", "created_at")),
        *((name, "EXECUTE") for name in ("message_create", "message_create_many", "message_ending")),
    }
    verbs = ("dequeue", "complete", "fail", "defer", "cancel", "heartbeat")
    assert rights("worker") == {
        *basic,
        *((f"message_{verb}", "EXECUTE") for verb in verbs),
        *((f"queue_{verb}", "EXECUTE") for verb in ("due", "listen", "unlisten")),
    }
    messages = {"message", "dead_message", "history", "history_default"}
    tables = messages | {
        "channel",
        "queue",
        "dropped",
        "feed",
        "lane",
        "load",
        "plan",
        "rotation",
        "signal",
        "stage",
        "missed",
        "tickets",
    }
    reads = {(table, "SELECT") for table in tables}
    assert rights("observer") == reads | basic
    functions = {
        "channel_set", "queue_set", "queue_check", "queue_repair", "message_cancel", "message_redrive",
        "message_ending", "history_maintain", "feed_forget", "stage_clean",
    }  # fmt: skip
    assert rights("operator") == {
        *basic,
        *reads,
        *((table, verb) for table in ("channel", "queue") for verb in ("INSERT", "UPDATE", "DELETE")),
        ("dead_message", "DELETE"),
        *((name, "EXECUTE") for name in functions),
    }
    functions = {
        "stage_create", "stage_drop", "stage_clean", "load_enter", "load_claim", "load_count", "feed_horizon",
        "feed_move", "history_digest", "history_release",
    }  # fmt: skip
    assert rights("pipeline") == {
        *basic,
        *reads,
        *((f"message.{name}", "INSERT") for name in GIVEN),
        *((name, "EXECUTE") for name in functions),
    }
    assert rights(NOBODY) == set()


def test_those_of_the_sql_page(raw: Raw, database_url: str) -> None:
    """Roles that are made as docs/sql.md has it have the same rights. They belong to the server: it is rolled back."""
    owner = raw(database_url)
    (code,) = [
        code for _, code in blocks((ROOT / "docs" / "sql.md").read_text("utf-8"), "sql") if "CREATE ROLE" in code
    ]
    owner.execute(code.encode())
    for kind in roles.KINDS:
        owner.execute(SQL("CREATE ROLE {}").format(Identifier(f"another {kind}")))
        for statement in roles.grant_sql(f"another {kind}", kind):
            owner.execute(statement.encode())
        assert rights_of(owner, f"fq_{kind}") == rights_of(owner, f"another {kind}") != set()


def test_where_no_function_is_for_everybody(empty: Engine, raw: Raw, empty_database_url: str) -> None:
    """Hardened databases say so before anything is installed; defaults of columns call some, and our statements."""
    with empty.begin() as connection:
        connection.execute(text("ALTER DEFAULT PRIVILEGES REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC"))
        schema.install(connection)
    granted = Roles(raw, empty_database_url, "fairqueue")
    granted.create(empty)
    with Session(granted.engine("producer")) as session:
        session.add(fq.Message("acme"))
        fq.enqueue_many(session, [{"channel": "acme"}, {"channel": "acme", "delay": 60}])
        session.commit()
    with Session(granted.engine("pipeline")) as session:
        session.execute(text("INSERT INTO fairqueue.message (channel) VALUES ('acme')"))
        session.commit()
    with Session(granted.engine("worker")) as session:
        fq.verify(session.connection())
        found = session.scalars(fq.dequeue(limit=9)).all()
        assert [row.result for row in session.execute(fq.complete(found))] == ["completed"] * 3
        session.commit()
    with Session(granted.engine("operator")) as session:
        policy = fq.Channel("acme", weight=2, paused=True)
        session.add(policy)
        session.commit()
        policy.paused = False
        session.commit()
        assert fq.check(session) == []
    with Session(granted.engine("observer")) as session:
        assert [queue.waiting for queue in status(session).queues] == [1]
    granted.drop()


#: What anybody but the owner has of the queue, except what is everybody's of functions.
TAKEN = """
    SELECT o.name, a.grantee::regrole::text, a.privilege_type
    FROM (
        SELECT oid::regclass::text, relowner, relacl, false FROM pg_class WHERE relnamespace = 'fairqueue'::regnamespace
        UNION ALL
        SELECT oid::regproc::text, proowner, proacl, true FROM pg_proc WHERE pronamespace = 'fairqueue'::regnamespace
    ) o (name, owner, acl, is_function)
    CROSS JOIN aclexplode(o.acl) a
    WHERE a.grantee <> o.owner AND NOT (o.is_function AND a.grantee = 0)
"""


@pytest.mark.parametrize("statements", [schema.install_sql, lambda: schema.upgrade_sql("fairqueue", 0, schema.HEAD)])
def test_default_privileges_are_for_others_tables(
    empty: Engine, raw: Raw, empty_database_url: str, statements: Callable[[], list[str]]
) -> None:
    """What an owner gives to the application's roles of all that it makes, it doesn't of the queue; nor later on. What
    was in the schema before stays as it is.
    """
    owner = observer(raw, empty_database_url)
    granted = Roles(raw, empty_database_url, "fairqueue")
    web, other = (granted.name(kind) for kind in ("producer", NOBODY))
    for name in (web, other):
        owner.execute(SQL("CREATE ROLE {}").format(Identifier(name)))
    for what in ("TABLES", "SEQUENCES", "FUNCTIONS"):
        for each in (Identifier(web), SQL("PUBLIC")) if what == "TABLES" else (Identifier(web),):
            owner.execute(SQL("ALTER DEFAULT PRIVILEGES GRANT ALL ON {} TO {}").format(SQL(what), each))
    owner.execute("CREATE SCHEMA fairqueue; CREATE TABLE fairqueue.theirs (); CREATE SEQUENCE fairqueue.numbers")
    before = set(owner.execute(TAKEN).fetchall())
    assert {name for name, *_ in before} == {"fairqueue.theirs", "fairqueue.numbers"}
    with empty.begin() as connection:
        for statement in statements():
            schema.run(connection, statement)
    owner.execute("SELECT fairqueue.history_add('2100-01-01', false)")
    stage = value(owner, f"SELECT fairqueue.stage_create('{RUN}', 1)")
    assert stage.startswith("stage_")
    assert set(owner.execute(TAKEN).fetchall()) == before
    with empty.begin() as connection:
        roles.grant(connection, web, "producer")
        roles.grant(connection, other, "producer")
    assert {right for right in rights_of(owner, web) if right[0] not in {"theirs", "numbers"}} == rights_of(
        owner, other
    )
    for name in (web, other):
        owner.execute(SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(Identifier(name)))


def test_days_of_history_are_the_queue_s_owner_s(empty: Engine, raw: Raw, empty_database_url: str) -> None:
    """Who drops them in time; also those that a superuser makes, as before a history is restored."""
    superuser = observer(raw, empty_database_url)
    database = value(superuser, "SELECT current_database()")
    owner = f"{database} owner"
    superuser.execute(SQL("CREATE ROLE {}").format(Identifier(owner)))
    superuser.execute(SQL("GRANT CREATE ON DATABASE {} TO {}").format(Identifier(database), Identifier(owner)))
    with empty.begin() as connection:
        schema.run(connection, f'SET LOCAL ROLE "{owner}"')
        schema.install(connection)
    superuser.execute("SELECT fairqueue.history_add('2100-01-01', false)")
    made = "SELECT relowner::regrole::text FROM pg_class WHERE oid = 'fairqueue.history_2100_01_01'::regclass"
    assert value(superuser, made) == f'"{owner}"'
    superuser.execute(SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(Identifier(owner)))


def test_after_a_restore_without_rights(granted: Roles, engine: Engine) -> None:
    """pg_restore --no-acl: whoever may use the schema may call every function, until somebody is granted something."""
    with engine.begin() as connection:
        place = schema.quote(granted.place)
        schema.run(connection, f"GRANT EXECUTE ON ALL FUNCTIONS IN SCHEMA {place} TO PUBLIC")
        schema.run(connection, f"CREATE FUNCTION {place}.theirs() RETURNS integer SECURITY DEFINER RETURN 1")
    assert ("message_dequeue", "done") in outcomes(granted, "producer")
    with engine.begin() as connection:
        roles.grant(connection, granted.name("producer"), "producer", schema=granted.place)
    done = {act for act, told in outcomes(granted, "producer") if told == "done"}
    assert done == {act for act, (kinds, _) in ACTS.items() if "producer" in kinds}
    assert value(granted.become("producer"), f"SELECT {place}.theirs()") == 1


def test_days_of_history_to_come(granted: Roles) -> None:
    """Who reads history reads them by name, too, as PySpark does; everybody, where everybody may."""
    place = Identifier(granted.place)
    for day, readers in ("01", READERS), ("02", granted.kinds):
        granted.owner.execute(SQL("SELECT {}.history_add({}, false)").format(place, f"2100-01-{day}"))
        for kind in granted.kinds:
            query = "SELECT has_table_privilege(%s, format('%%I.history_2100_01_' || %s, %s::text), 'SELECT')"
            (row,) = granted.owner.execute(query.encode(), (granted.name(kind), day, granted.place))
            assert row == (kind in readers,)
        granted.owner.execute(SQL("GRANT SELECT ON {}.history TO PUBLIC").format(place))


class TestJobs:
    """Each does its work through the library."""

    def test_producer(self, granted: Roles) -> None:
        engine = granted.engine("producer")
        fq.translate_errors(engine)
        with Session(engine) as session:
            session.add_all(fq.Message("acme", number) for number in range(3))
            fq.enqueue(session, "acme", {"doc": 1}, delay=1, key="k", body=b"x", max_attempts=1, backoff=1, cost=2)
            session.flush()
            fq.enqueue_many(session, [{"channel": "acme", "delay": 1}, {"channel": "acme", "priority": 7}])
            fq.enqueue_many(session, [{"channel": "acme", "key": "m"}])
            fq.enqueue_copy(session, [{"channel": "acme", "key": "c"}])
            session.commit()
            modes: list[Any] = ["ignore", "replace"]
            for mode in modes:
                assert fq.enqueue_unique(session, "acme", key="k", on_conflict=mode) == 7
            session.commit()
            fq.enqueue(session, "acme", key="k")
            with pytest.raises(fq.DuplicateKey):
                session.commit()
            session.rollback()
            assert session.execute(fq.ending([3])).one().outcome == "dead"
            with pytest.raises(ProgrammingError, match="permission denied"):
                session.scalars(select(fq.Message)).all()
        engine.dispose()

    def test_worker(self, granted: Roles) -> None:
        granted.owner.execute(SQL("INSERT INTO {}.message (channel) SELECT 'globex' FROM generate_series(1, 4)").format(
            Identifier(granted.place)))  # fmt: skip
        engine = granted.engine("worker")
        with Session(engine) as session:
            batch = session.scalars(fq.dequeue(limit=4, worker="w1")).all()
            session.commit()
            acts = [fq.heartbeat, fq.complete, fq.fail, fq.defer]
            told = [session.execute(act(m)).one().result for act, m in zip(acts, batch, strict=True)]
            session.commit()
            assert told == ["extended", "completed", "failed", "deferred"]
            with engine.connect() as connection:
                fq.verify(connection, granted.place)
        engine.dispose()

    def test_observer(self, granted: Roles) -> None:
        watching = granted.become("observer")
        watching.autocommit = True
        assert rows(watching, granted.place.replace('"', '""'))["message"] == 2
        engine = granted.engine("observer")
        with Session(engine) as session:
            for model in (fq.Message, fq.Channel, fq.Queue, fq.History, fq.DeadMessage):
                session.scalars(select(model)).all()
        engine.dispose()

    def test_operator(self, granted: Roles) -> None:
        engine = granted.engine("operator")
        with Session(engine) as session:
            session.merge(fq.Channel("globex", max_concurrency=5, release_interval_ms=100, burst=3, weight=2))
            session.merge(fq.Queue("default", max_attempts=3))
            session.flush()
            session.execute(fq.pause(channel="acme"))
            session.execute(fq.resume(queue="default"))
            session.commit()
            session.delete(session.get_one(fq.Channel, ("default", "globex")))
            assert session.execute(fq.redrive([3])).one().result == "redriven"
            assert {row.result for row in session.execute(fq.cancel([1, 2, 3]))} == {"cancelled"}
            session.commit()
        engine.dispose()

    def test_several_kinds(self, granted: Roles, engine: Engine) -> None:
        with engine.begin() as connection:
            roles.grant(connection, granted.name("worker"), "producer", schema=granted.place)
        both = granted.engine("worker")
        with Session(both) as session:
            fq.enqueue(session, "other", "mine")
            session.commit()
            assert [m.payload for m in session.scalars(fq.dequeue())] == ["mine"]
        both.dispose()

    def test_revoke(self, granted: Roles, engine: Engine) -> None:
        """Nothing is left; twice is no error."""
        with engine.begin() as connection:
            for kind in roles.KINDS:
                for _ in range(2):
                    roles.revoke(connection, granted.name(kind), schema=granted.place)
        for kind in roles.KINDS:
            assert {told for _, told in outcomes(granted, kind)} == {"refused"}
            granted.owner.execute(SQL("DROP ROLE {0}; CREATE ROLE {0}").format(Identifier(granted.name(kind))))


class TestOwner:
    @pytest.mark.parametrize("may_become_it", [False, True])
    def test_nobody_else_gives_or_takes(self, granted: Roles, may_become_it: bool) -> None:
        """PostgreSQL only warns of a right that one has and may not give; or would have, as the role that one isn't."""
        if may_become_it:
            names = Identifier(granted.name("operator")), Identifier(value(granted.owner, "SELECT current_user"))
            granted.owner.execute(SQL("ALTER ROLE {0} NOINHERIT; GRANT {1} TO {0}").format(*names))
        operator = granted.engine("operator")
        with operator.connect() as connection:
            with pytest.raises(fq.FairqueueError, match=r"only role .* can give and take rights"):
                roles.grant(connection, granted.name("worker"), "observer", schema=granted.place)
            with pytest.raises(fq.FairqueueError, match=r"only role .* can give and take rights"):
                roles.revoke(connection, granted.name("worker"), schema=granted.place)
        operator.dispose()

    @pytest.mark.parametrize("whom", ["producer", None])
    def test_who_may_create_functions_could_have_them_run(
        self, granted: Roles, engine: Engine, whom: str | None
    ) -> None:
        """They would be taken for those that ours call, and run with the rights of the owner."""
        role = SQL("PUBLIC") if whom is None else Identifier(granted.name(whom))
        granted.owner.execute(SQL("GRANT CREATE ON SCHEMA {} TO {}").format(Identifier(granted.place), role))
        with engine.connect() as connection, pytest.raises(fq.FairqueueError, match=r"may create objects in schema .*"):
            roles.grant(connection, granted.name("producer"), "producer", schema=granted.place)
        granted.owner.execute(SQL("REVOKE CREATE ON SCHEMA {} FROM {}").format(Identifier(granted.place), role))
        with engine.begin() as connection:
            roles.grant(connection, granted.name("producer"), "producer", schema=granted.place)

    def test_it_keeps_its_own(self, engine: Engine) -> None:
        """The functions run with them."""
        with engine.connect() as connection:
            me = connection.scalar(text("SELECT current_user")) or ""
            with pytest.raises(fq.InvalidValue, match=f"role '{me}' owns the queue"):
                roles.revoke(connection, me)


class TestBadInput:
    @pytest.mark.parametrize("role", ["public", "none", "", None, 7, "x" * 64, "ü" * 32, "nul\x00"])
    def test_role(self, role: Any) -> None:
        """PUBLIC above all, which PostgreSQL takes for everybody even in quotes."""
        with pytest.raises(fq.InvalidValue, match=r"^role must be"):
            roles.grant_sql(role, "producer")
        with pytest.raises(fq.InvalidValue, match=r"^role must be"):
            roles.revoke_sql(role)

    @pytest.mark.parametrize("kind", ["admin", "", None, "Producer"])
    def test_kind(self, kind: Any) -> None:
        with pytest.raises(
            fq.InvalidValue, match=r"^kind must be producer, worker, observer, operator or pipeline, not"
        ):
            roles.grant_sql("app", kind)

    @pytest.mark.parametrize("place", ["", None, "x" * 64])
    def test_schema(self, place: Any) -> None:
        with pytest.raises(fq.InvalidValue, match=r"^schema must be"):
            roles.grant_sql("app", "worker", schema=place)
        with pytest.raises(fq.InvalidValue, match=r"^schema must be"):
            roles.revoke_sql("app", schema=place)

    def test_unknown_role(self, engine: Engine) -> None:
        with engine.connect() as connection, pytest.raises(DBAPIError, match='role "nobody here" does not exist'):
            roles.grant(connection, "nobody here", "worker")

    def test_belongs_to_the_transaction(self, engine: Engine, raw: Raw, database_url: str) -> None:
        watching = observer(raw, database_url)
        acl = "SELECT nspacl::text FROM pg_namespace WHERE nspname = 'fairqueue'"
        before = value(watching, acl)
        with engine.connect() as connection:
            roles.grant(connection, connection.scalar(text("SELECT current_user")) or "", "observer")
            connection.rollback()
        assert value(watching, acl) == before


@pytest.mark.parametrize("second", ["grant", "revoke"])
def test_two_at_once(granted: Roles, engine: Engine, raw: Raw, database_url: str, second: str) -> None:
    """The rights of an object are one row, of which PostgreSQL says that somebody else has changed it: one waits."""
    role = granted.name("observer")
    statements = {
        "grant": roles.grant_sql(role, "worker", schema=granted.place),
        "revoke": roles.revoke_sql(role, schema=granted.place),
    }[second]
    two, watching = raw(database_url), observer(raw, database_url)
    with ThreadPoolExecutor(1) as pool, engine.connect() as connection:
        roles.grant(connection, granted.name("producer"), "worker", schema=granted.place)
        future = pool.submit(lambda: [two.execute(statement.encode()) for statement in statements])
        wait_until(lambda: waits_for_a_lock(watching, two))
        connection.commit()
        future.result()
    two.commit()
    done = {act for act, told in outcomes(granted, "observer") if told == "done"}
    assert done == {act for act, (kinds, _) in ACTS.items() if {"observer", "worker"} & kinds and second == "grant"}
