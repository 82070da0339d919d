"""Roles of the database that may do one thing with the queue and nothing else.

::

    from fairqueue import roles

    with engine.begin() as connection:
        roles.grant(connection, "app_web", "producer")
        roles.grant(connection, "app_worker", "worker")

========== ==========================================================================================================
kind       may
========== ==========================================================================================================
producer   enqueue: by the ORM, ``enqueue`` and its siblings, INSERT, COPY; and ask how messages ended, any of them,
           and with which error. It can read no payload, nor anything else of ready and leased messages but their ids,
           times and attempts. So it reads a message's id after the flush and before the commit, which expires the
           message.
worker     dequeue, complete, fail, defer, cancel, heartbeat, wait for work. It has no right on any table.
observer   read all tables.
operator   read all tables, set policies, cancel and redrive messages, delete dead letters, check, repair, maintain,
           forget feeds, clean up after loads that died.
pipeline   enqueue in bulk through staging tables, clean up after loads that died, read all tables, follow the history:
           what Spark does.
========== ==========================================================================================================

A role may be granted several kinds. The functions run with the rights of the schema's owner and a fixed search_path.

Limitations: the role has to exist. A later version of the schema may have more functions: grant again after an upgrade.
And after a restore without rights (``--no-acl``), which leaves roles none, and lets PUBLIC call the queue's functions:
whoever may use the schema could do everything. The first grant takes that back.
A producer may enqueue in any queue and channel. Whoever may enqueue can learn, by a key that is refused, that a message
with this key is live.
"""

from __future__ import annotations

from typing import Literal, get_args

from sqlalchemy import Connection, text

from ._checks import UNSTORABLE
from .errors import FairqueueError, InvalidValue
from .schema import DEFAULT_SCHEMA, VERSION_FUNCTION, check_schema_name, chosen, close_sql, lock_sql, quote, run

__all__ = ["KINDS", "Kind", "grant", "grant_sql", "revoke", "revoke_sql"]

Kind = Literal["producer", "worker", "observer", "operator", "pipeline"]

#: The kinds of roles that there are.
KINDS: tuple[Kind, ...] = get_args(Kind)

_ENQUEUE = "INSERT (queue, channel, key, payload, body, dequeue_at, cost, max_attempts, backoff) ON TABLE {}.message"

# The rights of each kind: a privilege, and what it is on. {} is the schema.
# Defaults of columns and statements of ours call these functions as their caller. They are everybody's, unless the
# database was hardened: ALTER DEFAULT PRIVILEGES REVOKE EXECUTE ON FUNCTIONS FROM PUBLIC.
_BASIC = ("USAGE ON SCHEMA {}", "EXECUTE ON FUNCTION {0}.clock, {0}.unix_ms, {0}.schema_version, {0}.schema_serves")
_RIGHTS: dict[Kind, tuple[str, ...]] = {
    "producer": (
        _ENQUEUE,
        # What the ORM reads back from an INSERT.
        "SELECT (id, dequeue_at, attempt, forgiven, created_at) ON TABLE {}.message",
        "EXECUTE ON FUNCTION {0}.message_create, {0}.message_create_many, {0}.message_ending",
    ),
    "worker": (
        "EXECUTE ON FUNCTION {0}.message_dequeue, {0}.message_complete",
        "EXECUTE ON FUNCTION {0}.message_fail, {0}.message_defer, {0}.message_heartbeat",
        "EXECUTE ON FUNCTION {0}.message_cancel, {0}.queue_due, {0}.queue_listen, {0}.queue_unlisten",
    ),
    "observer": ("SELECT ON ALL TABLES IN SCHEMA {}",),
    "operator": (
        "SELECT ON ALL TABLES IN SCHEMA {}",
        "INSERT, UPDATE, DELETE ON TABLE {0}.channel, {0}.queue",
        "DELETE ON TABLE {}.dead_message",
        "EXECUTE ON FUNCTION {0}.channel_set, {0}.queue_set, {0}.queue_check, {0}.queue_repair",
        "EXECUTE ON FUNCTION {0}.message_cancel, {0}.message_redrive, {0}.message_ending, {0}.history_maintain",
        "EXECUTE ON FUNCTION {0}.feed_forget, {0}.stage_clean",
    ),
    "pipeline": (
        "SELECT ON ALL TABLES IN SCHEMA {}",
        _ENQUEUE,
        "EXECUTE ON FUNCTION {0}.stage_create, {0}.stage_drop, {0}.stage_clean",
        "EXECUTE ON FUNCTION {0}.load_enter, {0}.load_claim, {0}.load_count",
        "EXECUTE ON FUNCTION {0}.feed_horizon, {0}.feed_move, {0}.history_digest, {0}.history_release",
    ),
}

_OWNER = text(
    "SELECT pg_catalog.pg_get_userbyid(p.proowner) AS name, pg_catalog.pg_has_role(p.proowner, 'USAGE') AS is_ours"
    f" {VERSION_FUNCTION}"
)

# Who may create functions among those of the queue can have these call them, as their owner.
_MAY_CREATE = text(
    "SELECT has_schema_privilege(CAST(:role AS name), CAST(:schema AS text), 'CREATE')"
    " AND NOT pg_has_role(CAST(:role AS name), CAST(:owner AS name), 'MEMBER')"
)


def grant(connection: Connection, role: str, kind: Kind, *, schema: str | None = None) -> None:
    """Let ``role`` do what its kind does, from the end of the caller's transaction on; again changes nothing.

    :param role: its name; it has to exist.
    :param kind: one of :data:`KINDS`.
    :param schema: that of the connection (:func:`fairqueue.in_schema`) unless given.
    :raises InvalidValue: naming the parameter.
    :raises FairqueueError: unless the caller is the owner of the queue, or a member of that role: PostgreSQL answers a
        right that one has but may not give with no more than a warning. And where the role may create objects in the
        schema, by which it could do everything.
    """
    schema = chosen(connection, schema)
    statements = grant_sql(role, kind, schema=schema)
    owner = _owner(connection, schema)
    if owner and connection.scalar(_MAY_CREATE, {"role": role, "schema": schema, "owner": owner}):
        raise FairqueueError(
            f"role {role!r} may create objects in schema {schema!r}, which the queue's functions would run with their"
            f" owner's rights: REVOKE CREATE ON SCHEMA {quote(schema)} from it, and from PUBLIC, before"
        )
    for statement in statements:
        run(connection, statement)


def revoke(connection: Connection, role: str, *, schema: str | None = None) -> None:
    """Take all rights in the schema, of whatever kind, from ``role``.

    :param role: its name; it has to exist.
    :param schema: that of the connection (:func:`fairqueue.in_schema`) unless given.
    :raises InvalidValue: naming the parameter, and where the role is the owner: the functions run with its rights.
    :raises FairqueueError: unless the caller is the owner of the queue, or a member of that role.
    """
    schema = chosen(connection, schema)
    statements = revoke_sql(role, schema=schema)
    if role == _owner(connection, schema):
        raise InvalidValue(
            f"role {role!r} owns the queue in schema {schema!r}, whose functions run with its rights:"
            " without them nobody could enqueue or dequeue"
        )
    for statement in statements:
        run(connection, statement)


def grant_sql(role: str, kind: Kind, *, schema: str = DEFAULT_SCHEMA) -> list[str]:
    """The statements of :func:`grant`, with its parameters.

    :raises InvalidValue: naming the parameter.
    """
    if kind not in KINDS:
        raise InvalidValue(f"kind must be {', '.join(KINDS[:-1])} or {KINDS[-1]}, not {kind!r}")
    check_schema_name(schema)
    place, grantee = quote(schema), _role(role)
    rights = (*_BASIC, *_RIGHTS[kind])
    return [lock_sql(schema), close_sql(schema), *(f"GRANT {right.format(place)} TO {grantee}" for right in rights)]


def revoke_sql(role: str, *, schema: str = DEFAULT_SCHEMA) -> list[str]:
    """The statements of :func:`revoke`, with its parameters.

    :raises InvalidValue: naming the parameter.
    """
    check_schema_name(schema)
    place, grantee = quote(schema), _role(role)
    return [
        lock_sql(schema),
        f"REVOKE ALL ON ALL TABLES IN SCHEMA {place} FROM {grantee}",
        f"REVOKE ALL ON ALL FUNCTIONS IN SCHEMA {place} FROM {grantee}",
        f"REVOKE ALL ON SCHEMA {place} FROM {grantee}",
    ]


def _owner(connection: Connection, schema: str) -> str | None:
    """Whose queue it is, if there is one; an error if it isn't the caller's."""
    owner = connection.execute(_OWNER, {"schema": schema}).one_or_none()
    if owner is None:
        return None
    if not owner.is_ours:
        raise FairqueueError(
            f"only role {owner.name!r}, which owns the queue in schema {schema!r}, can give and take rights in it"
        )
    name: str = owner.name
    return name


def _role(role: object) -> str:
    """The name of a role, quoted."""
    if not isinstance(role, str) or UNSTORABLE.search(role) or not 1 <= len(role.encode()) <= 63:
        raise InvalidValue(f"role must be a name of 1 to 63 bytes, not {role!r}")
    # PostgreSQL takes the first for everybody, even in quotes.
    if role in {"public", "none"}:
        raise InvalidValue(
            f"role must be one that exists, not {role!r}: create a role, and grant that to whom you will"
        )
    return '"' + role.replace('"', '""') + '"'
