"""The simulator's edges without Spark: what it refuses, files of arrivals, words and pictures."""

import re
import struct
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fairqueue.cli.spark.simulate import simulate
from fairqueue.errors import InvalidValue
from fairqueue.spark.simulation import Scenario, grid, run
from fairqueue.spark.simulation.picture import draw
from fairqueue.spark.simulation.words import answer, fixed, seconds, varied
from fairqueue.spark.simulation.workloads import make_load


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"scheduler": "lottery"}, "scheduler must be 'arrival' or 'round_robin' or 'fair', not 'lottery'"),
        ({"workload": "quiet"}, "workload must be 'zipf' or .*, not 'quiet'"),
        ({"tenants": 1}, "tenants must be a whole number from 2 to 10000000, not 1"),
        ({"workers": 0}, "workers must be a whole number from 1 to 1000000, not 0"),
        ({"workers": None}, "workers must be a whole number from 1 to 1000000, not None"),
        ({"load": float("nan")}, "load must be a number from 0.001 to 1000, not nan"),
        ({"service": -1}, "service must be a number from 0.0001 to 1e\\+06, not -1"),
        ({"weights": ()}, "weights must be a tuple of at least one number, not \\(\\)"),
        ({"weights": (1, 0)}, "weights must be a number from 0.01 to 1000, not 0"),
        ({"max_concurrency": 0}, "max_concurrency must be a whole number from 1 to .*, not 0"),
        (
            {"workload": "burst", "upload": 100, "messages": 100},
            "upload must be less than the 100 messages in all, not",
        ),
        ({"workload": "file"}, "arrivals must not be None with the workload 'file': name the file"),
        ({"arrivals": "a.csv"}, "arrivals must not be 'a.csv' with the workload 'zipf': use the workload 'file'"),
    ],
)
def test_a_scenario_that_can_t_be(values: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidValue, match=f"^{complaint}"):
        Scenario(**values)


def test_a_grid_is_the_product_of_its_lists() -> None:
    scenarios = grid(tenants=[10, 20], weights=(3, 1), scheduler=["arrival", "fair"], messages=50)
    assert [(each.tenants, each.scheduler) for each in scenarios] == [
        (10, "arrival"), (10, "fair"), (20, "arrival"), (20, "fair")
    ]  # fmt: skip
    assert {(each.messages, each.weights) for each in scenarios} == {(50, (3.0, 1.0))}
    with pytest.raises(InvalidValue, match="'tenant' is no field of a scenario: use arrivals, burst"):
        grid(tenant=[1])
    with pytest.raises(InvalidValue, match="tenants must have at least one value"):
        grid(tenants=[])


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_arrivals_from_a_file(tmp_path: Path, kind: str) -> None:
    """In the order of time, whatever the order of the file; names that look like numbers are names."""
    pa = pytest.importorskip("pyarrow")
    from pyarrow import csv, parquet

    columns = {
        "channel": ["007", "7", "7", "7"],
        "at": [1e9 + 2, 1e9 + 0.5, 1e9, 1e9 + 3],
        "cost": [1.0, 2.0, 3.0, 4.0],
        "service_seconds": [10.0, 20.0, 30.0, 40.0],
        "else": [None, None, None, None],
    }
    path = tmp_path / f"arrivals.{kind}"
    (csv.write_csv if kind == "csv" else parquet.write_table)(pa.table(columns), path)
    load = make_load(Scenario(workload="file", arrivals=str(path), weights=(2, 1)))
    assert load.at.tolist() == [0, 500_000_000, 2_000_000_000, 3_000_000_000]
    assert load.channel.tolist() == [0, 0, 1, 0]
    assert load.cost.tolist() == [3, 2, 1, 4]
    assert (load.service / 1e9).tolist() == [30, 20, 10, 40]
    assert [channel.weight for channel in load.channels] == [2, 1]
    row = run(Scenario(workload="file", arrivals=str(path), workers=2))[0]
    assert (row["tenants"], row["messages"], row["service"]) == (2, 4, 25)
    assert row["load"] == pytest.approx(100 / (2 * 3))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("at,tenant\n1,a\n", "must have the column 'channel', not only at, tenant"),
        ("at,channel\n", "must have at least one arrival, not none"),
        ("at,channel\n1,a\n2,a\n", "must have at least 2 channels, not only 'a'"),
        ("at,channel\n1,a\n,b\n", "at must be a number from -1e+12 to 1e+12 in each row, not None (row 2)"),
        ("at,channel\nx,a\ny,b\n", "at must be numbers, not string"),
        ("at,channel,cost\n1,a,-1\n", "cost must be a number from 0 to 1e+06 in each row, not -1 (row 1)"),
        ("at,channel\n1\n", "arrivals must be a CSV file, whose name ends in .csv, or Parquet, not"),
    ],
)
def test_a_file_that_can_t_be(tmp_path: Path, text: str, complaint: str) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "arrivals.csv"
    path.write_text(text)
    with pytest.raises(InvalidValue, match=re.escape(complaint)):
        run(Scenario(workload="file", arrivals=str(path)))


def test_no_file() -> None:
    pytest.importorskip("pyarrow")
    with pytest.raises(InvalidValue, match=r"^arrivals must be a file that is there, not"):
        run(Scenario(workload="file", arrivals="nowhere.parquet"))


def rows_of(**values: Any) -> list[dict[str, Any]]:
    values = {"scheduler": ["arrival", "fair"], "messages": 400, "tenants": 20, "workers": 2} | values
    return [row for scenario in grid(**values) for row in run(scenario)]


def test_the_answer() -> None:
    rows = rows_of(load=[0.5, 2.0], tenants=[10, 20])
    assert varied(rows) == ["tenants", "load"]
    assert fixed(rows) == "zipf, 2 workers, 400 messages, 1 s each, exponential service times, skew 1, seed 1"
    waits = {
        (row["scheduler"], row["group"]): seconds(row["wait_p99"])
        for row in rows
        if (row["load"], row["tenants"]) == (2, 20)
    }
    assert answer(rows).startswith("20 tenants, 2 workers, load 2, for ")
    assert answer(rows).endswith(
        f" s: quiet tenants' p99 wait is {waits['fair', 'quiet']} s with fair queueing, {waits['arrival', 'quiet']} s"
        f" in arrival order; that of noisy ones is {waits['fair', 'noisy']} s with fair queueing,"
        f" {waits['arrival', 'noisy']} s in arrival order."
    )


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"load": [0.5, 1, 2]},
        {"workload": ["zipf", "burst", "diurnal", "split"]},
        {"workload": ["zipf", "split"], "tenants": [10, 20], "max_concurrency": [None, 1], "weights": (2, 1)},
    ],
)
def test_a_picture_of_whatever_is_varied(tmp_path: Path, values: dict[str, Any]) -> None:
    draw(tmp_path / "picture.png", rows_of(**values))
    content = (tmp_path / "picture.png").read_bytes()
    width, height = struct.unpack(">II", content[16:24])
    assert content.startswith(b"\x89PNG")
    assert 900 < width < 2_000
    assert 200 < height < 2_000


def test_no_picture_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(InvalidValue, match="these sent nothing: take more messages"):
        draw(tmp_path / "picture.png", [row for row in rows_of() if row["group"] != "quiet"])


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--tenants", "10,many"], "--tenants: must be a whole number, or several with commas between, not 'many'"),
        (["--max-concurrency", "1,nought"], "--max-concurrency: must be a whole number or none, or several with"),
        (["--load", "0"], "load must be a number from 0.001 to 1000, not 0.0"),
        (["--picture", "picture.jpg"], "--picture: must end in .png, not 'picture.jpg'"),
        (["--out", "/nowhere/out.parquet"], "--out: can't be written: '/nowhere/out.parquet'"),
        (["--arrivals", "nowhere.csv"], "arrivals must be a file that is there, not 'nowhere.csv'"),
        (["--arrivals", "nowhere.csv", "--workload", "zipf"], "arrivals must be a file that is there"),
    ],
)
def test_a_command_line_that_can_t_be(options: list[str], complaint: str) -> None:
    """One line, and no Spark is started for it."""
    pytest.importorskip("pyarrow")
    result = CliRunner().invoke(simulate, options)
    assert result.exit_code == 2, result.output
    assert complaint in result.stderr
    assert result.stderr.count("\n") == 1
