"""Installing: side by side, on any search_path, by any driver, in schemas of any name; and where it is refused."""

import asyncio
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from sqlalchemy import Connection, Engine, MetaData, Table, inspect, make_url, text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.orm import Session

import fairqueue as fq
from fairqueue import roles, schema
from tests.catalog import snapshot, sql_files
from tests.fixtures.connections import Raw
from tests.observing import observer, value
from tests.schema.running import run

STRANGE = ["a$b", "select", "a.b", "new\nline", "ü" * 31, '50%: "My Q" %s it\'s :a $$ $1 x\\y']


class TestInstall:
    @pytest.mark.parametrize("level", ["READ COMMITTED", "SERIALIZABLE"])
    def test_at_the_same_time(self, empty: Engine, level: str) -> None:
        """What the others have installed is seen, though the transaction is older than that."""
        start = Barrier(4)

        def install(_: int) -> None:
            with empty.execution_options(isolation_level=level).begin() as connection:
                assert schema.installed_version(connection) == 0
                start.wait()
                schema.install(connection)

        with ThreadPoolExecutor(4) as pool:
            list(pool.map(install, range(4)))
        with empty.connect() as connection:
            schema.verify(connection)

    @pytest.mark.parametrize("path", ['"$user", public', "", '"My Q",pg_temp', "public"])
    def test_leaves_the_search_path_alone(self, empty: Engine, path: str) -> None:
        """Before the commit and after it."""
        with empty.connect() as connection:
            connection.execute(text("SELECT set_config('search_path', :path, false)"), {"path": path})
            before = connection.scalar(text("SHOW search_path"))
            for act in (schema.install, schema.install, schema.uninstall):
                act(connection)
                for _ in range(2):
                    assert connection.scalar(text("SHOW search_path")) == before
                    connection.commit()

    @pytest.mark.parametrize("act", [schema.install, schema.uninstall])
    def test_no_half_of_it(self, empty: Engine, act: Callable[[Connection], None]) -> None:
        """Where each statement is committed by itself nothing is begun."""
        with empty.execution_options(isolation_level="AUTOCOMMIT").connect() as connection:
            with pytest.raises(fq.InvalidValue, match="connection must be in a transaction, not in AUTOCOMMIT"):
                act(connection)
            assert connection.scalar(text("SELECT to_regnamespace('fairqueue')")) is None

    def test_is_rolled_back_with_its_transaction(self, empty: Engine, empty_database_url: str, raw: Raw) -> None:
        watching = observer(raw, empty_database_url)
        before = snapshot(watching)
        with empty.connect() as connection:
            schema.install(connection)
            connection.rollback()
            assert connection.scalar(text("SHOW search_path")) == '"$user", public'
        assert snapshot(watching) == before

    @pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
    def test_the_bodies_arrive_as_they_are_written(self, empty_database_url: str, raw: Raw, driver: str) -> None:
        """A percent sign, a colon and a backslash mean something to drivers and to text()."""

        async def main() -> None:
            engine = create_async_engine(make_url(empty_database_url).set(drivername=f"postgresql+{driver}"))
            async with engine.begin() as connection:
                await connection.run_sync(schema.install)
            await engine.dispose()

        asyncio.run(main())
        watching = observer(raw, empty_database_url)
        for file in sql_files("head/2_functions"):
            body = re.search(r"\$\$(.*)\$\$", file.read_text(), re.DOTALL)
            if body:
                query = "SELECT prosrc FROM pg_proc WHERE proname = %s"
                assert value(watching, query, file.stem) == body[1]

    @pytest.mark.parametrize("name", STRANGE)
    def test_schemas_of_any_name(self, empty: Engine, empty_database_url: str, raw: Raw, name: str) -> None:
        watching = observer(raw, empty_database_url)
        before = snapshot(watching)
        with empty.begin() as connection:
            schema.install(connection, name)
            schema.install(connection, name)
            schema.verify(connection, name)
            place = schema.quote(name)  # and as a restored dump has it, quoted in the server's way
            schema.run(connection, f"ALTER FUNCTION {place}.message_dequeue SET search_path = {place}, pg_temp")
            schema.verify(connection, name)
        with Session(empty.execution_options(**fq.in_schema(name))) as session:
            fq.enqueue(session, "acme", 1)
            fq.enqueue_many(session, [{"channel": "acme", "payload": 2}])
            fq.enqueue_copy(session, [{"channel": "acme", "payload": 3}])
            batch = session.scalars(fq.dequeue(limit=9)).all()
            assert [message.payload for message in batch] == [1, 2, 3]
            assert {row.result for row in session.execute(fq.complete(batch))} == {"completed"}
            session.commit()
        with empty.begin() as connection:
            schema.uninstall(connection, name)
        assert snapshot(watching) == before

    def test_several_schemas(self, empty: Engine) -> None:
        """Installations of one database know nothing of each other."""
        with empty.begin() as connection:
            for name in ("one", "two"):
                schema.install(connection, name)
        with Session(empty.execution_options(**fq.in_schema("one"))) as session:
            fq.enqueue(session, "acme")
            session.commit()
        for name, count in {"one": 1, "two": 0}.items():
            with Session(empty.execution_options(**fq.in_schema(name))) as session:
                assert len(session.scalars(fq.dequeue()).all()) == count
        with empty.begin() as connection:
            schema.uninstall(connection, "one")
            schema.verify(connection, "two")

    def test_that_of_the_connection(self, empty: Engine) -> None:
        """Where none is given, in_schema says which."""
        with empty.execution_options(**fq.in_schema("one")).begin() as connection:
            schema.install(connection)
            assert inspect(connection).get_schema_names() == ["information_schema", "one", "public"]
            fq.verify(connection)
            roles.grant(connection, "pg_monitor", "worker")
            roles.revoke(connection, "pg_monitor")
            schema.uninstall(connection)
            with pytest.raises(fq.SchemaVersionError, match="schema 'one' has no fairqueue"):
                fq.verify(connection)
        with empty.execution_options(schema_translate_map=None).begin() as connection:
            schema.install(connection)
            schema.verify(connection, "fairqueue")

    def test_where_everybody_may_create(self, empty: Engine) -> None:
        """A function of theirs could be taken for one that ours call, and run with the rights of the owner."""
        run(empty, ["CREATE SCHEMA theirs", "GRANT CREATE ON SCHEMA theirs TO PUBLIC"])
        with empty.connect() as connection:
            with pytest.raises(DBAPIError, match="everybody may create objects in schema theirs"):
                schema.install(connection, "theirs")
            connection.rollback()
            assert schema.installed_version(connection, "theirs") == 0
        run(empty, ["REVOKE CREATE ON SCHEMA theirs FROM PUBLIC", *schema.upgrade_sql("theirs", 0, schema.HEAD)])

    @pytest.mark.parametrize(
        ("path", "refused"),
        [
            ('"$user", public', True),
            ('nothing,"$user"', True),
            ("public", False),
            ('public, "$user"', False),
            ("", False),
        ],
    )
    def test_that_the_applications_tables_would_be_in(self, empty: Engine, path: str, refused: bool) -> None:
        """As a role has the name of the schema: then it is the default one as soon as it is there."""
        with empty.begin() as connection:
            me: str = connection.execute(text("SELECT current_user")).scalar_one()
            connection.execute(text("SELECT set_config('search_path', :path, true)"), {"path": path})
            elsewhere, metadata = MetaData(schema="public"), MetaData()
            for each in (elsewhere, metadata):
                Table("document", each)
                fq.attach(each, schema=me)
            if not refused:
                schema.check_apart(connection, me)
                return
            with pytest.raises(fq.InvalidValue, match=f"schema '{me}', this connection's default one") as error:
                metadata.create_all(connection)
            assert str(error.value).endswith("its own, or say ALTER ROLE ... SET search_path = public")
            assert not inspect(connection).has_schema(me)
            elsewhere.create_all(connection)

    def test_that_is_where_the_applications_tables_should_be(self, empty: Engine) -> None:
        """The way out isn't what is so already."""
        metadata = MetaData()
        Table("document", metadata)
        fq.attach(metadata, schema="public")
        with pytest.raises(fq.InvalidValue, match=r"schema 'public', .*; give it a schema of its own$"):
            metadata.create_all(empty)

    @pytest.mark.parametrize(
        "name", ["", "x" * 64, "ü" * 32, "nul\0", "half \ud83d", "$fq$", None, 7, "lateral", "jobs\n"]
    )
    def test_names_that_are_none(self, name: str) -> None:
        for use in (schema.install_sql, fq.in_schema, lambda name: fq.attach(MetaData(), schema=name)):
            with pytest.raises(fq.InvalidValue, match=r"^schema must be a name (of 1 to 63 bytes|that SQLAlchemy)"):
                use(name)
