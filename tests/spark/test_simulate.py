"""The simulator on Spark: the command, and through it the grid, one task a scenario, as in this process."""

import inspect
import re
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from fairqueue.cli.spark.simulate import simulate as command
from fairqueue.spark import simulation
from fairqueue.spark.simulation import Scenario, fan_out, grid, run, schedulers
from fairqueue.spark.simulation.words import answer
from tests.fixtures.spark import on_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = on_spark


def test_simulate(spark: "SparkSession", tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grid on Spark is, row by row and to the last digit, what this process comes to."""
    from pyarrow import parquet

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(
        command,
        "--tenants 20 --workers 2 --load 1.2 --scheduler fair,arrival --messages 300,1000 --service 0.5"
        " --weights 2,1,2 --max-concurrency none,1 --workload split --names 3 --out out.parquet --picture out.png",
    )
    assert result.exit_code == 0, (result.output, result.exception)
    scenarios = grid(
        workload="split",
        tenants=20,
        workers=2,
        load=1.2,
        messages=[300, 1000],
        service=0.5,
        names=3,
        weights=(2, 1, 2),
        max_concurrency=[None, 1],
        scheduler=["fair", "arrival"],
    )
    expected: list[dict[str, Any]] = [
        {"scenario": place} | row for place, each in enumerate(scenarios) for row in run(each)
    ]
    rows = parquet.read_table("out.parquet").to_pylist()
    rows.sort(key=lambda row: (row["scenario"], simulation.GROUPS.index(row["group"])))
    assert rows == [row | {"weights": list(row["weights"])} for row in expected]
    assert answer(expected) in result.stdout
    assert "Quiet tenants sent as few as " in result.stdout
    assert re.search(r"^ +300 +- +fair +\d", result.stdout, re.MULTILINE), result.stdout
    assert Path("out.png").stat().st_size > 10_000
    assert "8 simulations of 5,200 messages all in all" in result.stderr


@pytest.mark.parametrize("what", [simulation, schedulers, Scenario, grid, fan_out.simulate])
def test_examples(what: Any, spark: "SparkSession", capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"::\n\n((?:(?:    .*)?\n)+)", inspect.getdoc(what) or "")
    exec(compile(textwrap.dedent(example), str(what), "exec"), {})  # noqa: S102
    if what is schedulers:
        assert capsys.readouterr().out == "[0, 2, 1]\n"
