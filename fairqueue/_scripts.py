"""SQL as text: names and literals in it, and the files of the package. See :mod:`fairqueue.schema`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from sqlalchemy.dialects.postgresql import dialect as postgresql_dialect

__all__ = ["STEPS", "as_owner", "drop_schema", "head", "literal", "oid", "quote", "split", "step", "within"]

_SQL = files("fairqueue") / "sql"
STEPS = {1: "0001_initial"}

# What a semicolon may hide in: comments, strings, quoted names and dollar-quoted bodies.
_TOKEN = re.compile(r"--[^\n]*|/\*.*?\*/|'(?:[^']|'')*'|\"(?:[^\"]|\"\")*\"|(\$\w*\$).*?\1|;", re.DOTALL)


def quote(name: str) -> str:
    """``name`` as an SQL identifier, quoted where it has to be."""
    # In this paramstyle the quoting leaves a percent sign as it is.
    dialect: Any = postgresql_dialect
    quoted: str = dialect(paramstyle="named").identifier_preparer.quote(name)
    return quoted


def literal(value: str) -> str:
    """``value`` as an SQL string."""
    return "'" + value.replace("'", "''") + "'"


def head() -> list[str]:
    """The scripts of all objects as they are now, in the order in which they depend on one another."""
    folders = sorted((_SQL / "head").iterdir(), key=lambda folder: folder.name)
    return [
        file.read_text("utf-8") for folder in folders for file in sorted(folder.iterdir(), key=lambda file: file.name)
    ]


def step(version: int, direction: str) -> str:
    """The script of a frozen step, ``up`` or ``down``."""
    return (_SQL / "steps" / f"{STEPS[version]}.{direction}.sql").read_text("utf-8")


def split(script: str) -> Iterator[str]:
    """The statements of a script, each with the comments before it; asyncpg takes only one at a time."""
    start = 0
    for token in _TOKEN.finditer(script):
        if token.group() == ";":
            yield script[start : token.start()].strip()
            start = token.end()


def within(schema: str, scripts: list[str], *, in_use: bool) -> Iterator[str]:
    """Run scripts with the search_path set to ``schema``, and the caller's put back afterwards.

    With what they make, others may do nothing that they don't say: not what the owner's ALTER DEFAULT PRIVILEGES would
    let them, which are meant for the application's tables.
    """
    path = literal(f"{quote(schema)}, pg_temp")
    # What functions of a queue that is in use may be making just now they see to themselves.
    theirs = " AND o.name !~ '^TABLE (stage_[0-9a-f]{32}|history_[0-9]{4})_'" if in_use else ""
    yield "SELECT set_config('fairqueue.search_path', current_setting('search_path'), false)"
    yield f"SELECT set_config('search_path', {path}, false)"
    yield (
        "SELECT set_config('fairqueue.objects', coalesce(string_agg(o.oid::text, ','), ''), false)"
        f" FROM {_objects(schema)} o"
    )
    for script in scripts:
        yield from split(script)
    yield (
        "DO $fq$ DECLARE taken text; BEGIN FOR taken IN SELECT format('REVOKE ALL ON %s FROM %s', o.name,"
        " CASE WHEN a.grantee = 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END)"
        f" FROM {_objects(schema)} o CROSS JOIN LATERAL aclexplode(o.acl) a"
        " WHERE a.grantee <> o.owner AND NOT (o.is_function AND a.grantee = 0)"
        f"{theirs}"
        " AND o.oid::text <> ALL (string_to_array(current_setting('fairqueue.objects'), ','))"
        " LOOP EXECUTE taken; END LOOP; END $fq$"
    )
    yield "SELECT set_config('search_path', current_setting('fairqueue.search_path'), false)"


def _objects(schema: str) -> str:
    """What is in the schema, and who may do what with it."""
    return (
        "(SELECT c.oid, CASE c.relkind WHEN 'S' THEN 'SEQUENCE ' ELSE 'TABLE ' END || c.oid::regclass AS name,"
        " c.relowner AS owner, c.relacl AS acl, false AS is_function FROM pg_catalog.pg_class c"
        f" WHERE c.relnamespace = {oid(schema)} AND c.relkind IN ('r', 'p', 'S')"
        " UNION ALL SELECT p.oid, 'FUNCTION ' || p.oid::regprocedure, p.proowner, p.proacl, true"
        f" FROM pg_catalog.pg_proc p WHERE p.pronamespace = {oid(schema)})"
    )


def oid(schema: str) -> str:
    """The schema in the catalog, as an expression."""
    return f"to_regnamespace({literal(quote(schema))})"


def as_owner(schema: str) -> str:
    """The statement that refuses another role: the queue's functions, which run as their owner, couldn't use what it
    makes.
    """
    return (
        f"DO $fq$ DECLARE owner CONSTANT name := (SELECT pg_get_userbyid(p.proowner) FROM pg_catalog.pg_proc p"
        f" WHERE p.pronamespace = {oid(schema)} AND p.proname = 'schema_version' AND p.pronargs = 0);"
        " BEGIN IF owner <> current_user THEN RAISE insufficient_privilege USING"
        f" MESSAGE = format('the queue in schema %s belongs to role %I, not to %I', {literal(quote(schema))}, owner,"
        " current_user), HINT = format('Migrate as that role, or SET ROLE %I before.', owner); END IF; END $fq$"
    )


def drop_schema(schema: str) -> str:
    """The statement that drops the schema if it was made for the queue, and is empty."""
    return (
        f"DO $fq$ BEGIN IF obj_description({oid(schema)}, 'pg_namespace') = 'fairqueue'"
        f" THEN DROP SCHEMA {quote(schema)}; END IF;"
        " EXCEPTION WHEN dependent_objects_still_exist THEN NULL; END $fq$"
    )
