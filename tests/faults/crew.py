"""The processes of a random life: started, killed, stopped, continued, and waited for."""

import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.faults.doing import live
from tests.faults.life import Part

PROCESSES = 8
#: A server process that has imported everything forks them: killed ones are replaced in no time.
context: Any = get_context("forkserver")
context.set_forkserver_preload(["tests.faults.doing", "tests.faults.workers"])


def nothing() -> None:
    pass


@dataclass
class Logs:
    """What processes knew for sure."""

    committed: set[str] = field(default_factory=set)
    rolled_back: set[str] = field(default_factory=set)
    #: (message id, attempt)
    completed: Counter[tuple[int, int]] = field(default_factory=Counter)
    acts: Counter[str] = field(default_factory=Counter)
    broke: list[str] = field(default_factory=list)


class Crew:
    def __init__(self, url: str, seed: str, seconds: float, folder: Path, faults: bool = False) -> None:
        self.url, self.seed, self.folder, self.faults = url, seed, folder, faults
        # What forks them has to be there first: it imports everything, which takes a while.
        first = context.Process(target=nothing)
        first.start()
        first.join()
        self.until = time.monotonic() + seconds
        self.started = 0
        self.processes = [self.start() for _ in range(PROCESSES)]

    def start(self) -> BaseProcess:
        self.started += 1
        name = f"process{self.started}"
        log = self.folder / f"{name}.log"
        part = Part(self.url, name, f"{self.seed}/{self.started}", self.until, log, self.faults)
        process: BaseProcess = context.Process(target=live, args=(part,), daemon=True)
        process.start()
        return process

    def is_over(self) -> bool:
        return time.monotonic() >= self.until

    def replace_the_dead(self) -> None:
        """Those that were killed; what broke by itself stays as it is, to be found by `end`."""
        for number, process in enumerate(self.processes):
            if process.exitcode == -signal.SIGKILL:
                process.join()
                self.processes[number] = self.start()

    def signal(self, dice: random.Random, number: signal.Signals) -> BaseProcess | None:
        """Send a signal to one of those that are alive."""
        alive = [process for process in self.processes if process.exitcode is None and process.pid is not None]
        if not alive:
            return None
        process = dice.choice(alive)
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            os.kill(process.pid or 0, number)
        return process

    def end(self) -> Logs:
        """Wait until all have come to their end, and read what they wrote down."""
        deadline = time.monotonic() + 60
        for process in self.processes:
            process.join(max(0, deadline - time.monotonic()))
        hanging = [process for process in self.processes if process.exitcode is None]
        self.kill()
        logs = self.read()
        assert not logs.broke, "\n".join(logs.broke)
        assert not hanging, f"{len(hanging)} processes hang"
        allowed = {0, -signal.SIGKILL} if self.faults else {0}
        codes = {process.exitcode for process in self.processes}
        assert codes <= allowed, codes
        return logs

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def read(self) -> Logs:
        logs = Logs()
        for path in self.folder.glob("process*.log"):
            for line in path.read_text().splitlines():
                match json.loads(line):
                    case ["committed", nonce]:
                        logs.committed.add(nonce)
                    case ["rolled back", nonce]:
                        logs.rolled_back.add(nonce)
                    case ["completed", id_, attempt]:
                        logs.completed[id_, attempt] += 1
                    case ["did", act]:
                        logs.acts[act] += 1
                    case ["broke", act, trace]:
                        logs.broke.append(f"{path.stem}, {act}:\n{trace}")
        return logs
