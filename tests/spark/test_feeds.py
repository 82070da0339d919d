"""Following the history, without Spark: every row once, whoever commits late, and whatever retention would drop."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from typing import Any

import psycopg
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine
from sqlalchemy.orm import Session

pytest.importorskip("adbc_driver_postgresql")

from fairqueue import schema
from fairqueue.errors import FairqueueError, InvalidValue
from fairqueue.spark.engine.feeds import Feed, Offset
from fairqueue.spark.engine.place import Place
from fairqueue.spark.engine.reading import Selection, arrow_schema
from fairqueue.testing._databases import Databases
from tests.acts import move_clock, stop_clock, wait_until
from tests.fixtures.connections import Raw
from tests.fixtures.postgres import libpq
from tests.observing import value
from tests.outcomes.days import at, finished, maintain, name, partitions, places
from tests.spark.histories import DAY, add, add_days, history, release, row

FIRST, SECOND = "history_2026_03_28", "history_2026_03_29"  # partitions of add_days(0, 1)
SELECTION = Selection("history", columns=("message_id", "xid"))


@pytest.fixture
def connection(raw: Raw, database_url: str) -> psycopg.Connection[Any]:
    return raw(database_url)


@pytest.fixture(scope="module")
def shared_url(databases: Databases, template: Any) -> Iterator[str]:
    """For tests with many examples."""
    with databases.create(template.template_dbname) as url:
        yield url


@pytest.fixture(scope="module")
def filled(databases: Databases, template: Any) -> Iterator[Place]:
    """Transactions of 1 to 5 messages in two partitions; some of them end three times in one."""
    with databases.create(template.template_dbname) as url:
        with psycopg.connect(libpq(url)) as connection:
            add_days(connection, 0)
            for number in range(1, 6):
                ids = [1000 - 100 * number + each for each in range(number)]
                add(connection, [row(id_, day) for id_ in ids for day in ((0, 1, 2) if id_ % 4 == 0 else (0,))])
                connection.commit()
        yield Place(url=url)


def rows_of(feed: Feed, start: Offset, end: Offset, **options: Any) -> list[int]:
    """The messages of a batch, read in parts."""
    found = []
    for part in feed.plan(start, end, **options):
        batches = feed.read(part, SELECTION, arrow_schema(SELECTION))
        ids = [number for batch in batches for number in batch.column("message_id").to_pylist()]
        assert len(ids) == part.rows
        found += ids
    return found


def batches_of(feed: Feed, start: Offset, **options: Any) -> Iterator[list[int]]:
    while (end := feed.next(start, **options)) != start:
        yield rows_of(feed, start, end)
        start = end


class TestLateWriters:
    # A step: which writer does what next, or the reader reads.
    STEPS = st.lists(
        st.sampled_from(["write 0", "write 1", "commit 0", "commit 1", "undo 1", "read"]), min_size=12, max_size=24
    )
    #: The first writer commits last.
    LATE = ("write 0", "write 1", "commit 1", "read", "commit 0", "read")

    def follow(self, url: str, steps: Sequence[str]) -> tuple[list[int], list[int], list[int]]:
        """What was committed, what the feed read, and what one by the largest id would have."""
        feed = Feed(Place(url=url))
        with ExitStack() as stack:
            writers = [stack.enter_context(closing(psycopg.connect(libpq(url)))) for _ in range(2)]
            watching = stack.enter_context(closing(psycopg.connect(libpq(url), autocommit=True)))
            watching.execute("TRUNCATE fairqueue.history")
            start, read, naive = feed.begin(latest=True), list[int](), list[int]()
            for number, step in enumerate([*steps, "commit 0", "commit 1", "read"], 1):
                act, _, who = step.partition(" ")
                if act == "write":
                    add(writers[int(who)], [row(number), row(1000 + number, 1)])
                elif act == "commit":
                    writers[int(who)].commit()
                elif act == "undo":
                    writers[int(who)].rollback()
                else:
                    end = feed.next(start)
                    read += rows_of(feed, start, end)
                    start = end
                    query = "SELECT message_id FROM fairqueue.history WHERE message_id > %s"
                    naive += [id_ for (id_,) in watching.execute(query, (max(naive, default=0),)).fetchall()]
            return [each["message_id"] for each in history(watching)], read, naive

    @settings(max_examples=12)
    @example(steps=LATE)
    @given(steps=STEPS)
    def test_nothing_is_missed_and_nothing_read_twice(self, shared_url: str, steps: Sequence[str]) -> None:
        committed, read, _ = self.follow(shared_url, steps)
        assert Counter(read) == Counter(committed)

    def test_where_a_feed_by_the_largest_id_loses_rows(self, shared_url: str) -> None:
        """Else the test above would show nothing."""
        committed, read, naive = self.follow(shared_url, self.LATE)
        assert sorted(committed) == sorted(read) == [1, 2, 1001, 1002]
        assert sorted(naive) == [2, 1002]


class TestBatches:
    @pytest.mark.parametrize(("max_rows", "parts"), [(1, None), (2, 6), (4, 1), (7, 3), (30, 2)])
    def test_of_any_size_are_all_rows(self, filled: Place, max_rows: int, parts: int | None) -> None:
        feed = Feed(filled)
        start, found = feed.begin(), list[int]()
        while (end := feed.next(start, max_rows=max_rows)) != start:
            planned = feed.plan(start, end, parts=parts)
            assert parts is None or len(planned) <= parts
            batch = rows_of(feed, start, end, parts=parts)
            # Three rows of a message in one transaction are not divided.
            assert 0 < len(batch) <= max_rows or len(set(batch)) == 1
            found += batch
            start = end
        with psycopg.connect(libpq(str(filled.url))) as connection:
            assert Counter(found) == Counter(each["message_id"] for each in history(connection))

    def test_are_the_same_whenever_they_are_read(self, place: Place, connection: psycopg.Connection[Any]) -> None:
        feed = Feed(place)
        add(connection, [row(number) for number in range(20)])
        connection.commit()
        start = feed.begin()
        end = feed.next(start, max_rows=12)
        first = sorted(rows_of(feed, start, end))
        assert len(first) == 12
        add(connection, [row(number) for number in range(20, 40)])
        connection.commit()
        assert sorted(rows_of(feed, start, end, parts=3)) == first
        assert Offset.of(end.document()) == end

    def test_end_at_the_horizon(
        self, place: Place, connection: psycopg.Connection[Any], raw: Raw, database_url: str
    ) -> None:
        """An open transaction that has written holds them up; a horizon of before leaves out what came later."""
        feed = Feed(place)
        start = feed.begin()
        other = raw(database_url)
        other.execute("SELECT pg_current_xact_id()")
        add(connection, [row(1)])
        connection.commit()
        assert feed.next(start) == start
        other.rollback()
        before = feed.horizon()
        add(connection, [row(2)])
        connection.commit()
        assert list(batches_of(feed, start, horizon=before)) == [[1]]
        assert list(batches_of(feed, start)) == [[1, 2]]

    def test_begin_after_a_horizon_of_before(self, place: Place, connection: psycopg.Connection[Any]) -> None:
        """There is nothing between them, which is no reason to believe that the server has been restored."""
        feed = Feed(place)
        before = feed.horizon()
        connection.execute("SELECT pg_current_xact_id()")
        connection.commit()
        for start in (feed.begin(), feed.begin(latest=True)):
            assert start > before
            assert feed.next(start, horizon=before) == start
        with pytest.raises(FairqueueError, match="ahead of the server"):
            feed.next(replace(start, xid=start.xid + 1000), horizon=before)

    def test_begin_with_all_there_is_or_with_nothing(self, place: Place, connection: psycopg.Connection[Any]) -> None:
        feed = Feed(place)
        assert list(batches_of(feed, feed.begin())) == []
        add(connection, [row(1)])
        connection.commit()
        earliest, latest = feed.begin(), feed.begin(latest=True)
        add(connection, [row(2)])
        connection.commit()
        assert list(batches_of(feed, earliest)) == [[1, 2]]
        assert list(batches_of(feed, latest)) == [[2]]

    def test_are_found_by_the_index(
        self, place: Place, connection: psycopg.Connection[Any], watching: psycopg.Connection[Any]
    ) -> None:
        """No partition is read as a whole, though each is small and nothing is known of them."""
        add_days(connection, 0, 1)
        for number in range(1, 200):
            add(connection, [row(number), row(number, 1)])
            connection.commit()
        connection.close()

        def counted(what: str) -> int:
            query = f"SELECT sum({what}) FROM pg_stat_user_tables WHERE relname IN ('{FIRST}', '{SECOND}')"
            return int(value(watching, query))

        wait_until(lambda: counted("n_tup_ins") == 398)
        before = {what: counted(what) for what in ("seq_scan", "idx_scan")}
        feed = Feed(place)
        assert sum(len(batch) for batch in batches_of(feed, feed.begin(), max_rows=50)) == 398
        wait_until(lambda: counted("idx_scan") >= before["idx_scan"] + 40)
        assert counted("seq_scan") == before["seq_scan"]


class TestRetention:
    """Whoever follows with a name finds all; who follows without learns what is gone."""

    @pytest.fixture
    def session(self, engine: Engine) -> Iterator[Session]:
        """It is day 0, and one message has ended on it, one on day 1, one on day 2."""
        stop_clock(engine, at(0))
        with Session(engine) as session:
            for day in range(3):
                move_clock(session, at(day))
                maintain(session)
                finished(session)
            yield session

    def test_keeps_what_a_feed_has_not_read(self, session: Session, place: Place) -> None:
        feed = Feed(place, "warehouse")
        start = feed.begin()
        feed.move(start)
        move_clock(session, at(60))
        assert maintain(session)
        assert set(partitions(session)) >= {name(0), name(1), name(2)}
        first = feed.next(start, max_rows=1)
        feed.move(first)
        assert maintain(session)
        assert not {name(0)} & set(partitions(session)), "it has read this day"
        assert set(partitions(session)) >= {name(1), name(2)}
        (batch,) = batches_of(feed, first)
        assert len(batch) == 2
        feed.move(feed.next(first))
        feed.move(first)  # never goes back
        assert maintain(session)
        assert places(session) == {}

    def test_is_noticed_without_a_name(self, session: Session, place: Place) -> None:
        feed, careless = Feed(place), Feed(place, fail_on_loss=False)
        start = feed.begin()
        first = feed.next(start, max_rows=1)
        planned = feed.plan(start, feed.next(start), parts=1)
        move_clock(session, at(31))  # which leaves days 1 and 2
        assert maintain(session)
        assert len(next(batches_of(feed, first))) == 2, "what was dropped, it has read"
        with pytest.raises(FairqueueError, match="history was dropped unread on 2031-04-30T12:00:00"):
            feed.next(start)
        with pytest.raises(FairqueueError, match="history was dropped unread"):
            feed.plan(start, first)
        with pytest.raises(FairqueueError, match="1 of 3 rows of history were dropped while they were to be read"):
            list(feed.read(planned[0], SELECTION, arrow_schema(SELECTION)))
        assert len(next(batches_of(careless, start))) == 2
        assert len(next(batches_of(feed, feed.begin()))) == 2, "who begins now has lost nothing"

    def test_of_rows_without_a_partition(
        self, session: Session, place: Place, connection: psycopg.Connection[Any]
    ) -> None:
        """Those in history_default are deleted when they have been read, and noticed, too."""
        connection.execute("DELETE FROM fairqueue.history")
        add(connection, [row(1)])
        connection.execute("SELECT fairqueue.feed_move('slow', pg_current_xact_id(), 1)")
        connection.commit()
        assert maintain(session)
        assert places(session) == {1: "history_default"}
        connection.execute("SELECT fairqueue.feed_forget('slow')")
        connection.commit()
        start = Feed(place).begin()
        assert maintain(session)
        assert places(session) == {}
        with pytest.raises(FairqueueError, match="history was dropped unread"):
            Feed(place).next(start)

    @pytest.mark.parametrize("days", [(0,), ()], ids=["partition", "default"])
    @pytest.mark.parametrize("how", ["by age", "released"])
    def test_is_noticed_by_who_has_read_a_part(
        self, place: Place, connection: psycopg.Connection[Any], days: Sequence[int], how: str
    ) -> None:
        """All but the last message of the last transaction."""
        add_days(connection, *days)
        for ids in ([9], [1, 2, 3]):
            add(connection, [row(id_) for id_ in ids])
            connection.commit()
        feed = Feed(place)
        start = feed.next(feed.begin(), max_rows=3)
        if how == "released":
            release(connection, DAY)
        else:
            connection.execute("SELECT fairqueue.history_drop('2026-03-29')")
        connection.commit()
        with pytest.raises(FairqueueError, match="history was dropped unread"):
            feed.next(start)

    def test_of_what_was_dropped_before(
        self, place: Place, connection: psycopg.Connection[Any], raw: Raw, database_url: str
    ) -> None:
        """A transaction that went on for days wrote before, and ended after, what was dropped before the feed began."""
        add_days(connection, 0, 2)
        late = raw(database_url)
        late.execute("SELECT pg_current_xact_id()")
        add(connection, [row(1, 0)])
        connection.commit()
        add(late, [row(2, 2)])
        late.commit()
        connection.execute("SELECT fairqueue.history_drop('2026-03-30')")
        connection.commit()
        feed = Feed(place)
        assert list(batches_of(feed, feed.begin())) == [[2]]


class TestOtherServers:
    def test_offsets_of_another_are_refused(self, place: Place) -> None:
        feed = Feed(place)
        start = feed.begin()
        with pytest.raises(FairqueueError, match="the offset is of the server, database and schema 7, these are"):
            feed.next(replace(start, server="7"))
        with pytest.raises(FairqueueError, match=r"the offset \(\d+\) is ahead of the server \(\d+\)"):
            feed.next(replace(start, xid=start.xid + 1000))

    def test_other_places_of_the_same_are_others(
        self, place: Place, databases: Databases, template: Any, engine: Engine
    ) -> None:
        """Another database, and another schema."""
        with engine.begin() as connection:
            schema.install(connection, schema="second")
        here = place.url
        with databases.create(template.template_dbname) as there:
            horizons = [Feed(each).horizon() for each in (place, Place(url=here, schema="second"), Place(url=there))]
        assert len({horizon.server for horizon in horizons}) == 3

    @pytest.mark.parametrize("latest", [False, True])
    def test_a_feed_that_has_read_on_begins_nowhere_behind(self, place: Place, raw: Raw, *, latest: bool) -> None:
        """What lies between is kept by nothing."""
        feed = Feed(place, "mine")
        connection = raw(str(place.url))
        add_days(connection, 0)
        add(connection, [row(1)])
        connection.commit()
        start = feed.begin()
        for _ in range(2):  # also of a stream that died before it had a first batch
            feed.register(start)
        feed.move(feed.next(start))
        if latest:
            feed.register(feed.begin(latest=True))
            return
        with pytest.raises(
            FairqueueError, match=r"feed 'mine' has read on from there, .*feed_forget\('mine'\)"
        ) as error:
            feed.register(feed.begin())
        # It works as it is told, on whatever search_path.
        connection.execute(str(error.value).partition("as an operator, ")[2].encode())
        connection.commit()
        feed.register(feed.begin())

    def test_a_feed_with_unread_rows_is_not_led_past_them(self, place: Place, raw: Raw) -> None:
        """They may be another reader's, for whom nothing would keep them."""
        feed = Feed(place, "mine")
        connection = raw(str(place.url))
        feed.register(feed.begin(latest=True))
        feed.register(feed.begin(latest=True))  # there is nothing between
        before = feed.cursor()
        add(connection, [row(1)])
        connection.commit()
        with pytest.raises(FairqueueError, match=r"feed 'mine' hasn't read all up to there, .*feed_forget\('mine'\)"):
            feed.register(feed.begin(latest=True))
        assert feed.cursor() == before
        feed.register(feed.begin())
        connection.execute("SELECT fairqueue.feed_forget('mine')")
        connection.commit()
        feed.register(feed.begin(latest=True))

    @pytest.mark.parametrize("document", [{}, {"xid": "a", "message_id": 1, "server": "1", "dropped": 0}, {"xid": 1}])
    def test_offsets_of_something_else(self, document: dict[str, Any]) -> None:
        with pytest.raises(InvalidValue, match="an offset has xid, message_id, server and dropped, not"):
            Offset.of(document)


def test_names(place: Place) -> None:
    with pytest.raises(InvalidValue, match="feed must be text, not 7"):
        Feed(Place(url="postgresql:///x"), 7)  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match="feed must have 1 to 255 characters, not 256"):
        Feed(place, "x" * 256)
