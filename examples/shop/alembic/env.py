"""The shop's own migrations; the queue comes with them.

DATABASE_URL=postgresql+psycopg://localhost/shop alembic -c examples/shop/alembic.ini upgrade head
"""

from alembic import context
from sqlalchemy import create_engine, pool

from examples.shop.models import Base, database_url

# Named in each call of context.configure, as Alembic asks for.
PLUGINS = ["alembic.autogenerate.*", "fairqueue"]

if context.is_offline_mode():
    context.configure(
        url=database_url(), target_metadata=Base.metadata, autogenerate_plugins=PLUGINS, literal_binds=True
    )
    with context.begin_transaction():
        context.run_migrations()
else:
    with create_engine(database_url(), poolclass=pool.NullPool).connect() as connection:
        context.configure(connection=connection, target_metadata=Base.metadata, autogenerate_plugins=PLUGINS)
        with context.begin_transaction():
            context.run_migrations()
