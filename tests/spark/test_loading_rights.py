"""Who may load, into which tables and schemas, and where the database is said to be."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from sqlalchemy import Engine, make_url
from sqlalchemy.orm import Session

pytest.importorskip("adbc_driver_postgresql")

import fairqueue as fq
from fairqueue import roles, schema
from fairqueue.errors import InvalidValue
from fairqueue.spark.engine.loading import (
    Entered,
    LoadFailed,
    Part,
    abandon,
    clean,
    enter,
    load_part,
    new_run,
    progress,
    stage,
)
from fairqueue.spark.engine.place import Place
from fairqueue.spark.engine.reading import Selection, plan
from fairqueue.spark.engine.reading import snapshot as held_snapshot
from tests.acts import drain, put
from tests.alembic.hosts import Host
from tests.catalog import snapshot
from tests.fixtures.connections import Raw
from tests.fixtures.postgres import libpq
from tests.observing import observer, value
from tests.spark.loads import JOB, direct, keyed, stages


class TestRights:
    @pytest.fixture
    def role(self, engine: Engine, watching: psycopg.Connection[Any]) -> Iterator[str]:
        """One that may nothing yet; it is only known to this database."""
        name = f"{value(watching, 'SELECT current_database()')} ü"
        watching.execute(f'CREATE ROLE "{name}"'.encode())
        with engine.begin() as connection:
            roles.grant(connection, name, "producer")
        yield name
        watching.execute(f'DROP OWNED BY "{name}"; DROP ROLE "{name}"'.encode())

    def place_of(self, database_url: str, role: str) -> Place:
        """As who has said SET ROLE, which a connection may do by itself."""
        options = "-c role=" + role.replace(" ", "\\ ")
        return Place(url=make_url(database_url).update_query_dict({"options": options}).render_as_string(False))

    def test_pipeline(self, engine: Engine, session: Session, database_url: str, role: str) -> None:
        with engine.begin() as connection:
            roles.revoke(connection, role)
            roles.grant(connection, role, "pipeline")
        place = self.place_of(database_url, role)
        run = new_run()
        part = stage(place, run, 0, keyed("a"))
        stage(place, run, 0, keyed("a"))
        assert enter(place, run, [part], name=JOB) == Entered(1, 1, repeated=False)
        assert load_part(place, "part/x/0", lambda now: direct(now, {"key": "b"}, {"delay": -0.0})) == 2
        stage(place, run, 0, keyed("a"))
        assert abandon(place, run) == 1
        stage(place, run, 0, keyed("a"))
        assert clean(place, hours=0) == 1
        assert progress(place, JOB) == 0
        assert len(drain(session)) == 3
        with held_snapshot(place.url) as now:
            assert plan(place, Selection("messages"), snapshot=now)

    def test_without(self, database_url: str, role: str) -> None:
        place = self.place_of(database_url, role)
        with pytest.raises(LoadFailed, match=r"^permission denied for function stage_create$"):
            stage(place, new_run(), 0, keyed("a"))
        with pytest.raises(LoadFailed, match=r"^permission denied for function load_enter$"):
            enter(place, new_run(), [])
        with pytest.raises(LoadFailed, match=r"^permission denied for function load_claim$"):
            load_part(place, "part/x/0", lambda now: direct(now, {"key": "b"}))

    @pytest.mark.parametrize("table", ["message", "history", "load", 'pg_catalog"."pg_class', "stage_", "x'; --"])
    def test_only_staging_tables(self, place: Place, session: Session, table: str) -> None:
        """Nothing else is read, or dropped."""
        put(session, "acme")
        run = new_run()
        with pytest.raises(LoadFailed, match=r"^there is no staging table "):
            enter(place, run, [Part(0, 1, table)])
        assert len(drain(session)) == 1

    def test_only_those_of_the_run(self, place: Place, watching: psycopg.Connection[Any]) -> None:
        mine, theirs = new_run(), new_run()
        part = stage(place, theirs, 0, keyed("a"))
        with pytest.raises(LoadFailed, match=r"^there is no staging table "):
            enter(place, mine, [part])
        assert abandon(place, mine) == 0
        assert stages(watching) == 1

    def test_no_table_of_the_callers(
        self, engine: Engine, database_url: str, watching: psycopg.Connection[Any], role: str
    ) -> None:
        """Where a staging table is gone without its row, as after a restore: its functions would run as the owner."""
        with engine.begin() as connection:
            roles.grant(connection, role, "pipeline")
        watching.execute("INSERT INTO fairqueue.stage (name, run) VALUES ('stage_lost', %s)", [run := new_run()])
        with psycopg.connect(libpq(database_url), autocommit=True) as caller:
            caller.execute(f'SET ROLE "{role}"'.encode())
            caller.execute("CREATE TEMPORARY TABLE stage_lost (queue text, key text)")
            caller.execute("GRANT SELECT ON stage_lost TO PUBLIC")
            with pytest.raises(psycopg.errors.UndefinedTable, match=r'relation "fairqueue\.stage_lost" does not exist'):
                caller.execute("SELECT * FROM fairqueue.load_enter(%s, '{stage_lost}', '{0}')", [run])
            assert clean(Place(url=database_url), hours=0) == 1
            assert caller.execute("SELECT count(*) FROM stage_lost").fetchone() == (0,)

    @pytest.mark.parametrize("run", ["", "message", "x" * 32, "A" * 32, "0" * 31, "'; DROP TABLE message; --", None])
    def test_bad_runs(self, place: Place, run: Any) -> None:
        with pytest.raises(LoadFailed, match="run must be 32 hexadecimal digits and part not negative, not"):
            stage(place, run, 0, keyed("a"))

    def test_bad_parts(self, place: Place) -> None:
        with pytest.raises(LoadFailed, match=r"part not negative, not '.*' and -1"):
            stage(place, new_run(), -1, keyed("a"))


class TestSchemas:
    @pytest.mark.parametrize("name", ["My schema", 'qu"ote; -- ü'])
    def test_any_name(self, database_url: str, engine: Engine, watching: psycopg.Connection[Any], name: str) -> None:
        """And they go with it."""
        before = snapshot(watching)
        with engine.begin() as connection:
            schema.install(connection, name)
        place = Place(url=database_url, schema=name)
        run = new_run()
        part = stage(place, run, 0, keyed("a", "b"))
        assert enter(place, run, [part], name=JOB) == Entered(2, 2, repeated=False)
        assert load_part(place, "part/x/0", lambda now: direct(now, {"key": "c"})) == 1
        with Session(engine.execution_options(**fq.in_schema(name))) as session:
            assert len(list(session.scalars(fq.dequeue(limit=9)))) == 3
            session.rollback()
        for number in range(3):
            stage(place, new_run(), number % 2, keyed("a"))
        with engine.begin() as connection:
            schema.uninstall(connection, name)
        assert snapshot(watching) == before

    def test_tools_see_no_difference(
        self, tmp_path: Path, empty_database_url: str, raw: Raw, watching: psycopg.Connection[Any]
    ) -> None:
        """A load may run while somebody writes a migration."""
        host = Host(tmp_path, empty_database_url, settings='settings["include_schemas"] = True\n')
        database = observer(raw, empty_database_url)
        nothing = snapshot(database)
        host.autogenerate()
        host.upgrade()
        stage(Place(url=empty_database_url), new_run(), 0, keyed("a"))
        assert stages(database) == 1
        host.check()
        host.downgrade()
        assert [line for line in snapshot(database) if "alembic_version" not in line] == nothing


class TestPlaces:
    @pytest.mark.parametrize(
        "url",
        [
            "postgresql://app:hunter2@db/app",
            "postgresql+psycopg://:hunter2@db/app",
            "postgresql://app@db/app?password=hunter2",
            "postgresql://app@db/app?sslmode=require&sslpassword=hunter2",
        ],
    )
    def test_passwords(self, url: str) -> None:
        with pytest.raises(InvalidValue, match=r"^url must not hold a password") as refused:
            Place(url=url)
        assert "hunter2" not in str(refused.value)
        assert "hunter2" not in repr(refused.value)

    def test_nothing_is_shown(self) -> None:
        assert "secret" not in repr(Place(url="postgresql://secret@db/app"))
        with pytest.raises(InvalidValue, match=r"^the database URL can't be read") as refused:
            Place(url="postgresql://app:hunter2@db:port/app")
        assert refused.value.__cause__ is None
        assert refused.value.__context__ is None
        assert "hunter2" not in str(refused.value)

    def test_settings(self, database_url: str, tmp_path: Path) -> None:
        """Those of libpq go in the URL, also with characters that mean something there."""
        url = make_url(database_url).update_query_dict({"application_name": "a + b&c=%20"}).render_as_string(False)
        for place in (Place(url=url), Place(url=url, passfile=str(tmp_path / "a b"))):
            with place.connect() as connection:
                assert connection.info.parameter_status("application_name") == "a + b&c=%20"
            with place.arrow() as other, other.cursor() as cursor:
                cursor.execute("SELECT current_setting('application_name')")
                assert cursor.fetchone() == ("a + b&c=%20",)

    def test_from_the_environment(self, monkeypatch: pytest.MonkeyPatch, database_url: str) -> None:
        for name in ("FAIRQUEUE_DSN", "DATABASE_URL"):
            monkeypatch.delenv(name, raising=False)
        with pytest.raises(InvalidValue, match=r"^no database is named: set the option url, or FAIRQUEUE_DSN"):
            progress(Place(), JOB)
        monkeypatch.setenv("DATABASE_URL", database_url)
        assert progress(Place(), JOB) is None
