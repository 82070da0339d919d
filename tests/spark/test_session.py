"""A session on this machine: what its workers are."""

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.fixtures.spark import on_spark

pytest.importorskip("pyspark")

import pyspark

from fairqueue.spark import worker_python

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LOCAL = "local[2]"


def python_of(master: str) -> str:
    with worker_python.worker_python(master):
        return os.environ["PYSPARK_PYTHON"]


@pytest.fixture
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYSPARK_PYTHON", raising=False)


class TestWorkers:
    pytestmark = on_spark

    def test_have_the_pyspark_that_is_installed(self, spark: "SparkSession") -> None:
        def here(_: int) -> tuple[str, str, list[str]]:
            import pyspark

            return sys.executable, pyspark.__file__, sys.path

        ((python, found, path),) = spark.sparkContext.parallelize([0], 1).map(here).collect()
        assert (python, found) == (sys.executable, pyspark.__file__)
        assert not [place for place in path if place.endswith((".jar", "pyspark.zip")) or "/py4j-" in place]

    def test_are_forks_of_one_that_has_imported_what_they_need(self, spark: "SparkSession") -> None:
        def here(_: int) -> tuple[bool, ...]:
            modules = set(sys.modules)  # before anything else is done in it
            return tuple(name in modules for name in ("fairqueue.spark.source", "pandas"))

        assert spark.sparkContext.parallelize([0], 1).map(here).collect() == [(True, True)]


@pytest.mark.usefixtures("unset")
class TestPython:
    def test_what_else_is_on_the_path_stays(self) -> None:
        spark = ["/s/python/lib/pyspark.zip", "/s/python/lib/py4j-0.10-src.zip", "/s/jars/spark-core_2.13-4.0.jar"]
        others = ["/a b", "/c/*", "/d.zip", "/e/spark-core.py"]
        path = ":".join([*spark, *others])
        command = [python_of(LOCAL), "-c", "import sys; print(*sys.path, sep='\\n')"]
        done = subprocess.run(command, env={"PYTHONPATH": path}, capture_output=True, text=True, check=True)
        assert done.stdout.splitlines()[1:5] == others
        assert not {*spark} & {*done.stdout.splitlines()}

    def test_nothing_is_set_afterwards(self) -> None:
        script = python_of(LOCAL)
        assert "PYSPARK_PYTHON" not in os.environ
        assert python_of(LOCAL) == script
        assert Path(script).stat().st_mode & 0o777 == 0o700

    def test_elsewhere_it_is_what_it_was(self) -> None:
        assert python_of("spark://127.0.0.1:7077") == sys.executable

    def test_what_the_user_says_goes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYSPARK_PYTHON", "python3.12")
        assert python_of(LOCAL) == "python3.12"
        assert os.environ["PYSPARK_PYTHON"] == "python3.12"

    @pytest.mark.parametrize(
        ("place", "value"),
        [
            ("site.getsitepackages", lambda: ["/elsewhere"]),  # as with Spark's own download
            ("os.name", "nt"),
            ("os.access", lambda *_: False),  # what is mounted with noexec
        ],
    )
    def test_where_there_can_be_none(self, place: str, value: object, monkeypatch: pytest.MonkeyPatch) -> None:
        worker_python._script.cache_clear()
        with monkeypatch.context() as patched:
            patched.setattr(place, value)
            found = worker_python._script()
        worker_python._script.cache_clear()
        assert found is None
