"""Installing, upgrading and checking the tables and functions in a database.

The SQL is kept twice, each form for its readers: ``sql/head/`` holds the objects as they are now, one a file, and
``sql/steps/`` the frozen numbered steps that lead from one version to the next. :func:`install` takes the first road,
migrations the second; both end in the same schema.

The files name no schema. They run with a ``search_path`` of just the schema that they are installed in, and each
function keeps that path (``SET search_path FROM CURRENT``), so one text serves any schema name and can be read, and
run with psql, as it stands::

    from sqlalchemy import create_engine
    from fairqueue import schema

    with create_engine("postgresql+psycopg://localhost/app").begin() as connection:
        schema.install(connection, "fairqueue")
        schema.verify(connection, "fairqueue")

Where no schema is given, it is that of the connection (:func:`fairqueue.in_schema`): ``fairqueue``, as a rule.

Everything here returns or runs plain statements; nothing needs Alembic.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, CursorResult, Dialect, text

from ._checks import UNSTORABLE
from ._scripts import as_owner, drop_schema, head, literal, oid, quote, step, within
from .errors import InvalidValue, SchemaVersionError

__all__ = [
    "DEFAULT_SCHEMA",
    "HEAD",
    "VERSION_FUNCTION",
    "check_apart",
    "check_dialect",
    "check_schema_name",
    "check_whole",
    "chosen",
    "close_sql",
    "downgrade_sql",
    "holds",
    "install",
    "install_sql",
    "installed_version",
    "literal",
    "lock",
    "lock_sql",
    "mismatch",
    "quote",
    "run",
    "schema_of",
    "uninstall",
    "upgrade_sql",
    "verify",
    "works_with",
]

#: The version that this library works with: the number of the last step.
HEAD = 1

DEFAULT_SCHEMA = "fairqueue"

_CHECK_SERVER = """\
DO $$ BEGIN
    IF current_setting('server_version_num')::integer < 140000 THEN
        RAISE feature_not_supported USING
            MESSAGE = 'fairqueue needs PostgreSQL 14 or later, this server is ' || current_setting('server_version');
    END IF;
END $$"""

#: The function that says which version there is, in the catalog; as p, in :schema.
VERSION_FUNCTION = (
    "FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace"
    " WHERE n.nspname = :schema AND p.proname = 'schema_version' AND p.pronargs = 0"
)

# In both ways: the second is of now, whatever the snapshot of a transaction that waited for another install; but it may
# go by what this connection remembers, until a statement has touched the catalog.
_IS_INSTALLED = text(f"SELECT EXISTS (SELECT {VERSION_FUNCTION}) OR to_regprocedure(:name) IS NOT NULL")

# Whether the first schema of the search path that there is, or would be, is this one. current_schema() tells nothing of
# a schema that isn't there yet: "$user" is the default one as soon as it is.
_IS_DEFAULT = text("""
    SELECT e.name = :schema
    FROM (
        SELECT p.nth, CASE trim(p.name, ' "') WHEN '$user' THEN current_user ELSE trim(p.name, ' "') END AS name
        FROM unnest(string_to_array(current_setting('search_path'), ',')) WITH ORDINALITY AS p (name, nth)) e
    WHERE e.name = :schema OR to_regnamespace(quote_ident(e.name)) IS NOT NULL
    ORDER BY e.nth LIMIT 1""")

# Where the functions of :schema look for tables, if that is another schema. A restored dump quotes in the server's way.
_OTHER_PATH = text("""
    SELECT substr(c.setting, 13)
    FROM pg_catalog.pg_proc p
    JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
    CROSS JOIN LATERAL unnest(p.proconfig) AS c (setting)
    WHERE n.nspname = :schema AND p.proname = 'message_dequeue' AND starts_with(c.setting, 'search_path=')
        AND NOT starts_with(c.setting, 'search_path=' || quote_ident(n.nspname) || ',')
        AND NOT starts_with(c.setting, 'search_path=' || :quoted || ',')
    LIMIT 1""")

# A setting that is gone with the transaction, so in AUTOCOMMIT with the statement.
_BEGIN = text("SELECT set_config('fairqueue.begun', 'yes', true)")
_HAS_BEGUN = text("SELECT current_setting('fairqueue.begun', true) IS NOT DISTINCT FROM 'yes'")

# Reserved in PostgreSQL, as SQLAlchemy doesn't know.
_UNQUOTED = {"collation", "concurrently", "lateral", "system_user", "tablesample"}

# A table of which the queue learns nothing: as a restore of the data alone leaves it that broke off.
_SILENT = text("""
    SELECT c.relname
    FROM pg_catalog.pg_trigger t
    JOIN pg_catalog.pg_class c ON c.oid = t.tgrelid
    JOIN pg_catalog.pg_proc p ON p.oid = t.tgfoid AND p.pronamespace = c.relnamespace
    JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = :schema AND t.tgenabled IN ('D', 'R')
    ORDER BY c.relname LIMIT 1""")


# The revision may be there, and not have been run.
_MIGRATE = "run the application's migrations (alembic upgrade head), or write a revision with"


def install_sql(schema: str = DEFAULT_SCHEMA) -> list[str]:
    """The statements that install the current version into ``schema``, creating it where there is none.

    :raises InvalidValue: if the name of the schema can't be one.
    """
    return [*_create_schema(schema), *within(schema, head(), in_use=False)]


def upgrade_sql(schema: str, start: int, end: int) -> list[str]:
    """The statements of the frozen steps that lead from one version to a later one.

    :param start: the version that is installed; 0: none.
    :param end: the version that is wanted, at most :data:`HEAD`.
    :raises SchemaVersionError: for versions that this library doesn't know.
    :raises InvalidValue: if the name of the schema can't be one.
    """
    _check_versions(start, end)
    scripts = [step(version, "up") for version in range(start + 1, end + 1)]
    first = [lock_sql(schema), as_owner(schema)] if start else _create_schema(schema)
    return [*first, *within(schema, scripts, in_use=start > 0)]


def downgrade_sql(schema: str, start: int, end: int) -> list[str]:
    """The statements of the frozen steps that lead from one version back to an earlier one.

    :param start: the version that is installed, at most :data:`HEAD`.
    :param end: the version that is wanted; 0: as it was before there was one.
    :raises SchemaVersionError: for versions that this library doesn't know.
    :raises InvalidValue: if the name of the schema can't be one.
    """
    _check_versions(end, start)
    scripts = [step(version, "down") for version in range(start, end, -1)]
    last = [] if end else [drop_schema(schema)]
    return [lock_sql(schema), *([as_owner(schema)] if end else []), *within(schema, scripts, in_use=True), *last]


def lock_sql(schema: str) -> str:
    """The statement that keeps other installs, upgrades and downgrades of ``schema`` out until the commit.

    The statements of the functions above begin with it; taken by itself, it lets a program look at what is installed
    before it decides.
    """
    return f"SELECT pg_advisory_xact_lock(hashtextextended({literal('fairqueue:' + schema)}, 0))"


def lock(connection: Connection, schema: str) -> None:
    """Keep other installs, upgrades and downgrades of ``schema`` out until the commit.

    :raises InvalidValue: where each statement is committed by itself, so that an error would leave half a queue.
    """
    run(connection, lock_sql(schema))
    connection.execute(_BEGIN)
    if not connection.scalar(_HAS_BEGUN):
        raise InvalidValue(
            "connection must be in a transaction, not in AUTOCOMMIT, in which an error would leave half a queue: take"
            " one of isolation level READ COMMITTED, and in a revision no autocommit_block()"
        )


def schema_of(options: Mapping[str, Any]) -> str:
    """The schema that statements with these execution options go to."""
    schema: str = (options.get("schema_translate_map") or {}).get(DEFAULT_SCHEMA, DEFAULT_SCHEMA)
    return schema


def chosen(connection: Connection, schema: str | None) -> str:
    """The schema that is given, or else the one that statements of this connection go to.

    :raises InvalidValue: for what is no connection: an engine, say.
    """
    if not isinstance(connection, Connection):
        raise InvalidValue(
            f"connection must be a Connection, not {type(connection).__name__}: take that of engine.begin() or"
            " session.connection(); in async programs, await connection.run_sync(...)"
        )
    return schema_of(connection.get_execution_options()) if schema is None else schema


def installed_version(connection: Connection, schema: str | None = None) -> int:
    """The version that is installed; 0 where there is none. Reads the catalog, takes no lock on our tables.

    :param schema: that of the connection (:func:`fairqueue.in_schema`) unless given.
    :raises InvalidValue: for what is no connection.
    """
    schema = chosen(connection, schema)
    name = f"{quote(schema)}.schema_version()"
    if not connection.scalar(_IS_INSTALLED, {"schema": schema, "name": name}):
        return 0
    return run(connection, f"SELECT {quote(schema)}.schema_version()").scalar() or 0


def check_whole(connection: Connection, schema: str) -> None:
    """Raise :class:`SchemaVersionError` if no version would do, as the schema was renamed or triggers are off."""
    path = connection.scalar(_OTHER_PATH, {"schema": schema, "quoted": quote(schema)})
    if path is not None:
        raise SchemaVersionError(
            f"schema {schema!r} was renamed, its functions still look for tables in {path.removesuffix(', pg_temp')}:"
            " rename it back, or tell them by what docs/operations.md says of renaming"
        )
    table = connection.scalar(_SILENT, {"schema": schema})
    if table is not None:
        name = f"{quote(schema)}.{quote(table)}"
        raise SchemaVersionError(
            f"triggers of {name} are switched off, so the queue learns nothing of what is written there:"
            f" ALTER TABLE {name} ENABLE TRIGGER USER; then `fairqueue check --repair` makes known what was"
        )


def works_with(connection: Connection, schema: str, found: int) -> bool:
    """Whether this library does with the installed version: its own, or a later one that still serves it.

    :raises SchemaVersionError: as :func:`check_whole`.
    """
    check_whole(connection, schema)
    if found <= HEAD:
        return found == HEAD
    oldest: int = run(connection, f"SELECT {quote(schema)}.schema_serves()").scalar_one()
    return oldest <= HEAD


def verify(connection: Connection, schema: str | None = None) -> None:
    """Make sure that this library works with the version that is installed. Call it once when a program starts.

    That is its own version, or a later one that says so: between a migration and the deployment old programs are
    started, too.

    :param schema: that of the connection (:func:`fairqueue.in_schema`) unless given.
    :raises SchemaVersionError: for any other version, for a schema that was renamed and one whose triggers are off. The
        message says what to run, or which revision to write.
    :raises InvalidValue: for what is no connection.
    """
    schema = chosen(connection, schema)
    found = installed_version(connection, schema)
    if not works_with(connection, schema, found):
        raise mismatch(schema, found)


def mismatch(schema: str, found: int) -> SchemaVersionError:
    """The error that says what to do about the version that was found, which is not this library's."""
    if found == 0:
        way_out = (
            f"{_MIGRATE} op.create_fairqueue({HEAD}), as autogenerate does with fq.attach(metadata) and the plugin"
            " fairqueue in env.py; is it in another schema? give the engine execution_options=fq.in_schema(...)"
        )
    elif found < HEAD:
        way_out = f"{_MIGRATE} op.upgrade_fairqueue({found}, {HEAD})"
    else:
        way_out = (
            f"upgrade the package, or write a revision with op.downgrade_fairqueue({found}, {HEAD}) while the newer"
            " package is installed"
        )
    return SchemaVersionError(f"{holds(schema, found)}: {way_out}")


def holds(schema: str, found: int, who: str = "library") -> str:
    """What is wrong with the version that was found."""
    if found == 0:
        return f"schema {schema!r} has no fairqueue"
    needs = "needs" if found < HEAD else "knows no more than"
    return f"schema {schema!r} holds version {found} of fairqueue, this {who} {needs} {HEAD}"


def install(connection: Connection, schema: str | None = None) -> None:
    """Install the current version within the caller's transaction; nothing if it is there already.

    Installs that run at the same time are safe. Afterwards the connection's ``search_path`` is what it was; but one
    that the transaction has said by SET LOCAL stays beyond its end.

    :param schema: that of the connection (:func:`fairqueue.in_schema`) unless given; it is created where there is none.
    :raises SchemaVersionError: as :func:`verify`, when another version is there.
    :raises InvalidValue: for what is no connection, or one to another database than PostgreSQL or in AUTOCOMMIT, and if
        the name of the schema can't be one.
    """
    schema = chosen(connection, schema)
    check_dialect(connection.dialect)
    lock(connection, schema)
    if installed_version(connection, schema) == 0:
        for statement in install_sql(schema):
            run(connection, statement)
    verify(connection, schema)


def uninstall(connection: Connection, schema: str | None = None) -> None:
    """Remove whatever version is installed, with its messages, within the caller's transaction.

    :param schema: that of the connection (:func:`fairqueue.in_schema`) unless given.
    :raises SchemaVersionError: for a version that this library doesn't know.
    :raises InvalidValue: as :func:`install`.
    """
    schema = chosen(connection, schema)
    check_dialect(connection.dialect)
    lock(connection, schema)
    for statement in downgrade_sql(schema, installed_version(connection, schema), 0):
        run(connection, statement)


def check_dialect(dialect: Dialect) -> None:
    """Raise :class:`InvalidValue` unless it is PostgreSQL's."""
    if dialect.name != "postgresql":
        raise InvalidValue(
            f"engine must be of PostgreSQL, not {dialect.name}:"
            " for tests and development, fairqueue.embedded starts one (pip install 'fairqueue[embedded]')"
        )


def check_apart(connection: Connection, schema: str) -> None:
    """Raise :class:`InvalidValue` if the application's tables, which name no schema, are or would be in this one."""
    if connection.scalar(_IS_DEFAULT, {"schema": schema}):
        another = "" if schema == "public" else ", or say ALTER ROLE ... SET search_path = public"
        raise InvalidValue(
            f"fairqueue is attached to schema {schema!r}, this connection's default one (by its search_path, or the"
            f" name of its role): your tables would be among those of the queue; give it a schema of its own{another}"
        )


def run(connection: Connection, statement: str) -> CursorResult[Any]:
    """Send a statement as it stands: neither a colon nor a percent sign in it is a parameter."""
    return connection.execute(text(statement.replace(":", r"\:")))


def close_sql(schema: str) -> str:
    """The statement that takes from PUBLIC what a restore without rights (``--no-acl``) has given it.

    Functions are everybody's unless somebody says otherwise, and the queue's run with the rights of their owner.
    """
    names = re.findall(r"^REVOKE EXECUTE ON FUNCTION (\w+) FROM PUBLIC;", "\n".join(head()), re.MULTILINE)
    return (
        "DO $fq$ DECLARE f regprocedure; BEGIN FOR f IN SELECT p.oid FROM pg_catalog.pg_proc p"
        f" WHERE p.pronamespace = {oid(schema)} AND p.proname = ANY ('{{{','.join(names)}}}')"
        " AND has_function_privilege('public', p.oid, 'EXECUTE')"
        " LOOP EXECUTE format('REVOKE EXECUTE ON FUNCTION %s FROM PUBLIC', f); END LOOP; END $fq$"
    )


def _check_versions(low: int, high: int) -> None:
    if not 0 <= low <= high <= HEAD:
        raise SchemaVersionError(
            f"this library knows the versions 0 to {HEAD} of its schema, and was asked to go between"
            f" {low} and {high}: install the release of fairqueue that the migration was written for"
        )


def _create_schema(schema: str) -> list[str]:
    check_schema_name(schema)
    # The comment marks a schema as ours to drop; one that was there before is left in place.
    # In one where everybody may create functions, everybody could have ours run them, with the rights of the owner.
    create = (
        f"DO $fq$ BEGIN IF {oid(schema)} IS NULL THEN CREATE SCHEMA {quote(schema)};"
        f" COMMENT ON SCHEMA {quote(schema)} IS 'fairqueue';"
        f" ELSIF has_schema_privilege('public', {oid(schema)}, 'CREATE') THEN RAISE insufficient_privilege USING"
        f" MESSAGE = {literal(f'everybody may create objects in schema {quote(schema)}, which the queue would run')},"
        " HINT = 'Choose a schema of its own for the queue, or revoke CREATE on this one from PUBLIC.';"
        " END IF; END $fq$"
    )
    return [_CHECK_SERVER, lock_sql(schema), create]


def check_schema_name(schema: object) -> None:
    """Raise :class:`InvalidValue` unless ``schema`` can be the name of a schema."""
    if (
        not isinstance(schema, str)
        or UNSTORABLE.search(schema)
        or "$fq$" in schema
        or not 1 <= len(schema.encode()) <= 63
    ):
        raise InvalidValue(f"schema must be a name of 1 to 63 bytes, not {schema!r}")
    if schema in _UNQUOTED or schema.endswith("\n"):
        raise InvalidValue(f"schema must be a name that SQLAlchemy quotes where PostgreSQL needs it, not {schema!r}")
