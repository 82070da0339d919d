"""Into the database and out again: three roads to one schema, and none that leaves anything behind.

What the functions in it may do, and cannot be tricked into, is in test_security.py.
"""

import re
from importlib.util import find_spec
from typing import Any

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, Engine, MetaData, text
from sqlalchemy.exc import NotSupportedError
from sqlalchemy.orm import Session

import fairqueue as fq
from fairqueue import schema
from tests.catalog import dump, snapshot, sql_files
from tests.fixtures.connections import Raw
from tests.observing import observer
from tests.schema.running import run


class TestRoads:
    def test_all_lead_to_the_same_schema(self, empty: Engine, empty_database_url: str, raw: Raw) -> None:
        """The files of HEAD, the frozen steps, and create_all; each road back leads to where it began."""
        watching = observer(raw, empty_database_url)

        def state() -> tuple[list[str], str | None]:
            return snapshot(watching), dump(empty_database_url)

        before = state()
        run(empty, schema.install_sql("fairqueue"))
        head = state()
        assert len(head[0]) > 100
        run(empty, schema.downgrade_sql("fairqueue", schema.HEAD, 0))
        assert state() == before

        run(empty, schema.upgrade_sql("fairqueue", 0, schema.HEAD))
        assert state() == head
        for version in range(schema.HEAD, 0, -1):
            run(empty, schema.downgrade_sql("fairqueue", version, version - 1))
        assert state() == before

        for version in range(schema.HEAD):
            run(empty, schema.upgrade_sql("fairqueue", version, version + 1))
        assert state() == head
        with empty.begin() as connection:
            schema.uninstall(connection)
        assert state() == before

        metadata = MetaData()
        fq.attach(metadata)
        metadata.create_all(empty)
        assert state() == head
        metadata.drop_all(empty)
        assert state() == before

    def test_models_describe_it(self, engine: Engine) -> None:
        """Alembic finds no difference between the database and the models, down to checks and defaults."""

        def ours(name: str | None, kind: str, _: Any) -> bool:
            # The partitions of history come and go by themselves.
            partition = kind == "table" and str(name).startswith("history_")
            return (kind != "schema" or name == "fairqueue") and not partition

        options = {
            "include_schemas": True,
            "include_name": ours,
            "compare_server_default": True,
            "autogenerate_plugins": [
                "alembic.autogenerate.*",
                *(["alembic.ext.checkconstraint_byname"] if find_spec("alembic.ext") else []),  # of a newer one
            ],
        }

        def differences(connection: Connection) -> list[Any]:
            context = MigrationContext.configure(connection, opts=options)
            found = compare_metadata(context, fq.Message.metadata)
            return [each for each in found if not same_default(each) and not of_alembic_utils(each)]

        def of_alembic_utils(difference: Any) -> bool:
            # Once imported, by a test of a host that uses it, it compares the functions of every schema.
            return isinstance(difference, tuple) and difference[0] == "drop_entity"

        def same_default(difference: Any) -> bool:
            # Alembic evaluates both defaults, and a clock doesn't always say the same twice.
            if not isinstance(difference, list) or difference[0][0] != "modify_default":
                return False
            found, wanted = (re.sub(r"::\w+|[()\s]", "", default.arg.text.lower()) for default in difference[0][-2:])
            return bool(found == wanted)

        with engine.connect() as connection:
            assert differences(connection) == []
            for change in (
                "message ALTER dequeue_at SET DEFAULT 0",
                "channel DROP CONSTRAINT channel_name_length",
                "lane ALTER since TYPE numeric",
            ):
                connection.execute(text(f"ALTER TABLE fairqueue.{change}"))
            assert len(differences(connection)) == 3

    def test_no_index_depends_on_a_locale(self, engine: Engine) -> None:
        """One whose order changes, with an update of the operating system, damages the indexes that do."""
        depending = text("""
            SELECT DISTINCT i.indexrelid::regclass::text
            FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid CROSS JOIN unnest(i.indcollation) AS o (id)
            WHERE c.relnamespace = 'fairqueue'::regnamespace AND o.id NOT IN (0, 'pg_catalog."C"'::regcollation)""")
        with engine.connect() as connection:
            assert connection.scalars(depending).all() == []

    def test_with_messages_in_it(self, empty: Engine, empty_database_url: str, raw: Raw) -> None:
        watching = observer(raw, empty_database_url)
        before = snapshot(watching)
        with empty.begin() as connection:
            schema.install(connection)
        with Session(empty) as session:
            fq.enqueue_many(session, [{"channel": "acme"} for _ in range(3)])
            session.commit()
            session.scalars(fq.dequeue()).all()
            session.commit()
        with empty.begin() as connection:
            schema.uninstall(connection)
            schema.uninstall(connection)  # nothing there, nothing to do
        assert snapshot(watching) == before


class TestForeignObjects:
    """What others have in the schema stays, and so does the schema, if it is theirs or they need it."""

    def test_schema_that_was_there_before(self, empty: Engine, empty_database_url: str, raw: Raw) -> None:
        watching = observer(raw, empty_database_url)
        for theirs in ("CREATE SCHEMA fairqueue", "CREATE TABLE fairqueue.theirs (id int PRIMARY KEY)"):
            watching.execute(theirs.encode())
            before = snapshot(watching)
            with empty.begin() as connection:
                schema.install(connection)
                schema.uninstall(connection)
            assert snapshot(watching) == before

    @pytest.mark.parametrize(
        "theirs",
        [
            "CREATE TABLE fairqueue.theirs (id int)",
            "CREATE FUNCTION fairqueue.theirs() RETURNS int LANGUAGE sql AS 'SELECT 1'",
            "CREATE TYPE fairqueue.theirs AS ENUM ('a')",
            "CREATE DOMAIN fairqueue.theirs AS int",
        ],
        ids=["table", "function", "type", "domain"],
    )
    def test_objects_added_later(self, empty: Engine, empty_database_url: str, raw: Raw, theirs: str) -> None:
        watching = observer(raw, empty_database_url)
        with empty.begin() as connection:
            schema.install(connection)
        watching.execute(theirs.encode())
        with empty.begin() as connection:
            schema.uninstall(connection)
        left = snapshot(watching)
        assert any("theirs" in line for line in left)
        assert not any("message" in line for line in left)

    def test_objects_that_need_ours(self, engine: Engine) -> None:
        """Are not dropped along with them: PostgreSQL says what depends on what, and nothing is removed."""
        with engine.begin() as connection:
            connection.execute(text("CREATE VIEW report AS SELECT count(*) FROM fairqueue.message"))
        with pytest.raises(Exception, match=r"view .*report depends on table message"), engine.begin() as connection:
            schema.uninstall(connection)
        with engine.begin() as connection:
            schema.verify(connection)


class TestVersion:
    def fake(self, engine: Engine, version: int, serves: int = schema.HEAD) -> None:
        fake = "CREATE OR REPLACE FUNCTION fairqueue.schema_{} RETURNS int LANGUAGE sql RETURN {}"
        run(engine, [fake.format("version()", version), fake.format("serves()", serves)])

    def test_none(self, empty: Engine) -> None:
        with empty.connect() as connection, pytest.raises(fq.SchemaVersionError) as error:
            fq.verify(connection)
        assert str(error.value) == (
            "schema 'fairqueue' has no fairqueue: run the application's migrations (alembic upgrade head), or write a"
            f" revision with op.create_fairqueue({schema.HEAD}), as autogenerate does with fq.attach(metadata) and the"
            " plugin fairqueue in env.py; is it in another schema? give the engine execution_options=fq.in_schema(...)"
        )

    def test_older(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(schema, "HEAD", 7)
        self.fake(engine, 3)
        for act in (schema.verify, schema.install):
            with engine.connect() as connection, pytest.raises(fq.SchemaVersionError) as error:
                act(connection)
            assert "holds version 3 of fairqueue, this library needs 7" in str(error.value)
            assert "run the application's migrations (alembic upgrade head), or write" in str(error.value)
            assert "op.upgrade_fairqueue(3, 7)" in str(error.value)

    def test_newer_but_good_for_this_one(self, engine: Engine) -> None:
        """Between migration and deployment, a program that is started again goes on."""
        self.fake(engine, 99)
        with engine.begin() as connection:
            fq.verify(connection)
            schema.install(connection)
            assert schema.installed_version(connection) == 99

    def test_newer(self, engine: Engine) -> None:
        self.fake(engine, 99, serves=schema.HEAD + 1)
        for act in (schema.verify, schema.install):
            with engine.connect() as connection, pytest.raises(fq.SchemaVersionError) as error:
                act(connection)
            assert f"holds version 99 of fairqueue, this library knows no more than {schema.HEAD}" in str(error.value)
            assert f"op.downgrade_fairqueue(99, {schema.HEAD})" in str(error.value)
        with engine.connect() as connection, pytest.raises(fq.SchemaVersionError, match=r"0 to .* between 0 and 99"):
            schema.uninstall(connection)

    @pytest.mark.parametrize("how", ["DISABLE TRIGGER ALL", "ENABLE REPLICA TRIGGER message_enqueued"])
    def test_triggers_that_are_switched_off(self, engine: Engine, how: str) -> None:
        """Nobody would learn of what is enqueued. The application's own triggers are its own business."""
        run(
            engine,
            [
                "CREATE FUNCTION public.own() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
                "CREATE TRIGGER own AFTER INSERT ON fairqueue.message EXECUTE FUNCTION public.own()",
                "ALTER TABLE fairqueue.message DISABLE TRIGGER own",
            ],
        )
        with engine.connect() as connection:
            fq.verify(connection)
        run(engine, [f"ALTER TABLE fairqueue.message {how}"])
        with engine.connect() as connection, pytest.raises(fq.SchemaVersionError) as error:
            fq.verify(connection)
        assert str(error.value) == (
            "triggers of fairqueue.message are switched off, so the queue learns nothing of what is written there:"
            " ALTER TABLE fairqueue.message ENABLE TRIGGER USER; then `fairqueue check --repair` makes known what was"
        )
        run(engine, ["ALTER TABLE fairqueue.message ENABLE TRIGGER USER"])
        with engine.connect() as connection:
            fq.verify(connection)

    def test_steps_that_are_none(self) -> None:
        for steps, start, end in (
            (schema.upgrade_sql, 1, 99),
            (schema.downgrade_sql, 99, 1),
            (schema.upgrade_sql, -1, 1),
        ):
            with pytest.raises(fq.SchemaVersionError, match="install the release of fairqueue that"):
                steps("fairqueue", start, end)

    def test_server_too_old(self, empty: Engine) -> None:
        """Is told before anything else is done."""
        installing, upgrading = schema.install_sql()[0], schema.upgrade_sql("fairqueue", 0, 1)[0]
        assert installing == upgrading
        run(empty, [installing])
        old = installing.replace("current_setting('server_version_num')", "'130022'")
        assert old != installing
        with pytest.raises(NotSupportedError, match=r"fairqueue needs PostgreSQL 14 or later, this server is [0-9.]+"):
            run(empty, [old])


class TestFiles:
    """The SQL is read by people: each file says what it is, who uses it and what it locks."""

    def test_each_begins_with_what_it_is(self) -> None:
        for file in [*sql_files(), *sql_files("steps")]:
            assert re.match(r"-- [A-Z].{20,}", file.read_text()), file

    def test_functions_say_who_calls_them_and_what_they_lock(self) -> None:
        for file in sql_files("head/2_functions"):
            comment = file.read_text().partition("\nCREATE")[0]
            assert re.search(r"\bCalled by\b|Trigger function of", comment), file
            assert re.search(r"Locks: |[Tt]akes no lock", comment), file

    def test_one_object_a_file_and_named_like_it(self) -> None:
        for file in sql_files():
            created = re.findall(r"^CREATE (?:FUNCTION|TABLE|TRIGGER|TYPE) (\w+)", file.read_text(), re.MULTILINE)
            assert created == [file.stem]

    def test_no_file_names_a_schema(self, raw: Raw, database_url: str) -> None:
        """They run in whatever schema they are installed in."""
        for file in [*sql_files(), *sql_files("steps")]:
            code = re.sub(r"--.*", "", file.read_text())
            assert not re.search(r"\bfairqueue\.\w|\bpublic\b", code), file


def test_expressions_are_read_in(engine: Engine, watching: psycopg.Connection[Any]) -> None:
    """PostgreSQL puts them into the statements that use them; a call costs ten times as much."""
    found = watching.execute(
        "SELECT p.proname, p.proargtypes::regtype[]::text[] FROM pg_proc p JOIN pg_language l ON l.oid = p.prolang"
        " WHERE l.lanname = 'sql' AND p.pronamespace = 'fairqueue'::regnamespace AND NOT p.proretset"
        " AND NOT p.prosecdef AND p.proconfig IS NULL"
    ).fetchall()
    assert len(found) > 10
    watching.execute("SET search_path = fairqueue")
    for name, types in found:
        columns = [f"a{n} {type_}" for n, type_ in enumerate(types)]
        watching.execute(f"CREATE TEMP TABLE given ({', '.join(columns)})".encode())
        values = ", ".join(column.partition(" ")[0] for column in columns)
        query = f"EXPLAIN (VERBOSE, COSTS OFF) SELECT {name}({values}) FROM given"
        plan = "\n".join(line for (line,) in watching.execute(query.encode()))
        assert f"{name}(" not in plan, plan
        watching.execute("DROP TABLE given")


def test_comparison_notices(engine: Engine) -> None:
    """The catalog's text does tell a difference, so that equality above means something."""
    with psycopg.connect(engine.url.set(drivername="postgresql").render_as_string(False)) as connection:
        before = snapshot(connection)
        for change in (
            "ALTER FUNCTION fairqueue.message_dequeue SET jit = on",
            "GRANT EXECUTE ON FUNCTION fairqueue.message_fail TO PUBLIC",
            "DROP INDEX fairqueue.lane_idle",
            "ALTER TABLE fairqueue.lane ALTER since SET DEFAULT 0",
            "DROP TRIGGER message_moved ON fairqueue.message",
        ):
            connection.execute(change.encode())
            after = snapshot(connection)
            assert after != before
            before = after
