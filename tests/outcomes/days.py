"""Days of history: a time that stands still, and the partitions about it."""

from datetime import UTC, date, datetime, timedelta
from typing import Any

from sqlalchemy import text
from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import put, sql

DAY = 86_400_000
NOON = 12 * 3_600_000
# Partitions of an installation are those of the day on which the tests run; these days are others.
DAY_0 = date(2031, 3, 30)


def at(day: int, milliseconds: int = NOON) -> int:
    """A time of a day, counted from DAY_0, in Unix milliseconds."""
    return (DAY_0 - date(1970, 1, 1)).days * DAY + day * DAY + milliseconds


def moment(milliseconds: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=milliseconds)


def name(day: int) -> str:
    return f"history_{DAY_0 + timedelta(days=day):%Y_%m_%d}"


def partitions(session: Session) -> list[str]:
    """Those of DAY_0 and about."""
    query = "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = 'fairqueue.history'::regclass"
    found = [each.removeprefix("fairqueue.") for each in session.scalars(text(query))]
    session.commit()
    return sorted(each for each in found if "history_2030" < each < "history_2033")


def places(session: Session) -> dict[int, str]:
    """In which partition the outcome of each message lies."""
    rows = session.execute(text("SELECT message_id, tableoid::regclass::text FROM fairqueue.history")).all()
    session.commit()
    return {id_: place.removeprefix("fairqueue.") for id_, place in rows}


def maintain(session: Session) -> bool:
    done: bool = session.execute(text("SELECT fairqueue.history_maintain()")).scalar_one()
    session.commit()
    return done


def finished(session: Session, count: int = 1, **fields: Any) -> list[int]:
    """Messages that were completed just now. No dequeue takes part, which would maintain the partitions."""
    ids = put(session, "acme", count, **fields)
    sql(session, "UPDATE fairqueue.message SET attempt = 1, leased_until = fairqueue.clock()")
    assert {row.result for row in session.execute(fq.complete([(id_, 1) for id_ in ids]))} == {"completed"}
    session.commit()
    return ids
