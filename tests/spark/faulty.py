"""The data source, with faults at chosen places: format "faulty" is "fairqueue" with the option ``faults``, JSON.

::

    {"0": ["kill", 1], "1": ["raise", 2], "2": ["lose", 1], "driver": "fail after"}

====================== =============================================================================================
of a part              in its first so many attempts
====================== =============================================================================================
``kill``               its process is killed in the middle
``raise``              it raises in the middle
``lose``               it raises when all is done
``linger``             it stays in the middle until the file ``go`` is there; other attempts wait for it
``linger at the end``  it stays when all is done until the file ``go`` is there
====================== =============================================================================================

``driver`` is ``fail before``, ``fail after``, ``wait before`` or ``wait after``, of entering: it raises, or makes the
file ``before`` or ``after`` and stays there until there is a file ``go``. ``folder`` is where these files are.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark import TaskContext
from pyspark.sql.types import StructType

from fairqueue.spark.source.source import FairQueueDataSource
from fairqueue.spark.source.stream_writer import StreamWriter
from fairqueue.spark.source.writer import JobWriter, Message


class Faults:
    def __init__(self, text: str) -> None:
        self.places: dict[str, Any] = json.loads(text)
        self.folder = Path(self.places.get("folder", ""))

    def of_task(self) -> str:
        context = TaskContext.get()
        assert context is not None
        kind, attempts = self.places.get(str(context.partitionId()), ("", 0))
        if context.attemptNumber() < attempts:
            return str(kind)
        if kind.startswith("linger"):
            # Only one attempt at a time would show nothing.
            self.wait_for("lingers")
        return ""

    def amid(self, kind: str, batches: Iterator[Any]) -> Iterator[Any]:
        for number, batch in enumerate(batches):
            if number == 1 and kind == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if number == 1 and kind == "raise":
                raise RuntimeError("a fault in the middle")
            if number == 1 and kind == "linger":
                self.stay("lingers")
            yield batch

    def at_the_end(self, kind: str) -> None:
        if kind == "lose":
            raise RuntimeError("a fault at the end")
        if kind == "linger at the end":
            self.stay("lingers")

    def of_driver(self, when: str) -> None:
        match self.places.get("driver", "").split():
            case ["fail", place] if place == when:
                raise RuntimeError(f"a fault {when} entering")
            case ["wait", place] if place == when:
                self.stay(when)

    def stay(self, name: str) -> None:
        (self.folder / name).touch()
        self.wait_for("go")

    def wait_for(self, name: str) -> None:
        until = time.monotonic() + 300
        while not (self.folder / name).exists():
            if time.monotonic() > until:
                raise TimeoutError(name)
            time.sleep(0.02)


class FaultyJob(JobWriter):
    faults: Faults

    def write(self, iterator: Iterator[Any]) -> Message:
        kind = self.faults.of_task()
        message = super().write(self.faults.amid(kind, iterator))
        self.faults.at_the_end(kind)
        return message

    def commit(self, messages: list[Message | None]) -> None:  # type: ignore[override]
        self.faults.of_driver("before")
        super().commit(messages)
        self.faults.of_driver("after")


class FaultyStream(StreamWriter):
    faults: Faults

    def write(self, iterator: Iterator[Any]) -> Message:
        kind = self.faults.of_task()
        message = super().write(self.faults.amid(kind, iterator))
        self.faults.at_the_end(kind)
        return message

    def commit(self, messages: list[Message | None], batchId: int) -> None:  # type: ignore[override] # noqa: N803
        self.faults.of_driver("before")
        super().commit(messages, batchId)
        self.faults.of_driver("after")


class FaultySource(FairQueueDataSource):
    @classmethod
    def name(cls) -> str:
        return "faulty"

    def writer(self, schema: StructType, overwrite: bool) -> FaultyJob:
        given = dict(self.options)
        faults = Faults(given.pop("faults", "{}"))
        writer = FaultyJob(given, schema, overwrite)
        writer.faults = faults
        return writer

    def streamWriter(self, schema: StructType, overwrite: bool) -> FaultyStream:  # noqa: N802
        given = dict(self.options)
        faults = Faults(given.pop("faults", "{}"))
        writer = FaultyStream(given, schema, overwrite)
        writer.faults = faults
        return writer
