"""What is looked at when a worker starts, of its handlers' sessions and of the connections that they share with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sqlalchemy import Engine
from sqlalchemy.ext.asyncio import AsyncEngine

from fairqueue.errors import InvalidValue
from fairqueue.models import Message
from fairqueue.schema import DEFAULT_SCHEMA

from .handlers import Handler
from .logs import log

if TYPE_CHECKING:
    from . import Worker

__all__ = ["async_engines", "check_isolation", "check_pool", "check_schema"]

#: Connections of the pool that the worker has for itself at a time: to dequeue, to report, to wait for a message that
#: somebody has locked, to extend leases. What the listener takes to connect, and once a minute to see whether
#: notifications arrive, is not counted: it is for a moment, and can wait for one of these, which are given back after a
#: statement. Where they are held up for longer than its ANSWER_TIMEOUT, it connects again, and until then the worker
#: polls: that costs a warning, and no lease.
_OWN = 4

# In such a transaction a message can't be completed that was changed after it began.
_SERIAL = "fails when it is at work while its lease is extended, each {:.1f} s"
_CONSEQUENCES = {
    "AUTOCOMMIT": "leaves what it wrote when it fails",
    "REPEATABLE READ": _SERIAL,
    "SERIALIZABLE": _SERIAL,
}


def check_pool(worker: Worker, handler: Handler) -> None:
    """Too few connections would not only slow the handlers: heartbeats would wait too, and leases run out."""
    pool: Any = worker.engine.pool
    if not hasattr(pool, "_max_overflow") or pool._max_overflow < 0 or pool.size() == 0:
        return
    needed, most = worker.concurrency + _OWN, pool.size() + pool._max_overflow
    if needed <= most:
        return
    if not handler.takes_session:
        log.warning(
            "%s takes no session, but should it open some on the worker's engine, up to %d connections are needed, and"
            " the pool has %d at most. Leases run out when heartbeats wait for one: create_engine(...,"
            " max_overflow=%d), which costs nothing where they aren't used",
            handler.name,
            needed,
            most,
            needed - pool.size(),
        )
    # Not the engines: one with other execution options has the same pool. Else handlers have connections of their own,
    # or nobody knows.
    elif getattr(_bind_for(worker, handler), "pool", None) is pool:
        raise InvalidValue(
            f"concurrency {worker.concurrency} needs up to {needed} connections, but the engine's pool has {most}"
            f" at most: create_engine(..., pool_size={needed}), or a lower concurrency"
        )


def check_schema(worker: Worker, handler: Handler) -> None:
    """Ids are the same ones in each schema: elsewhere a handler's session would complete somebody else's message."""
    bind = _bind_for(worker, handler)
    if not handler.takes_session or bind is None:
        return
    of_sessions = _told(_factory(worker, handler)).get("execution_options") or {}
    theirs, ours = _schema_of(bind, of_sessions), _schema_of(worker.engine, {})
    if theirs != ours:
        raise InvalidValue(
            f"the worker's engine leads to schema {ours!r}, but the sessions of {handler.name} to {theirs!r}: give the"
            f" engines of both fq.in_schema({ours!r}), which a schema_translate_map of your own would replace"
        )


def check_isolation(worker: Worker, handler: Handler) -> None:
    """Say so where handlers and their messages can't go together: all else works, so nothing is refused."""
    engine = _bind_for(worker, handler)
    if not handler.takes_session or not isinstance(engine, Engine):
        return
    dialect = engine.dialect
    # What create_engine() was given, and what the server has: None before it is connected.
    found = getattr(dialect, "_on_connect_isolation_level", None) or getattr(dialect, "default_isolation_level", None)
    level = engine.get_execution_options().get("isolation_level", found)
    if level in _CONSEQUENCES:
        log.warning(
            "%s has sessions that are %s, and %s:"
            " give it those of engine.execution_options(isolation_level='READ COMMITTED')",
            handler.name,
            level,
            _CONSEQUENCES[level].format(worker.lease / 3),
        )


def async_engines(worker: Worker) -> set[AsyncEngine]:
    """Those of the worker and of its async handler's sessions."""
    told = _told(worker.async_session)
    engines = (worker.engine, told.get("bind"), *(told.get("binds") or {}).values())
    return {engine for engine in engines if isinstance(engine, AsyncEngine)}


def _schema_of(bind: Any, of_sessions: Mapping[str, Any]) -> str:
    names = {**bind.get_execution_options(), **of_sessions}.get("schema_translate_map") or {}
    return str(names.get(DEFAULT_SCHEMA, DEFAULT_SCHEMA))


def _bind_for(worker: Worker, handler: Handler) -> object:
    """What the handler's sessions have messages in, without its async front; None: nobody knows."""
    told = _told(_factory(worker, handler))
    binds = told.get("binds") or {}
    found = (binds[key] for key in (Message, Message.__mapper__, Message.__table__, *Message.__mro__) if key in binds)
    bind = next(found, told.get("bind"))
    return getattr(bind, "sync_engine", bind)


def _factory(worker: Worker, handler: Handler) -> object:
    """What makes the handler's sessions."""
    return worker.async_session if handler.is_async else worker.session


def _told(factory: object) -> dict[str, Any]:
    """What a sessionmaker makes its sessions with, also within a scope; other factories don't tell."""
    told: dict[str, Any] = getattr(getattr(factory, "session_factory", factory), "kw", {})
    return told
