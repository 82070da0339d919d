"""The tables of the shop, in plain SQLAlchemy: Flask, FastAPI, the workers and Alembic all use them."""

import os

from sqlalchemy import ForeignKey, MetaData
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

import fairqueue as fq

#: Constraints get names by rule, so that migrations can refer to them.
NAMES = {"pk": "pk_%(table_name)s", "fk": "fk_%(table_name)s_%(column_0_name)s"}


class Base(DeclarativeBase):
    metadata = MetaData(naming_convention=NAMES)


class Document(Base):
    """What a tenant has uploaded."""

    __tablename__ = "document"
    id: Mapped[int] = mapped_column(primary_key=True)
    tenant: Mapped[str]
    #: What the tenant calls it.
    name: Mapped[str]
    text: Mapped[str]


class WordCount(Base):
    """What a worker has made of a document.

    document_id is not unique on purpose: if some work were done twice, there would be two rows, and everybody could
    see it. Nothing but the queue sees to it that there is one.
    """

    __tablename__ = "word_count"
    id: Mapped[int] = mapped_column(primary_key=True)
    document_id: Mapped[int] = mapped_column(ForeignKey(Document.id))
    words: Mapped[int]
    #: 1, unless a worker died over it, or the database did.
    attempt: Mapped[int]


# This one line ties the queue to the tables: migrations install both.
fq.attach(Base.metadata)


def database_url() -> str:
    """Each process of the shop is told where the database is by its environment."""
    return os.environ["DATABASE_URL"]
