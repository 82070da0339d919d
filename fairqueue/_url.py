"""Database URLs as users have them in their environment, and as SQLAlchemy and libpq read them."""

from __future__ import annotations

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from .errors import InvalidValue

__all__ = ["libpq", "parsed", "sqlalchemy_url"]

# What only asyncpg, or SQLAlchemy's dialect for it, takes from a URL. A connection of psycopg does without.
_OF_ASYNCPG = (
    *("async_fallback", "prepared_statement_cache_size", "prepared_statement_name_func"),
    *("command_timeout", "direct_tls", "timeout"),
    *("max_cacheable_statement_size", "max_cached_statement_lifetime", "statement_cache_size"),
)


def sqlalchemy_url(dsn: str) -> str:
    """``dsn`` in SQLAlchemy's spelling, for psycopg, whatever driver it names: an application may use another."""
    scheme, separator, rest = dsn.partition("://")
    name, _, driver = scheme.partition("+")
    if not separator or name not in {"postgres", "postgresql"}:
        # No more of it: what is no URL may hold a password anywhere.
        given = f", not {name}://" if separator and name.isidentifier() else ""
        raise InvalidValue(f"a database URL must begin with postgresql:// or postgresql+psycopg://{given}")
    url = f"postgresql+psycopg://{rest}"
    made = _made(url)  # in any case: who reads it next would show it in an error
    return _without_asyncpg(made).render_as_string(hide_password=False) if driver == "asyncpg" else url


def parsed(dsn: str) -> URL:
    """The same as an object."""
    return _made(sqlalchemy_url(dsn))


def libpq(url: URL) -> str:
    """``url`` for psycopg, psql and every other client of libpq, with its password."""
    place, mark, query = url.set(drivername="postgresql").render_as_string(hide_password=False).partition("?")
    # SQLAlchemy leaves spaces as they are, and in the query writes a plus for one, which libpq takes for a plus.
    return f"{place.replace(' ', '%20')}{mark}{query.replace('+', '%20')}"


def _made(url: str) -> URL:
    try:
        made = make_url(url)
    except (ArgumentError, ValueError):
        made = None
    if made is None or "@" in _behind_the_password(made, url):  # the rest of one, which a driver would show as a host
        # Without the URL, nor what it was made of: it may hold a password.
        raise InvalidValue(
            "the database URL can't be read; write postgresql://user@host:port/database, with %XX for special"
            " characters, such as %40 for an @ in a password"
        )
    return made


def _behind_the_password(made: URL, url: str) -> str:
    """The host, and with a password the database and the names in the query, as the first @ or / in it ends it."""
    if made.password is None:
        return made.host or ""
    names = [setting.partition("=")[0] for setting in url.partition("?")[2].split("&")]
    return " ".join((made.host or "", made.database or "", *names))


def _without_asyncpg(url: URL) -> URL:
    ssl = url.query.get("ssl")
    url = url.difference_update_query(["ssl", *_OF_ASYNCPG])
    if not isinstance(ssl, str):
        return url
    return url.update_query_dict({"sslmode": {"true": "require", "false": "disable"}.get(ssl.lower(), ssl)})
