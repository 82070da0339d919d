"""FastAPI: a session for each request, and a worker that lives as long as the application.

::

    from contextlib import asynccontextmanager
    from typing import Annotated

    import fairqueue as fq
    from fastapi import Depends, FastAPI
    from fairqueue.fastapi import session_dependency, with_worker
    from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

    url = "postgresql+psycopg://localhost/app"
    engine = create_async_engine(url)
    # An engine of its own: with one pool for both, slow handlers keep connections from requests, and requests from the
    # worker's heartbeats.
    worker_engine = create_async_engine(url)
    worker = fq.Worker(worker_engine)


    @asynccontextmanager
    async def lifespan(app: FastAPI):
        try:
            yield  # the worker runs here
        finally:
            for each in (engine, worker_engine):
                await each.dispose()  # its connections belong to this event loop; a test may start the app again


    app = FastAPI(lifespan=with_worker(worker, lifespan))
    Db = Annotated[AsyncSession, Depends(session_dependency(engine))]


    @worker.handler
    async def count(message: fq.LeasedMessage, session: AsyncSession) -> None: ...


    @app.post("/{tenant}/documents", status_code=202)
    async def upload(tenant: str, db: Db) -> None:
        fq.enqueue(db, tenant, {"document": 1})
        await db.commit()  # here, and nowhere else

**Commit in the path function**, as the last thing before it returns. A dependency that commits after its ``yield`` is
wrong in one way or another: FastAPI 0.106 to 0.117 run that code before the response is sent, from 0.118 on it runs
after it, so that a client could be told 202 for what then fails to commit; ``Depends(..., scope="function")``, since
0.121, goes back to before; and in all of them it would commit for a path function that *returns* a response with status
422. A commit in the path function comes before the response everywhere, and whatever is raised before it leaves nothing
behind.

Limitations: what goes wrong after the commit, such as a return value that doesn't fit the response model, answers 500
though everything is done; so return plain values. A request that is cancelled, or whose database goes away, during the
commit itself can't know what became of it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession

from .errors import InvalidValue, translate_errors
from .worker import Worker

if TYPE_CHECKING:
    from fastapi import FastAPI

__all__ = ["session_dependency", "with_worker"]

A = TypeVar("A", bound="FastAPI")


def session_dependency(engine: AsyncEngine) -> Callable[[], AsyncIterator[AsyncSession]]:
    """A dependency that gives each request an AsyncSession and closes it; what wasn't committed is rolled back.

    What a session of this engine flushes raises fairqueue's errors from now on (:func:`fairqueue.translate_errors`).
    Its objects can still be read after the commit (``expire_on_commit=False``).

    :param engine: an AsyncEngine.
    :raises InvalidValue: if it is none.
    """
    if not isinstance(engine, AsyncEngine):
        raise InvalidValue(
            f"engine must be an AsyncEngine, not {type(engine).__name__}: make one by create_async_engine()"
        )
    translate_errors(engine)

    async def session() -> AsyncIterator[AsyncSession]:
        async with AsyncSession(engine, expire_on_commit=False) as session:
            yield session

    return session


def with_worker(
    worker: Worker, lifespan: Callable[[A], AbstractAsyncContextManager[Any]] | None = None
) -> Callable[[A], AbstractAsyncContextManager[Any]]:
    """A lifespan in which ``worker`` runs in the background of the application's event loop.

    It starts when the application's own ``lifespan`` has started, and has stopped before that ends: what handlers need
    is there all the time. Each process of the server runs a worker.

    :param worker: a :class:`fairqueue.Worker` that has its handler.
    :param lifespan: the application's own, if it has one; another :func:`with_worker` is one too.
    :raises InvalidValue: if ``worker`` is no Worker. What :meth:`fairqueue.Worker.run_async` raises at its start is
        raised when the application starts.
    """
    if not isinstance(worker, Worker):
        raise InvalidValue(f"worker must be a Worker, not {type(worker).__name__}: make one, fq.Worker(engine)")

    @asynccontextmanager
    async def both(app: A) -> AsyncIterator[Any]:
        async with nullcontext() if lifespan is None else lifespan(app) as state, worker:
            yield state

    return both
