"""The stand-alone environment: installs, upgrades and removes a queue where no host application does it.

    FAIRQUEUE_DSN=postgresql://localhost/app alembic upgrade head
    FAIRQUEUE_DSN=postgresql://localhost/app alembic -x schema=jobs upgrade head

The version table is in the queue's own schema, so that it meets no other history in the database, several
queues don't share one, and `downgrade base` can take everything away. Applications that use Alembic need none of
this: see fairqueue.alembic.
"""

import os
from collections.abc import Collection
from logging.config import fileConfig

from alembic import context
from alembic.util import CommandError
from sqlalchemy import URL, Connection, create_engine, pool, text

from fairqueue._url import parsed
from fairqueue.errors import InvalidValue
from fairqueue.schema import DEFAULT_SCHEMA, check_schema_name, downgrade_sql, lock_sql, quote, upgrade_sql

schema = context.get_x_argument(as_dictionary=True).get("schema", DEFAULT_SCHEMA)
try:
    check_schema_name(schema)
except InvalidValue as error:
    raise CommandError(str(error)) from error
context.config.attributes["schema"] = schema  # for the revisions

if context.config.config_file_name is not None:
    fileConfig(context.config.config_file_name, disable_existing_loggers=False)


def database_url() -> URL:
    dsn = os.environ.get("FAIRQUEUE_DSN")
    if not dsn:
        raise CommandError("set FAIRQUEUE_DSN to the database, as in postgresql://user@localhost/app")
    try:
        return parsed(dsn)
    except InvalidValue as error:
        raise CommandError(f"FAIRQUEUE_DSN: {error}") from None


def execute(statements: list[str]) -> None:
    for statement in statements:
        context.execute(text(statement.replace(":", r"\:")))


def begin() -> None:
    """What comes before the first step: a lock against others who do the same, held until the commit, and the
    schema, which the version table is to be in."""
    execute(upgrade_sql(schema, 0, 0))


def clear(heads: Collection[str]) -> None:
    """With nothing installed, leave nothing behind: Alembic itself would keep its empty version table."""
    if not heads:
        execute([f"DROP TABLE IF EXISTS {quote(schema)}.alembic_version", *downgrade_sql(schema, 0, 0)])


def run_offline() -> None:
    context.configure(
        dialect_name="postgresql",
        dialect_opts={"paramstyle": "named"},  # leaves percent signs as they are
        literal_binds=True,
        version_table_schema=schema,
        on_version_apply=lambda heads, **_: clear(heads),
    )
    with context.begin_transaction():
        begin()
        context.run_migrations()


def run_online(connection: Connection) -> None:
    context.configure(connection=connection, version_table_schema=schema)
    with context.begin_transaction():
        if context.get_context().opts.get("dont_mutate"):  # as `alembic current`, for which it is enough to read
            context.run_migrations()
            return
        execute([lock_sql(schema)])
        # Whether it is safe in the schema that there is, a revision asks that installs.
        if connection.scalar(text("SELECT to_regnamespace(:name) IS NULL"), {"name": quote(schema)}):
            begin()
        context.run_migrations()
        clear(context.get_context().get_current_heads())


if context.is_offline_mode():
    run_offline()
else:
    # Read committed, so that what is read after waiting for the lock is what its last holder has left.
    engine = create_engine(database_url(), poolclass=pool.NullPool, isolation_level="READ COMMITTED")
    with engine.connect() as connection:
        run_online(connection)
