"""The Python of Spark's workers: this process's own, which on this machine finds PySpark where it is installed.

::

    with worker_python("local[*]") as settings:
        spark = SparkSession.builder.master("local[*]").config(map=settings).getOrCreate()

Left to itself, Spark puts PySpark's zip, Py4J's and one of its own jars first on PYTHONPATH, for executors on which
nothing is installed. Then each worker compiles PySpark anew, and all lists of files in there are read before the first
task and again before others: of a small job, seconds.
"""

from __future__ import annotations

import atexit
import os
import shutil
import site
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from shlex import quote

__all__ = ["worker_python"]

_VARIABLE = "PYSPARK_PYTHON"
_SCRIPT = """\
#!/bin/sh
# Python for the workers of Spark, without what Spark puts on PYTHONPATH; whatever else is there stays.
set -f
IFS=:
kept=
for place in $PYTHONPATH; do
    case $place in
        */pyspark.zip | */py4j-*.zip | */spark-core_*.jar) ;;
        *) kept=$kept:$place ;;
    esac
done
PYTHONPATH=${{kept#:}} exec {python} "$@"
"""


@contextmanager
def worker_python(master: str) -> Iterator[dict[str, str]]:
    """A session that is made in the block has it, unless PYSPARK_PYTHON says what workers run.

    Yields settings of Spark's that go with it: what else workers run may know nothing of this package.

    :param master: where Spark runs; what isn't local may have nothing else than what Spark brings.
    """
    if os.environ.get(_VARIABLE):
        yield {}
        return
    is_local = master.startswith("local")
    # Otherwise workers take the first python3 on PATH, which may know nothing of this package.
    os.environ[_VARIABLE] = (_script() if is_local else None) or sys.executable
    try:
        yield {"spark.python.daemon.module": "fairqueue.spark.worker_daemon"} if is_local else {}
    finally:
        del os.environ[_VARIABLE]  # A session on a cluster, made later, would hand it on.


@cache
def _script() -> str | None:
    """The path of an executable file; None where Spark's own way is needed, or there can be none.

    It is there as long as this process, as the JVM is, which keeps what it was told at first.
    """
    if os.name != "posix" or not _installed():
        return None
    folder = tempfile.mkdtemp(prefix="fairqueue-spark-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    script = Path(folder, "python")
    script.write_text(_SCRIPT.format(python=quote(sys.executable)))
    script.chmod(0o700)
    return str(script) if os.access(script, os.X_OK) else None  # Temporary files can't be run everywhere.


def _installed() -> bool:
    """Whether a new process of this Python finds PySpark by itself; of Spark's own download it does not."""
    places = {Path(place).resolve() for place in [*site.getsitepackages(), site.getusersitepackages()]}
    found = [find_spec(name) for name in ("py4j", "pyspark")]
    return all(spec and spec.origin and Path(spec.origin).resolve().parents[1] in places for spec in found)
