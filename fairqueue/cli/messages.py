"""``fairqueue message`` and ``fairqueue dead``: single messages, and those that used up their attempts."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from .base import Group
from .failures import Failed
from .output import as_json, duration, echo, echo_json, make_console, make_table, number, plain, printable
from .target import Target, check_known, now, pass_target

if TYPE_CHECKING:
    from sqlalchemy import FromClause, Row, RowMapping, Select
    from sqlalchemy.orm import Session

__all__ = ["dead", "message"]


class _Id(click.ParamType):  # type: ignore[type-arg, unused-ignore]
    name = "id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        # Python takes no number that is written with thousands of digits.
        if not (str(value).isdecimal() and len(str(value)) < 20 and 1 <= int(value) < 2**63):
            self.fail(f"the id of a message is a whole number from 1 on, not {value!r}", param, ctx)
        return int(value)


_ID = _Id()

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# Unix time in milliseconds of the year 2001: below it a dequeue_at is rather a priority than a time.
_OF_PRIORITIES = 10**12
# And of the year 9999, the last one that Python knows.
_FAR = 253_370_764_800_000


@click.group(cls=Group)
def message() -> None:
    """Single messages, by their ids."""


@message.command("show", short_help="All that is known of a message.")
@click.argument("id_", metavar="ID", type=_ID)
@as_json
@pass_target
def show(target: Target, id_: int, as_json: bool) -> None:
    """All that is known of message ID: ready, leased or dead, and how it ended.

    Exit code 1 if there is no such message. Rights: observer.
    """
    with target.session() as session:
        live, ends, at = _find(session, id_)
    if live is None and not ends:
        raise Failed(f"message {id_} not found: there never was one, or its history is over")
    if as_json:
        echo_json({"id": id_, "status": _status(live, at), "message": live, "history": ends})
        return
    echo(f"Message {id_}: {_status(live, at)}")
    for field, value in (live or {}).items():
        if value is not None and field != "id":
            echo(f"  {field:<16} {_since(value) if field == 'dequeue_at' else _words(value)}")
    for end in ends:
        echo(f"{end['outcome'].capitalize()} at {_words(end['finished_at'])}")
        for field, value in end.items():
            if value is not None and field not in {"message_id", "outcome", "finished_at"}:
                echo(f"  {field:<16} {_words(value)}")


def _find(session: Session, id_: int) -> tuple[dict[str, Any] | None, list[dict[str, Any]], Any]:
    """The message, live or dead; its ends; and the time. In one moment, lest it be missed on its way."""
    from sqlalchemy import select

    from fairqueue.models import DeadMessage, History, Message

    session.rollback()
    session.connection(execution_options={"isolation_level": "REPEATABLE READ"})
    at = now(session)
    found = (
        session.execute(_all_of(table).where(table.c.id == id_)).mappings().one_or_none()
        for table in (Message.__table__, DeadMessage.__table__)
    )
    live = next((_fields(row) for row in found if row is not None), None)
    history = History.__table__
    ends = session.execute(
        select(*(column for column in history.c if column.name != "xid"))
        .where(history.c.message_id == id_)
        .order_by(history.c.finished_at)
    )
    return live, [dict(row) for row in ends.mappings()], at


def _all_of(table: FromClause) -> Select[*tuple[Any, ...]]:
    """All columns, also of messages whose JSON can't be read."""
    from sqlalchemy import select

    from fairqueue.payloads import lazily

    return select(*(lazily(column).label(column.name) for column in table.c))


def _fields(row: RowMapping) -> dict[str, Any]:
    """The row; instead of JSON that can't be read, its text."""
    from fairqueue.payloads import Unread

    return {name: value.raw if isinstance(value, Unread) else value for name, value in row.items()}


def _status(live: dict[str, Any] | None, at: Any) -> str:
    if live is None:
        return "ended"
    if "died_at" in live:
        return "dead"
    if live["leased_until"] is not None:
        return "running"
    return "ready" if live["dequeue_at"] <= at.timestamp() * 1000 else "waiting"


def _since(dequeue_at: int) -> str:
    """From when on it may be served, where that is a time."""
    if _OF_PRIORITIES < dequeue_at < _FAR:
        return str(_EPOCH + timedelta(milliseconds=dequeue_at))
    return str(dequeue_at)


def _words(value: Any) -> str:
    match value:
        case str():
            return value
        case bytes() | memoryview():
            return f"{number(len(value))} bytes"
        case dict() | list() | bool():
            return json.dumps(value, default=plain, ensure_ascii=False)
    return str(value)


@message.command("cancel")
@click.argument("ids", metavar="ID...", type=_ID, nargs=-1, required=True)
@as_json
@pass_target
def cancel(target: Target, ids: Sequence[int], as_json: bool) -> None:
    """Take messages out of the queue for good, ready or leased.

    Who works on one learns it at its next heartbeat or at the end. Exit code 1 if one was not found. Rights: operator.
    """
    from fairqueue.consuming import cancel

    with target.session() as session:
        results = session.execute(cancel(list(ids))).all()
        session.commit()
    _report(results, as_json, missing="not found")


@click.group(cls=Group)
def dead() -> None:
    """Dead letters: messages that used up their attempts."""


_queue = click.option("--queue", help="Of this queue only.")
_channel = click.option("--channel", help="Of this channel of the queue only.")


@dead.command("list", short_help="The dead letters with their last errors.")
@_queue
@_channel
@click.option(
    "--limit", type=click.IntRange(1, 2**31 - 1), default=20, show_default=True, help="How many, the latest first."
)
@as_json
@pass_target
def list_(target: Target, queue: str | None, channel: str | None, limit: int, as_json: bool) -> None:
    """The dead letters with their last errors, the latest first; `message show ID` has all of one. Rights: observer."""
    from sqlalchemy import func, select

    from fairqueue.models import DeadMessage

    _check_channel(queue, channel)
    table = DeadMessage.__table__
    given = [table.c[name] == value for name, value in (("queue", queue), ("channel", channel)) if value is not None]
    with target.session() as session:
        at = now(session)
        count = session.scalars(select(func.count()).select_from(table).where(*given)).one()
        found = (
            session.execute(
                _all_of(table).where(*given).order_by(table.c.died_at.desc(), table.c.id.desc()).limit(limit)
            )
            .mappings()
            .all()
        )
        if queue is not None and not found:
            check_known(session, queue)
    if as_json:
        echo_json({"count": count, "dead": [_fields(row) for row in found]})
        return
    console = make_console()
    if not found:
        console.print("No dead letters.")
        return
    several = ["queue"] if queue is None else []
    letters = make_table(
        "id", *several, "channel", "leases", "died ago", "last error", right=("id", "leases", "died ago"),
        wide={"last error": 1}, longest=20,
    )  # fmt: skip
    for row in found:
        names = [printable(row[name]) for name in (*several, "channel")]
        ago = duration(at - row["died_at"])
        letters.add_row(str(row["id"]), *names, number(row["attempt"]), ago, printable(row["error"] or ""))
    console.print(letters)
    if count > len(found):
        console.print(f"… and {number(count - len(found))} more")


@dead.command("redrive", short_help="Put dead letters back into their channels.")
@click.argument("ids", metavar="[ID...]", type=_ID, nargs=-1)
@click.option("--queue", help="All of this queue.")
@click.option("--channel", help="All of this channel of the queue.")
@as_json
@pass_target
def redrive(target: Target, ids: Sequence[int], queue: str | None, channel: str | None, as_json: bool) -> None:
    """Put dead letters back into their channels, with all their attempts before them.

    Those of the IDs, or all of a queue or channel. Exit code 1 if one was not found, or stays dead because a live
    message of its channel has its key. Rights: operator.
    """
    from fairqueue.consuming import redrive

    _check_channel(queue, channel)
    if bool(ids) == (queue is not None):
        raise click.UsageError("which ones? give either their IDs, or --queue")
    statement = redrive(list(ids)) if queue is None else redrive(queue=queue, channel=channel)
    with target.session() as session:
        results = session.execute(statement).all()
        session.commit()
        if queue is not None and not results:
            check_known(session, queue)
    _report(results, as_json, missing="no dead letter")


def _check_channel(queue: str | None, channel: str | None) -> None:
    from fairqueue._checks import check_name

    if channel is not None and queue is None:
        raise click.UsageError("--channel is of a queue: give --queue too")
    for field, value in (("queue", queue), ("channel", channel)):
        if value is not None:
            check_name(field, value)


#: Of how many undone messages there is a line each.
_SHOWN = 20
_DONE = {"cancelled", "redriven"}
_DUPLICATE = "a live message of its channel has its key; it stays dead"


def _report(results: Sequence[Row[int, str]], as_json: bool, *, missing: str) -> None:
    """What became of each message; exit code 1 unless it was done to all."""
    meaning = {"not_found": missing, "duplicate": _DUPLICATE}
    undone = [row for row in results if row.result not in _DONE]
    if as_json:
        echo_json({"results": [{"id": row.id, "result": row.result} for row in results]})
    else:
        for result, count in Counter(row.result for row in results if row.result in _DONE).items():
            echo(f"{number(count)} {result}.")
        for row in undone[:_SHOWN]:
            echo(f"Message {row.id}: {meaning.get(row.result, row.result)}.")
        if len(undone) > _SHOWN:
            echo(f"… and {number(len(undone) - _SHOWN)} more; --json names all.")
        if not results:
            echo("No dead letters.")
    if undone:
        click.get_current_context().exit(1)
