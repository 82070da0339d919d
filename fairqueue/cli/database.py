"""``fairqueue migrate``, ``check`` and ``grant``: the schema, its soundness, and who may do what with it."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, cast

import click

from .base import Command, OwnersCommand
from .failures import Failed
from .output import as_json, echo, echo_json, number
from .target import Target, pass_target

if TYPE_CHECKING:
    from sqlalchemy.orm import Session

__all__ = ["check", "grant", "migrate"]


@click.command(cls=OwnersCommand, short_help="Install or upgrade fairqueue in the database.")
@click.option("--sql", is_flag=True, help="Print the statements that would run, and run none of them.")
@pass_target
def migrate(target: Target, sql: bool) -> None:
    """Install fairqueue in the database, or upgrade it, with its messages.

    In one transaction, with others that try the same kept out. Where it is up to date already, nothing happens. An
    application that uses Alembic has the queue in its own migrations: use those. Rights: those of the schema's owner,
    or to create a schema.
    """
    from fairqueue.schema import HEAD, lock_sql, run, upgrade_sql

    if sql and target.place is None:
        _print_sql(upgrade_sql(target.schema, 0, HEAD))
        return
    with target.engine() as engine, engine.begin() as connection:
        if not sql:
            run(connection, lock_sql(target.schema))
        found = target.version(connection)
        statements = upgrade_sql(target.schema, found, HEAD) if found < HEAD else []
        if not sql:
            for statement in statements:
                run(connection, statement)
    if sql:
        _print_sql(statements)
    elif found == HEAD:
        echo(f"Schema {target.schema} is at version {HEAD} already.")
    elif found:
        echo(f"Schema {target.schema} is upgraded from version {found} to {HEAD}.")
    else:
        echo(f"Schema {target.schema} is installed, version {HEAD}.")


def _print_sql(statements: list[str]) -> None:
    if statements:
        click.echo(";\n\n".join(["BEGIN", *statements, "COMMIT;"]))


@click.command(cls=Command, short_help="Compare the scheduler with the messages.")
@click.argument("queue", required=False)
@click.option("--repair", is_flag=True, help="Derive what is wrong anew, one queue after the other.")
@as_json
@pass_target
@click.pass_context
def check(context: click.Context, target: Target, queue: str | None, repair: bool, as_json: bool) -> None:
    """Compare what the scheduler keeps with the messages and policies that it was derived from.

    Of all queues, or of QUEUE; on a live queue as well. Exit code 1 if there are differences; with --repair, if there
    are any left afterwards. Rights: operator.
    """
    from fairqueue.checking import check

    with target.session() as session:
        found = left = check(session, queue)
        if queue is not None and not found and not _is_known(session, queue):
            raise Failed(f"queue {queue!r} has no message and no policy, and nobody has dequeued from it")
        session.commit()
        if repair and found:
            for name in sorted({difference.queue for difference in found}):
                check(session, name, repair=True)
                session.commit()  # at once: until then nobody can dequeue from it
            left = check(session, queue)
            session.commit()
    if as_json:
        echo_json({"differences": [asdict(each) for each in found], "left": [asdict(each) for each in left]})
    else:
        for each in found:
            place = f"queue {each.queue}" + (f", channel {each.channel}" if each.channel is not None else "")
            echo(f"{place}: {each.problem}: expected {each.expected}, found {each.found}")
        echo(_verdict(len(found), len(left), repair))
    if left:
        context.exit(1)


def _is_known(session: Session, queue: str) -> bool:
    from sqlalchemy import exists, or_, select

    from fairqueue.models import Channel, Message, Queue, rotation

    places = (rotation.c.queue, Message.queue, Queue.name, Channel.queue)
    known: bool = session.scalars(select(or_(*(exists().where(place == queue) for place in places)))).one()
    return known


def _verdict(found: int, left: int, repair: bool) -> str:
    if not found:
        return "All is well."
    count = f"{number(found)} difference{'s' if found > 1 else ''}"
    if not repair:
        return f"{count}; run it again with --repair."
    return f"{count} repaired." if not left else f"{count}, {number(left)} left after the repair."


@click.command(cls=OwnersCommand, short_help="Let a role of the database do one thing.")
@click.argument("role")
@click.argument("kind", required=False)
@click.option("--revoke", is_flag=True, help="Take all rights in the schema from the role, of whatever kind.")
@pass_target
def grant(target: Target, role: str, kind: str | None, revoke: bool) -> None:
    """Let ROLE of the database do what its KIND does. A role may be granted several.

    \b
    producer  enqueue, and ask how messages ended
    worker    dequeue, end leases, cancel any message
    observer  read all tables
    operator  read all tables, set policies, cancel, redrive, check, repair
    pipeline  enqueue in bulk, read all tables, follow the history, as Spark does

    Grant again after an upgrade. Rights: those of the schema's owner.
    """
    from fairqueue import roles

    if (kind is None) != revoke:
        raise click.UsageError("--revoke takes all rights, leave KIND out" if revoke else "give the KIND of the role")
    with target.session() as session:
        connection = session.connection()
        if kind is None:
            roles.revoke(connection, role, schema=target.schema)
        else:
            kind = cast("roles.Kind", kind)  # grant() says what kinds there are
            roles.grant(connection, role, kind, schema=target.schema)
        session.commit()
    echo(
        f"Role {role} has no rights in schema {target.schema} any more."
        if kind is None
        else f"Role {role} is {kind} in schema {target.schema}."
    )
