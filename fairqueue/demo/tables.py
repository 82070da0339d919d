"""The demo as an application with tables of its own, and the migration that installs them together with fairqueue.

Both go into schemas with a name that nobody else has, so that a demo on a server in use touches nothing there. An
ordinary application has the migration among its Alembic revisions; here it is run through Alembic's API, because the
schemas' names are known only now.
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from alembic import op
from alembic.migration import MigrationContext
from alembic.operations import Operations
from sqlalchemy import BigInteger, DateTime, Engine, Identity, MetaData, text
from sqlalchemy.dialects.postgresql import JSONB
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.schema import CreateSchema, DropSchema

from fairqueue.alembic import create_fairqueue, drop_fairqueue
from fairqueue.cli.signals import ignored
from fairqueue.cli.target import make_engine
from fairqueue.errors import FairqueueError
from fairqueue.schema import DEFAULT_SCHEMA, HEAD

_PLACEHOLDER = "fairqueue_demo"
_NOW = text("clock_timestamp()")


class Base(DeclarativeBase):
    metadata = MetaData(schema=_PLACEHOLDER)
    type_annotation_map = {datetime: DateTime(timezone=True), int: BigInteger}  # noqa: RUF012


class Upload(Base):
    """A file that a tenant uploaded; written in the transaction that enqueues it."""

    __tablename__ = "upload"

    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    run: Mapped[str]
    tenant: Mapped[str]
    path: Mapped[str]


class Result(Base):
    """What a worker found out; written in the transaction that completes the message.

    Nothing here keeps a file from having two results, so that counting them proves something.
    """

    __tablename__ = "result"

    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    run: Mapped[str] = mapped_column(index=True)
    tenant: Mapped[str]
    path: Mapped[str]
    enqueued_at: Mapped[datetime]
    #: When a worker got the message from the queue, and as which one of its batch.
    handed_at: Mapped[datetime]
    place_in_batch: Mapped[int]
    finished_at: Mapped[datetime] = mapped_column(server_default=_NOW)
    kind: Mapped[str]
    size: Mapped[int]
    compressed: Mapped[int]
    sha256: Mapped[str]
    lines: Mapped[int]
    nodes: Mapped[int]
    functions: Mapped[int]


class PlainMessage(Base):
    """A message of the queue in arrival order."""

    __tablename__ = "plain_message"

    id: Mapped[int] = mapped_column(Identity(), primary_key=True)
    tenant: Mapped[str]
    payload: Mapped[Any] = mapped_column(JSONB)
    created_at: Mapped[datetime] = mapped_column(server_default=_NOW)
    attempt: Mapped[int] = mapped_column(server_default=text("0"))
    leased_until: Mapped[datetime | None]


class CleanupError(FairqueueError):
    """The demo's schemas could not be dropped."""


@dataclass(frozen=True)
class Place:
    """Where a demo keeps its things: a database, and two schemas in it."""

    url: str
    schema: str
    queue_schema: str

    @classmethod
    def new(cls, url: str) -> Place:
        schema = f"{_PLACEHOLDER}_{secrets.token_hex(4)}"
        return cls(url, schema, f"{schema}_queue")

    @contextlib.contextmanager
    def engine(self) -> Iterator[Engine]:
        """An engine whose statements go to these schemas; its connections are closed after the block."""
        schemas = {DEFAULT_SCHEMA: self.queue_schema, _PLACEHOLDER: self.schema}
        engine = make_engine(self.url)
        try:
            yield engine.execution_options(schema_translate_map=schemas)
        finally:
            engine.dispose()


@contextlib.contextmanager
def installed(url: str) -> Iterator[Place]:
    """A place for one demo, which is gone after the block, however that ends."""
    place = Place.new(url)
    begun = True
    with place.engine() as engine:
        try:
            try:
                _migrate(engine, upgrade, place)
            except DBAPIError:
                begun = False  # all of it was one transaction
                raise
            yield place
        finally:
            if begun:
                _remove(engine, place)


def _remove(engine: Engine, place: Place) -> None:
    try:
        with ignored():  # a second Ctrl-C, or whatever ended it, would leave things behind
            _migrate(engine, downgrade, place)
    except DBAPIError as error:
        schemas = f"{place.schema} and {place.queue_schema}"
        raise CleanupError(f"the schemas {schemas} may be left behind: {error.orig}") from error


def _migrate(engine: Engine, revision: Callable[[Place], None], place: Place) -> None:
    """Run a revision's function as Alembic does."""
    with engine.begin() as connection, Operations.context(MigrationContext.configure(connection)):
        revision(place)


def upgrade(place: Place) -> None:
    create_fairqueue(HEAD, schema=place.queue_schema)
    op.execute(CreateSchema(place.schema))
    op.execute(f"COMMENT ON SCHEMA {place.schema} IS 'of python -m fairqueue.demo, to be dropped when that ends'")
    Base.metadata.create_all(op.get_bind())


def downgrade(place: Place) -> None:
    op.execute("SET LOCAL lock_timeout = '10s'")
    op.execute(DropSchema(place.schema, cascade=True, if_exists=True))
    drop_fairqueue(HEAD, schema=place.queue_schema)
