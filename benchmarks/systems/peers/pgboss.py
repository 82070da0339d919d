"""pg-boss, in a Node.js process for each connection. npm fetches both when they are first needed."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from benchmarks.systems.base import LEASE, Lease

from .base import Peer

_VERSION = "12.27.0"
_PACKAGES = (f"pg-boss@{_VERSION}", "node@22.23.3")
#: Where they are kept; `make clean` removes it.
_CACHE = Path(__file__).resolve().parents[3] / ".pg"
_HOME = _CACHE / f"pg-boss-{_VERSION}"
_PROGRAM = Path(__file__).with_suffix(".mjs")
#: Seconds that it has to end.
_GRACE = 5.0


class Node:
    """A Node.js process with a connection of pg-boss."""

    def __init__(self, dsn: str, *arguments: str) -> None:
        # Ctrl-C is for us; it ends with its input.
        self._process = subprocess.Popen(
            [_HOME / "node_modules/.bin/node", _PROGRAM, _HOME, dsn, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input, self._output = self._process.stdin, self._process.stdout

    def call(self, name: str, argument: Any = None) -> Any:
        self._input.write(json.dumps([name, argument]) + "\n")
        self._input.flush()
        line = self._output.readline()
        answer = json.loads(line) if line else {"error": "its process is gone"}
        if "error" in answer:
            raise RuntimeError(f"pg-boss: {answer['error']}")
        return answer["result"]

    def close(self) -> None:
        with self._process as process:
            with contextlib.suppress(BrokenPipeError):
                self._input.close()
            try:
                process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                process.kill()


class PgBoss(Peer):
    name = "pg-boss"
    about = f"pg-boss {_VERSION} for Node.js: insert, fetch and complete"
    package = "pg-boss"
    url = "https://github.com/timgit/pg-boss"

    #: What a fetch is told besides how many.
    options: ClassVar[dict[str, Any]] = {}

    def missing(self) -> str | None:
        return None if self.fetched() or shutil.which("npm") else "pg-boss needs npm, which isn't here"

    def version(self) -> str:
        return _VERSION

    def fetched(self) -> bool:
        """Whether it can run without npm."""
        return _HOME.exists()

    def prepare(self) -> str | None:
        if self.fetched():
            return None
        _CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=_CACHE) as scratch:
            command = ["npm", "install", "--silent", "--no-package-lock", "--prefix", scratch, *_PACKAGES]
            done = subprocess.run(command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True)
            if done.returncode:
                return f"npm couldn't install {' '.join(_PACKAGES)}: {done.stderr.strip() or done.returncode}"
            home = Path(scratch, "home")
            home.mkdir()
            Path(scratch, "node_modules").rename(home / "node_modules")
            home.rename(_HOME)
        return None

    def install(self, dsn: str) -> None:
        node = Node(dsn, "install")
        node.call("backlog")
        node.close()

    def connect(self, dsn: str) -> Node:
        return Node(dsn)

    def enqueue(self, connection: Node, rows: Sequence[tuple[str, str]]) -> None:
        jobs = [
            {"data": {"channel": channel, "payload": json.loads(payload)}, "group": {"id": channel}}
            for channel, payload in rows
        ]
        # It orders by time, which all rows of a statement have in common.
        half = len(jobs) // 2
        for part in (jobs[:half], jobs[half:]):
            if part:
                connection.call("insert", part)

    def dequeue(self, connection: Node, n: int, *, lease: float = LEASE, timed: bool = False) -> list[Lease]:
        jobs = connection.call("fetch", {"batchSize": n, **self.options})
        return [Lease(job["id"], 1, job["data"]["channel"], job["data"]["payload"]) for job in jobs]

    def complete(self, connection: Node, leases: Sequence[Lease]) -> int:
        return int(connection.call("complete", [lease.id for lease in leases])) if leases else 0

    def backlog(self, connection: Node) -> int:
        return int(connection.call("backlog"))


class PgBossGroups(PgBoss):
    name = "pg-boss-groups"
    about = f"pg-boss {_VERSION} with groupConcurrency 1: one job of each tenant at a time"
    fair = True

    options: ClassVar[dict[str, Any]] = {"groupConcurrency": 1}
