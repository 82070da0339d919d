"""fairqueue.fastapi: a session for each request, and a worker within the lifespan."""

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Annotated

import anyio
import httpx
import pytest
from fastapi import Depends, FastAPI, HTTPException
from fastapi.responses import JSONResponse
from sqlalchemy import Engine, select
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import fairqueue as fq
from fairqueue.fastapi import session_dependency, with_worker


def client_of(app: FastAPI) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


@pytest.mark.parametrize(
    ("tenant", "status"), [("acme", 202), ("raises", 500), ("refused", 422), ("returns", 422), ("forgotten", 202)]
)
async def test_a_message_commits_with_its_request(
    async_engine: AsyncEngine, session: Session, tenant: str, status: int
) -> None:
    """One that raises, answers without a commit, or returns an error, leaves nothing."""
    app = FastAPI()

    @app.post("/{tenant}", status_code=202, response_model=None)
    async def upload(
        tenant: str, db: Annotated[AsyncSession, Depends(session_dependency(async_engine))]
    ) -> JSONResponse | str:
        message = fq.enqueue(db, tenant)
        await db.flush()
        match tenant:
            case "raises":
                raise ValueError(tenant)
            case "refused":
                raise HTTPException(422)
            case "returns":
                return JSONResponse({}, 422)
            case "forgotten":
                return ""
        await db.commit()
        return message.channel  # still readable

    async with client_of(app) as client:
        assert (await client.post(f"/{tenant}")).status_code == status
    there = session.scalars(select(fq.Message.channel)).all()
    assert there == (["acme"] if tenant == "acme" else [])


def test_what_is_no_worker(async_engine: AsyncEngine) -> None:
    with pytest.raises(fq.InvalidValue, match=r"^worker must be a Worker, not AsyncEngine: make one, fq.Worker"):
        with_worker(async_engine)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_what_is_no_async_engine(engine: Engine) -> None:
    with pytest.raises(fq.InvalidValue, match=r"^engine must be an AsyncEngine, not Engine: .* create_async_engine"):
        session_dependency(engine)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def test_flushes_raise_our_errors(async_engine: AsyncEngine) -> None:
    async for db in session_dependency(async_engine)():
        for _ in range(2):
            fq.enqueue(db, "acme", key="nightly")
        with pytest.raises(fq.DuplicateKey):
            await db.commit()


async def test_a_database_that_cannot_be_reached(caplog: pytest.LogCaptureFixture) -> None:
    """The application starts, and ends; the log says what the worker waits for."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # and doesn't listen
        engine = create_async_engine(f"postgresql+psycopg://u:p@127.0.0.1:{probe.getsockname()[1]}/d")
        worker = fq.Worker(engine)
        worker.handler(lambda _: None)
        with anyio.fail_after(30):
            lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] = with_worker(worker)
            async with lifespan(FastAPI()):
                assert "can't look at the schema, trying again" in caplog.text
        await engine.dispose()


@pytest.mark.parametrize("own", [False, True])
async def test_a_worker_within_the_lifespan(async_engine: AsyncEngine, session: Session, own: bool) -> None:
    """It runs between the application's own start and end, whose state is passed on."""
    worker = fq.Worker(async_engine)
    events: list[str] = []
    done = anyio.Event()

    @worker.handler
    async def handle(message: fq.LeasedMessage) -> None:
        events.append(message.channel)
        done.set()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, str]]:
        events.append("start")
        fq.enqueue(session, "acme")
        session.commit()
        yield {"shop": "open"}
        assert session.scalars(select(fq.Message.id)).all() == [], "the worker has stopped, and what was done is done"
        events.append("end")

    app = FastAPI()
    if not own:
        fq.enqueue(session, "acme")
        session.commit()
    async with with_worker(worker, lifespan if own else None)(app) as state:
        assert state == ({"shop": "open"} if own else None)
        with anyio.fail_after(30):
            await done.wait()
    assert events == (["start", "acme", "end"] if own else ["acme"])
    assert session.scalars(select(fq.History.outcome)).all() == ["completed"]
