"""Where figures were measured: machine, versions, settings, and how long a durable commit takes."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import psycopg

_ROOT = Path(__file__).parent.parent
_SHOWN = (
    "fsync",
    "synchronous_commit",
    "full_page_writes",
    "wal_level",
    "shared_buffers",
    "work_mem",
    "max_wal_size",
    "checkpoint_timeout",
    "autovacuum",
    "max_connections",
)

#: Shown where they were changed.
_TUNED = (
    "effective_cache_size",
    "random_page_cost",
    "jit",
    "commit_delay",
    "wal_compression",
    "wal_buffers",
    "effective_io_concurrency",
)


def environment(dsn: str) -> dict[str, str]:
    """Everything that a reader may ask for, but for names of machines and people."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        settings: dict[str, str] = dict(
            connection.execute(
                "SELECT name, current_setting(name) FROM pg_settings"
                " WHERE name = ANY (%s) OR name = ANY (%s) AND source NOT IN ('default', 'override')",
                (list(_SHOWN), list(_TUNED)),
            ).fetchall()
        )
        server = str(connection.info.parameter_status("server_version"))
        commit = _commit(connection)
    return {
        "time": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "revision": _revision(),
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()),
        "memory": _memory(),
        "system": f"{platform.system()} {platform.release()}",
        "load before": " ".join(f"{load:.1f}" for load in os.getloadavg()),
        "Python": platform.python_version(),
        "psycopg": f"{psycopg.__version__} ({psycopg.pq.__impl__})",
        "SQLAlchemy": version("sqlalchemy"),
        "PostgreSQL": server,
        "settings": ", ".join(f"{name} = {value}" for name, value in sorted(settings.items())),
        "durable commit": f"about {commit:.1f} ms",
    }


def _commit(connection: psycopg.Connection[Any]) -> float:
    """Milliseconds, rounded to what runs on one machine have in common."""
    times = []
    for _ in range(50):
        start = time.perf_counter()
        connection.execute("SELECT pg_logical_emit_message(true, '', '')")
        times.append(time.perf_counter() - start)
    return round(median(times) * 1000, 1)


def _revision() -> str:
    try:
        found = _git("rev-parse", "--short", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", "fairqueue", "benchmarks")
    except OSError:
        return "unknown"
    return found + " with changes" if changed else found or "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(_ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _memory() -> str:
    try:
        return f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GB"
    except (ValueError, OSError):
        return "unknown"
