"""fairqueue by its worker, beside which others are measured: with a hundred that stand by, and as it is by default."""

from __future__ import annotations

import threading
from collections.abc import Callable

from sqlalchemy import create_engine

import fairqueue as fq
from benchmarks.systems.fair import Fairqueue
from fairqueue import embedded

from .base import Working


class FairqueueWorker(Fairqueue, Working):
    name = "fairqueue-worker"
    about = "this project, by fq.Worker, a plain handler without a session, prefetch=100"
    package = "fairqueue"
    prefetch: int | None = 100

    def work(self, dsn: str, handle: Callable[[str], None], stop: threading.Event) -> None:
        engine = create_engine(embedded.sqlalchemy_url(dsn))
        app = fq.Worker(engine, concurrency=self.at_a_time, prefetch=self.prefetch)

        @app.handler
        def job(message: fq.LeasedMessage) -> None:
            handle(message.channel)

        with app:
            stop.wait()
        engine.dispose()


class FairqueueWorkerDefault(FairqueueWorker):
    name = "fairqueue-worker-default"
    about = "the same as it is by default, where as many stand by as slots take up during two dequeues, up to 100"
    prefetch = None
