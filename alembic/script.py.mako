## For a new step of the schema: alembic revision --rev-id 0002 -m "what it brings"
"""${message}"""

from alembic import context

from fairqueue.alembic import downgrade_fairqueue, upgrade_fairqueue

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = None
depends_on = None


def upgrade() -> None:
    upgrade_fairqueue(${int(down_revision or 0)}, ${int(up_revision)}, schema=context.config.attributes["schema"])


def downgrade() -> None:
    downgrade_fairqueue(${int(up_revision)}, ${int(down_revision or 0)}, schema=context.config.attributes["schema"])
