"""Version 1 of the queue."""

from alembic import context

from fairqueue.alembic import create_fairqueue, drop_fairqueue

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    create_fairqueue(1, schema=context.config.attributes["schema"])


def downgrade() -> None:
    drop_fairqueue(1, schema=context.config.attributes["schema"])
