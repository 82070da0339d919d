"""What is in a database, as text that can be compared: pg_dump where there is one, the catalog always."""

import re
import subprocess
from pathlib import Path

import psycopg
from sqlalchemy import make_url

from fairqueue import embedded
from fairqueue.embedded._programs import find_binaries

# Each row is one object in a schema of a user: its kind, and everything about it that SQL can say.
_OBJECTS = """
WITH spaces AS (
    SELECT oid, nspname, nspacl FROM pg_namespace WHERE nspname !~ '^pg_' AND nspname <> 'information_schema'
)
SELECT format('schema %I %s %s', nspname, nspacl, obj_description(oid, 'pg_namespace')) FROM spaces
UNION ALL
SELECT format('relation %s %s %s %s %s %s %s', c.oid::regclass, c.relkind, c.reloptions, c.relacl, c.relpersistence,
    pg_get_partkeydef(c.oid), obj_description(c.oid, 'pg_class'))
FROM pg_class c JOIN spaces n ON n.oid = c.relnamespace
UNION ALL
SELECT format('column %s %s %I %s %s %s %s %s', c.oid::regclass, a.attnum, a.attname,
    format_type(a.atttypid, a.atttypmod), a.attcollation::regcollation, a.attnotnull, a.attidentity,
    pg_get_expr(d.adbin, d.adrelid))
FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid JOIN spaces n ON n.oid = c.relnamespace
LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
WHERE NOT a.attisdropped AND a.attnum > 0
UNION ALL
SELECT format('index %s', pg_get_indexdef(i.indexrelid))
FROM pg_index i JOIN pg_class c ON c.oid = i.indrelid JOIN spaces n ON n.oid = c.relnamespace
UNION ALL
SELECT format('constraint %s %I %s', k.conrelid::regclass, k.conname, pg_get_constraintdef(k.oid))
FROM pg_constraint k JOIN spaces n ON n.oid = k.connamespace
UNION ALL
SELECT format('trigger %s', pg_get_triggerdef(t.oid))
FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid JOIN spaces n ON n.oid = c.relnamespace WHERE NOT t.tgisinternal
UNION ALL
SELECT format('function %s %s', pg_get_functiondef(p.oid), p.proacl)
FROM pg_proc p JOIN spaces n ON n.oid = p.pronamespace WHERE p.prokind IN ('f', 'p')
UNION ALL
SELECT format('type %s %s', t.oid::regtype, t.typtype) FROM pg_type t JOIN spaces n ON n.oid = t.typnamespace
ORDER BY 1
"""


def snapshot(connection: psycopg.Connection) -> list[str]:
    """Everything that users have in a database, one object a line; equal lists mean equal databases."""
    return [text for (text,) in connection.execute(_OBJECTS)]


def dump(database_url: str) -> str | None:
    """What pg_dump says of the schema; None without a pg_dump of the server's version."""
    program = find_binaries() / "pg_dump"
    if not program.exists():
        return None
    url = make_url(database_url)
    command = [str(program), "--schema-only", "--dbname", url.set(drivername="postgresql").render_as_string(False)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if "server version mismatch" in result.stderr:
        return None
    assert result.returncode == 0, result.stderr
    # Newer releases guard the script with a random word.
    return re.sub(r"^\\(un)?restrict .*\n", "", result.stdout, flags=re.MULTILINE)


def sql_files(folder: str = "head") -> list[Path]:
    """The SQL files of the package."""
    return sorted((Path(embedded.__file__).parents[1] / "sql" / folder).rglob("*.sql"))
