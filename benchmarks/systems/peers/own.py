"""fairqueue by its worker, beside which the other workers are measured."""

from __future__ import annotations

import threading
from collections.abc import Callable

from sqlalchemy import create_engine

import fairqueue as fq
from benchmarks.systems.fair import Fairqueue
from fairqueue import embedded

from .base import CONCURRENCY, Working


class FairqueueWorker(Fairqueue, Working):
    name = "fairqueue-worker"
    about = "this project, by fq.Worker, a plain handler without a session, prefetch=100"
    package = "fairqueue"

    def work(self, dsn: str, handle: Callable[[str], None], stop: threading.Event) -> None:
        engine = create_engine(embedded.sqlalchemy_url(dsn))
        app = fq.Worker(engine, concurrency=CONCURRENCY, prefetch=100)

        @app.handler
        def job(message: fq.LeasedMessage) -> None:
            handle(message.channel)

        with app:
            stop.wait()
        engine.dispose()
