"""Imports

How long importing fairqueue takes, over importing SQLAlchemy's ORM, which its applications have imported anyway; an
interpreter for each, by turns. `import fairqueue` alone loads nothing yet: each name does, when it is first used.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable

from benchmarks.measuring import Bench, Case, Size, alternate
from benchmarks.records import Record, ratio_record
from benchmarks.systems import OURS

_REFERENCE = "import sqlalchemy.orm"
_NAMES = "import fairqueue as f; [getattr(f, name) for home, names in f._HOMES.items() if {} for name in names]"
_IMPORTED = {
    "nothing": "import fairqueue",
    "all but Worker": _NAMES.format("home != 'worker'"),
    "all": _NAMES.format("True"),
}


def cases(size: Size) -> list[Case]:
    return [Case("imports", measure, size.rounds * 2.0)]


def measure(bench: Bench) -> Iterable[Record]:
    times = alternate([_REFERENCE, *_IMPORTED.values()], bench.size.rounds, _milliseconds)
    for names, code in _IMPORTED.items():
        yield ratio_record(
            "time to import", OURS, {"used": names}, times[code], "ms", reference=_REFERENCE, of=times[_REFERENCE]
        )


def _milliseconds(code: str) -> float:
    timed = f"import time; start = time.perf_counter(); {code}; print((time.perf_counter() - start) * 1000)"
    return float(subprocess.run([sys.executable, "-c", timed], capture_output=True, text=True, check=True).stdout)
