"""Database URLs as users have them in their environment."""

from __future__ import annotations

from .errors import InvalidValue

__all__ = ["sqlalchemy_url"]


def sqlalchemy_url(dsn: str) -> str:
    """``dsn`` in SQLAlchemy's spelling, for psycopg, whatever driver it names: an application may use another."""
    scheme, separator, rest = dsn.partition("://")
    if not separator or scheme.partition("+")[0] not in {"postgres", "postgresql"}:
        raise InvalidValue("a database URL must begin with postgresql:// or postgresql+psycopg://")
    return f"postgresql+psycopg://{rest}"
