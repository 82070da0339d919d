"""Database URLs as users have them in their environment."""

from __future__ import annotations

from .errors import InvalidValue

__all__ = ["sqlalchemy_url"]


def sqlalchemy_url(dsn: str) -> str:
    """``dsn`` in SQLAlchemy's spelling: postgres:// and postgresql:// become postgresql+psycopg://."""
    scheme, separator, rest = dsn.partition("://")
    if not separator or scheme not in {"postgres", "postgresql", "postgresql+psycopg"}:
        raise InvalidValue("a database URL must begin with postgresql:// or postgresql+psycopg://")
    return f"postgresql+psycopg://{rest}"
