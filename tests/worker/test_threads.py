"""The threads of a worker: as many as are needed at a time, and whatever happens in one is told to who waits for it."""

import asyncio
import sys
import threading
import weakref
from collections.abc import AsyncIterator
from contextvars import ContextVar
from functools import partial
from types import SimpleNamespace

import pytest

from fairqueue.worker.threads import Threads
from tests.acts import wait_until
from tests.worker.working import threads_of_workers


@pytest.fixture
async def threads() -> AsyncIterator[Threads]:
    threads = Threads()
    yield threads
    threads.close()
    wait_until(lambda: threads_of_workers() == 0)


async def test_they_are_used_again(threads: Threads) -> None:
    """One by one all calls go to the same, and several at a time to as many."""
    for number in range(20):
        assert await threads.run(lambda number=number: number) == number  # type: ignore[misc]
    assert threads_of_workers() == 1
    barrier = threading.Barrier(3, timeout=30)
    for _ in range(5):
        await asyncio.gather(*(threads.run(barrier.wait) for _ in range(3)))
    assert threads_of_workers() == 3


async def test_they_keep_nothing(threads: Threads) -> None:
    """While they wait for more, what they were called with, and what that returned, is garbage."""

    class Large:
        pass

    kept = weakref.ref(await threads.run(Large))
    await threads.run(lambda: None)
    assert kept() is None
    given = Large()
    kept = weakref.ref(given)
    await threads.run(partial(id, given))
    del given
    wait_until(lambda: kept() is None)


async def test_they_run_no_event_loop(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor say so to sniffio, which anyio, trio and httpx ask, where it is installed."""
    current: ContextVar[str | None] = ContextVar("current", default=None)
    monkeypatch.setitem(sys.modules, "sniffio", SimpleNamespace(current_async_library_cvar=current))
    current.set("asyncio")
    assert await threads.run(current.get) is None
    assert current.get() == "asyncio"


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
async def test_what_is_raised(threads: Threads, error: type[BaseException]) -> None:
    """Is raised where the call is awaited, and the thread goes on."""

    def fail() -> None:
        raise error("mine")

    async with asyncio.timeout(30):
        with pytest.raises(error, match="mine"):
            await threads.run(fail)
    assert await threads.run(lambda: 1) == 1
    assert threads_of_workers() == 1


async def test_the_system_has_no_more(
    threads: Threads, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Calls wait for those that there are, which is said once; and are given more as soon as there are."""
    start, go = threading.Thread.start, threading.Event()

    def refuse(thread: threading.Thread) -> None:
        if threads_of_workers() >= 2:
            raise RuntimeError("can't start new thread")
        start(thread)

    def call(number: int) -> int:
        assert go.wait(30)
        return number

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        calls = [asyncio.create_task(threads.run(partial(call, number))) for number in range(6)]
        await asyncio.sleep(0)  # all have been asked for
        go.set()
        assert await asyncio.gather(*calls) == list(range(6))
        assert threads_of_workers() == 2
    assert [record.message for record in caplog.records] == [
        "can't start new thread, so handlers and statements wait for one of 2 threads"
    ]
    barrier = threading.Barrier(3, timeout=30)
    await asyncio.gather(*(threads.run(barrier.wait) for _ in range(3)))
    assert threads_of_workers() == 3
