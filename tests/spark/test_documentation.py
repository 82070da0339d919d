"""Everything in docs/spark.md runs as written, and so does the demo."""

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from click.testing import CliRunner
from sqlalchemy import Engine, select
from sqlalchemy.orm import Session

import fairqueue as fq
from examples.spark_pipeline import main
from tests.acts import complete, lease_of, put
from tests.fixtures.postgres import libpq
from tests.fixtures.spark import on_spark
from tests.pages import ROOT, blocks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = on_spark

PAGE = (ROOT / "docs" / "spark.md").read_text("utf-8")


def test_page(spark: "SparkSession", engine: Engine, database_url: str, tmp_path: Path) -> None:
    """The Python of the page from top to bottom: enqueued, read, followed."""
    (tmp_path / "incoming").mkdir()
    (tmp_path / "incoming" / "1.json").write_text(json.dumps({"channel": "initech", "payload": "7"}))
    with Session(engine) as session:
        put(session, "acme")
        complete(session, lease_of(session))
    for _, code in blocks(PAGE, "python"):
        for name in ("incoming", "checkpoint", "outcomes", "outcomes-checkpoint"):
            code = code.replace(f'"{name}"', repr(str(tmp_path / name)))  # noqa: PLW2901 (the JVM has a folder of its own)
        exec(compile(code, "docs/spark.md", "exec"), {"url": libpq(database_url)})  # noqa: S102 (what the page says)
    with Session(engine) as session:
        found = {(m.channel, m.key, str(m.payload)) for m in session.scalars(select(fq.Message))}
    assert found == {("acme", "1", "{'pages': 3}"), ("globex", "2", "{'pages': 1}"), ("initech", None, "7")}
    assert spark.read.parquet(str(tmp_path / "outcomes")).count() == 1


@pytest.mark.parametrize("names", [["archive", "report"], ["documents.parquet", "thesis.tex"]])
def test_the_demo_empties_no_folder_of_others(tmp_path: Path, names: list[str]) -> None:
    pytest.importorskip("pyspark")
    for name in names:
        (tmp_path / name).touch()
    result = CliRunner().invoke(main, ["--out", str(tmp_path)])
    assert result.exit_code == 1
    assert "has something that this demo hasn't made, and would be lost" in result.output
    assert sorted(each.name for each in tmp_path.iterdir()) == names


def test_commands_exist() -> None:
    from fairqueue.cli.spark import spark as group

    named = set(re.findall(r"`fairqueue spark (\w+)", PAGE))
    assert named == group.commands.keys()
