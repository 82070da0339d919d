"""Bulk loads without Spark: each row is in the queue once, or none is, whatever happens on the way."""

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from sqlalchemy import create_engine, make_url

pytest.importorskip("adbc_driver_postgresql")

from fairqueue import embedded, schema
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
from tests.acts import wait_until
from tests.observing import value
from tests.spark.loads import JOB, Others, keyed, numbered, once_each, staged, stages


class TestAttempts:
    """What tasks and drivers do that die, are repeated, or are not heard of."""

    def test_a_part_that_is_staged_twice(self, place: Place, watching: psycopg.Connection[Any]) -> None:
        """The driver hears of one attempt; the other's table goes with the run."""
        run = new_run()
        stage(place, run, 0, keyed("a", "b"))
        parts = [stage(place, run, 0, keyed("a", "b")), stage(place, run, 1, keyed("c")), stage(place, run, 2, [])]
        assert stages(watching) == 3
        once_each(watching, [])
        assert enter(place, run, parts) == Entered(3, 3, repeated=False)
        once_each(watching, ["a", "b", "c"])
        assert stages(watching) == 0

    def test_a_task_that_fails_on_the_way(self, place: Place, watching: psycopg.Connection[Any]) -> None:
        """Its own error is told, and nothing is left."""

        def rows() -> Iterator[Any]:
            yield from keyed("a")
            raise InvalidValue("row 1 of the partition: cost must be more than 0")

        with pytest.raises(InvalidValue, match=r"^row 1 of the partition: cost"):
            stage(place, new_run(), 0, rows())
        with pytest.raises(InvalidValue, match=r"^row 1 of the partition: cost"):
            load_part(place, "part/x/0", lambda _: rows())
        assert stages(watching) == 0
        assert progress(place, "part/x/0") is None
        once_each(watching, [])

    def test_an_attempt_that_is_late(self, place: Place, watching: psycopg.Connection[Any]) -> None:
        """A task that nobody has stopped stages its part when the load has long been entered."""
        run = new_run()
        assert enter(place, run, [stage(place, run, 0, keyed("a"))]).entered == 1
        stage(place, run, 0, keyed("a"))
        once_each(watching, ["a"])
        assert clean(place, hours=1) == 0
        assert clean(place, hours=0) == 1
        assert stages(watching) == 0

    def test_a_driver_that_gives_up(self, place: Place, watching: psycopg.Connection[Any]) -> None:
        run, other = new_run(), new_run()
        part = stage(place, run, 0, keyed("a"))
        kept = stage(place, other, 0, keyed("b"))
        assert abandon(place, run) == 1
        assert abandon(place, run) == 0
        with pytest.raises(
            LoadFailed, match=f"there is no staging table '{part.table}' of run {run}: it has been dropped"
        ):
            enter(place, run, [part], name=JOB)
        # The name is as good as before.
        assert enter(place, other, [kept], name=JOB) == Entered(1, 1, repeated=False)
        once_each(watching, ["b"])

    def test_a_driver_that_dies_before_the_commit(
        self, place: Place, others: Others, watching: psycopg.Connection[Any]
    ) -> None:
        run = new_run()
        parts = [stage(place, run, 0, keyed("a"))]
        driver = others.entering(run, parts, JOB)
        watching.execute("SELECT pg_terminate_backend(%s)", (driver.info.backend_pid,))
        wait_until(
            lambda: (
                value(watching, "SELECT count(*) FROM pg_stat_activity WHERE pid = %s", driver.info.backend_pid) == 0
            )
        )
        once_each(watching, [])
        again = new_run()
        assert enter(place, again, [stage(place, again, 0, keyed("a"))], name=JOB) == Entered(1, 1, repeated=False)
        once_each(watching, ["a"])
        assert stages(watching) == clean(place, hours=0) == 1

    @pytest.mark.parametrize("emptied", ["all", "some"])
    def test_a_table_that_is_not_as_it_was(self, place: Place, watching: psycopg.Connection[Any], emptied: str) -> None:
        run = new_run()
        parts = [stage(place, run, 0, keyed("a")), stage(place, run, 1, keyed("b", "c"))]
        where = "" if emptied == "all" else "WHERE key = 'b'"
        watching.execute(f'DELETE FROM fairqueue."{parts[1].table}" {where}'.encode())
        left = 0 if emptied == "all" else 1
        told = f"staging table {parts[1].table} has {left} rows, not 2: the server has crashed meanwhile .*Load again"
        with pytest.raises(LoadFailed, match=told):
            enter(place, run, parts, name=JOB)
        once_each(watching, [])
        assert progress(place, JOB) is None

    def test_a_table_of_which_nobody_says_how_many_rows(self, place: Place, watching: psycopg.Connection[Any]) -> None:
        run = new_run()
        tables = [stage(place, run, number, keyed(str(number))).table for number in range(2)]
        with pytest.raises(psycopg.Error, match=r"has 1 rows, not null: the server has crashed meanwhile"):
            watching.execute("SELECT fairqueue.load_enter(%s, %s, ARRAY[1])", (run, tables))
        once_each(watching, [])

    def test_rows_that_no_table_holds(self, place: Place, watching: psycopg.Connection[Any]) -> None:
        """A task took its part for loaded, and the note of that is gone: nothing must pass for done."""
        run = new_run()
        parts = [Part(0, 2), stage(place, run, 1, keyed("a"))]
        with pytest.raises(LoadFailed, match=r"^3 rows were given, and only 1 are staged"):
            enter(place, run, parts, name=JOB)
        once_each(watching, [])
        assert progress(place, JOB) is None

    def test_many_tables(self, place: Place, watching: psycopg.Connection[Any]) -> None:
        """More than one transaction can lock."""
        watching.execute("SELECT fairqueue.stage_create(%s, i) FROM generate_series(1, 501) i", (new_run(),))
        assert value(watching, "SELECT fairqueue.stage_clean('1 hour')") == 0
        assert value(watching, "SELECT fairqueue.stage_clean('0')") == 500
        assert clean(place, hours=0) == 1
        assert stages(watching) == 0

    def test_cleaning_leaves_a_load_that_goes_on(self, place: Place, watching: psycopg.Connection[Any]) -> None:
        """Its first tables may be old."""
        going, gone = new_run(), new_run()
        for run, number in ((going, 1), (going, 2), (gone, 1)):
            stage(place, run, number, keyed(f"{run} {number}"))
        old = "UPDATE fairqueue.stage SET created_at = 'epoch' WHERE run = %s OR name LIKE 'stage\\_%%\\_1\\_%%'"
        watching.execute(old, (gone,))
        assert value(watching, "SELECT count(*) FROM fairqueue.stage WHERE created_at = 'epoch'") == 2
        assert clean(place, hours=24) == 1
        assert value(watching, "SELECT count(*) FROM fairqueue.stage WHERE run = %s", going) == 2

    def test_cleaning_beside_another(self, place: Place, others: Others, watching: psycopg.Connection[Any]) -> None:
        """What that one is at, is left to it."""
        watching.execute("INSERT INTO fairqueue.load (name, epoch, entered_at) VALUES ('run/a', 0, 'epoch')")
        watching.execute("SELECT fairqueue.stage_create(%s, 1)", (new_run(),))
        other = others.connect()
        other.execute("DELETE FROM fairqueue.load WHERE name = 'run/a'")
        assert value(watching, "SELECT fairqueue.stage_clean('0')") == 1
        other.rollback()
        assert value(watching, "SELECT count(*) FROM fairqueue.load") == 1
        assert value(watching, "SELECT fairqueue.stage_clean('0')") == 0
        assert value(watching, "SELECT count(*) FROM fairqueue.load") == 0

    def test_cleaning_waits_for_nobody(self, place: Place, others: Others, watching: psycopg.Connection[Any]) -> None:
        """Neither do drivers: somebody reads the tables that are to be dropped, as pg_dump does."""
        run = new_run()
        parts = [stage(place, run, number, keyed(str(number))) for number in range(2)]
        reader = others.connect()
        reader.execute(f'SELECT FROM fairqueue."{parts[0].table}"'.encode())
        patient = make_url(others.url).update_query_dict({"options": "-c lock_timeout=0"}).render_as_string(False)
        entered = others.pool.submit(enter, Place(url=patient), run, parts)
        assert entered.result(30) == Entered(2, 2, repeated=False)
        stage(place, new_run(), 0, keyed("x"))
        assert stages(watching) == 2
        assert clean(place, hours=0) == 1
        # What is left of it can't be entered again.
        for name in (run, ""):
            with pytest.raises(LoadFailed, match=r"^there is no staging table "):
                enter(place, name, parts[:1])
        reader.rollback()
        assert clean(place) == 1
        assert stages(watching) == 0
        once_each(watching, ["0", "1"])

    def test_cleaning_what_is_being_entered(
        self, place: Place, others: Others, watching: psycopg.Connection[Any]
    ) -> None:
        run = new_run()
        driver = others.entering(run, [stage(place, run, 0, keyed("a"))], JOB)
        assert clean(place, hours=0) == 0
        driver.commit()
        assert clean(place, hours=0) == 0
        once_each(watching, ["a"])

    def test_bad_ages(self, place: Place) -> None:
        with pytest.raises(psycopg.Error, match="older_than must not be negative, not -01:00:00"):
            clean(place, hours=-1)


class TestNames:
    """The same load again adds nothing."""

    def test_again(self, place: Place, watching: psycopg.Connection[Any]) -> None:
        for repeated in (False, True, True):
            run = new_run()
            parts = [stage(place, run, 0, keyed("a", "b")), stage(place, run, 1, keyed("b"))]
            assert enter(place, run, parts, name=JOB) == Entered(3, 2, repeated)
            assert stages(watching) == 0
        once_each(watching, ["a", "b"])
        assert progress(place, JOB) == 0
        run = new_run()
        assert enter(place, run, [Part(0, 2), Part(1, 1)], name=JOB) == Entered(3, 2, repeated=True)
        told = f"^{JOB} has been loaded before, with 3 rows, not 1; what was loaded then is in the queue, nothing was"
        with pytest.raises(LoadFailed, match=told):
            enter(place, run, [stage(place, run, 0, keyed("c"))], name=JOB)
        once_each(watching, ["a", "b"])
        assert stages(watching) == 0

    def test_with_nothing_in_it(self, place: Place) -> None:
        assert enter(place, new_run(), [], name=JOB) == Entered(0, 0, repeated=False)
        assert enter(place, new_run(), [Part(0, 0)], name=JOB) == Entered(0, 0, repeated=True)

    @pytest.mark.parametrize("fate", ["commit", "rollback"])
    def test_two_drivers(self, place: Place, others: Others, watching: psycopg.Connection[Any], fate: str) -> None:
        """The second waits, and goes by how the first ended."""
        runs = [new_run(), new_run()]
        parts = [[stage(place, run, 0, keyed("a", "b"))] for run in runs]
        first = others.entering(runs[0], parts[0], JOB)
        second = others.waiting(lambda: enter(place, runs[1], parts[1], name=JOB))
        getattr(first, fate)()
        assert second() == Entered(2, 2, repeated=fate == "commit")
        once_each(watching, ["a", "b"])
        assert stages(watching) == clean(place, hours=0) == (0 if fate == "commit" else 1)

    @pytest.mark.parametrize("key", ["a", None])
    def test_two_drivers_of_one_run(
        self, place: Place, others: Others, watching: psycopg.Connection[Any], key: str | None
    ) -> None:
        """Without a name, too: there is one set of tables, which are gone."""
        run = new_run()
        parts = [stage(place, run, 0, staged({"key": key}))]
        first = others.entering(run, parts)
        second = others.waiting(lambda: enter(place, run, parts))
        first.commit()
        with pytest.raises(LoadFailed):
            second()
        assert value(watching, "SELECT count(*) FROM fairqueue.message") == 1

    def test_the_batches_of_a_stream(self, place: Place, watching: psycopg.Connection[Any]) -> None:
        """Only a higher number is entered; which rows a lower one has doesn't matter."""
        query = "query/1f"
        found: list[bool] = []
        for epoch in (0, 0, 3, 3, 2, 0, 4):
            run = new_run()
            keys = [f"{epoch}-{number}" for number in range(epoch + 1)] if found else ["0-0"]
            found.append(enter(place, run, [stage(place, run, 0, keyed(*keys))], name=query, epoch=epoch).repeated)
            assert stages(watching) == 0
        assert found == [False, True, False, True, True, True, False]
        once_each(watching, ["0-0", *(f"3-{n}" for n in range(4)), *(f"4-{n}" for n in range(5))])
        assert progress(place, query) == 4
        # Another number of rows under an old number: a source that isn't read the same way twice.
        assert enter(place, new_run(), [Part(0, 99)], name=query, epoch=0).repeated

    def test_another_query_is_another(self, place: Place) -> None:
        for name in ("query/1", "query/2", "job/1", 'job/"1"', "job/'; --", "job/ü\U0001f600"):
            run = new_run()
            assert not enter(place, run, [stage(place, run, 0, numbered([1]))], name=name, epoch=None).repeated
            assert progress(place, name) == 0


@pytest.mark.slow
def test_a_server_that_crashes() -> None:
    """Between staging and entering: unlogged tables are empty then, which passes for nothing."""
    with embedded.ephemeral() as server:
        engine = create_engine(server.url())
        with engine.begin() as connection:
            schema.install(connection)
        engine.dispose()
        place = Place(url=server.url())
        run = new_run()
        enter(place, run, [stage(place, run, 0, keyed("before"))], name="job/before")
        lost = new_run()
        parts = [stage(place, lost, number, keyed(str(number))) for number in range(2)]
        server.restart("immediate")
        with pytest.raises(LoadFailed, match="has 0 rows, not 1: the server has crashed meanwhile"):
            enter(place, lost, parts, name=JOB)
        with psycopg.connect(server.url().replace("+psycopg", ""), autocommit=True) as watching:
            once_each(watching, ["before"])
            assert abandon(place, lost) == 2
            run = new_run()
            parts = [stage(place, run, number, keyed(str(number))) for number in range(2)]
            assert enter(place, run, parts, name=JOB) == Entered(2, 2, repeated=False)
            once_each(watching, ["before", "0", "1"])
            server.restart("immediate")
        # What was committed is there, and known to be.
        assert enter(place, new_run(), [Part(0, 1), Part(1, 1)], name=JOB) == Entered(2, 2, repeated=True)
        with psycopg.connect(server.url().replace("+psycopg", ""), autocommit=True) as watching:
            once_each(watching, ["before", "0", "1"])
            assert stages(watching) == 0
