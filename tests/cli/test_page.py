"""The examples of docs/cli.md, one after the other, as they stand."""

import doctest
import os
import shlex
import signal
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner
from sqlalchemy import create_engine, text

import fairqueue as fq
from fairqueue.cli.program import program
from tests import acts
from tests.cli import COMMAND, in_folder_of
from tests.pages import ROOT, blocks

PAGE = (ROOT / "docs" / "cli.md").read_text("utf-8")

# What stands in the reader's queue. The clock stands still, so that ages are what the page says.
SETTING = """
CREATE OR REPLACE FUNCTION fairqueue.clock() RETURNS timestamptz LANGUAGE sql VOLATILE PARALLEL SAFE
RETURN timestamptz '2030-01-01 12:00+00';
INSERT INTO fairqueue.message (channel, payload, created_at, dequeue_at)
SELECT 'acme', jsonb_build_object('document', i), t, fairqueue.unix_ms(t)
FROM generate_series(1, 5) i, (SELECT fairqueue.clock() - interval '60 s' AS t) c;
INSERT INTO fairqueue.message (channel, dequeue_at) VALUES ('acme', fairqueue.unix_ms(fairqueue.clock()) + 60000);
INSERT INTO fairqueue.message (channel, created_at, dequeue_at)
SELECT 'globex', t, fairqueue.unix_ms(t) FROM generate_series(1, 880),
    (SELECT fairqueue.clock() - interval '7 min' AS t) c;
INSERT INTO fairqueue.message (channel, created_at, dequeue_at)
SELECT 'umbrella', t, fairqueue.unix_ms(t) FROM generate_series(1, 30),
    (SELECT fairqueue.clock() - interval '3 s' AS t) c;
INSERT INTO fairqueue.message (channel, dequeue_at, leased_until, leased_at, attempt)
SELECT c, 0, fairqueue.clock() + interval '1 min', fairqueue.clock(), 1
FROM unnest(ARRAY['globex', 'globex', 'acme']) c;
INSERT INTO fairqueue.dead_message (id, queue, channel, cost, attempt, error, created_at, died_at)
VALUES (9170, 'default', 'initech', 1, 1, 'ValueError: no page 7', fairqueue.clock(),
    fairqueue.clock() - interval '2 min');
INSERT INTO fairqueue.history (message_id, queue, channel, outcome, attempt, cost, dequeue_at, created_at)
SELECT 5000 + i, 'default', CASE WHEN i <= 10 THEN 'globex' ELSE 'acme' END, 'completed', 1, 1, 0, fairqueue.clock()
FROM generate_series(1, 200) i;
INSERT INTO fairqueue.queue (name, max_concurrency) VALUES ('default', 50);
INSERT INTO fairqueue.channel (name, max_concurrency, release_interval_ms, paused, resume_at)
VALUES ('globex', 2, NULL, false, NULL), ('initech', NULL, 100, false, NULL),
    ('umbrella', NULL, NULL, true, fairqueue.clock() + interval '1 h');
SELECT fairqueue.queue_repair('default');
"""


class Reader:
    """Types what the page says into a terminal of 80 columns."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.variables = {"FAIRQUEUE_DSN": url, "DATABASE_URL": url, "COLUMNS": "80"}

    def types(self, command: str, expected: str) -> None:
        name, *arguments = shlex.split(command)
        assert name == "fairqueue"
        done = CliRunner().invoke(program, arguments, env=self.variables)
        assert (done.exit_code, done.stderr) == (0, ""), command
        same = doctest.OutputChecker().check_output(
            expected, done.stdout, doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        )
        assert same or not expected, f"{command}\n{done.stdout}"

    def types_and_stops(self, command: str) -> None:
        """One that goes on until it is stopped, once it has begun."""
        with (self.folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [*COMMAND, *shlex.split(command)[1:]],
                cwd=self.folder,
                env=os.environ | self.variables,
                stdout=log,
                stderr=log,
            )
            try:
                acts.wait_until(lambda: "works on queue" in (self.folder / "log").read_text())
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == 0, command
            finally:
                process.kill()
                process.wait()


@pytest.fixture
def reader(tmp_path: Path, empty_database_url: str) -> Iterator[Reader]:
    for name, code in blocks(PAGE, "python"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code)
    engine = create_engine(empty_database_url)
    with engine.begin() as connection:
        connection.execute(text("DROP ROLE IF EXISTS app_web"))
        connection.execute(text("CREATE ROLE app_web"))
    yield Reader(tmp_path, empty_database_url)
    with engine.begin() as connection:
        connection.execute(text("DROP ROLE app_web"))
    engine.dispose()


def examples() -> Iterator[tuple[str, str]]:
    """The commands of the page, each with what it prints."""
    for _, block in blocks(PAGE, "console"):
        for example in block.removeprefix("$ ").split("\n$ "):
            command, _, expected = example.partition("\n")
            yield command, expected and expected.rstrip("\n") + "\n"


@pytest.mark.slow
def test_the_page(reader: Reader, empty_database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the commands that start workers only one does so; the others are read, and say what they would start."""
    monkeypatch.chdir(reader.folder)
    started: list[int] = []

    def run(*workers: fq.Worker) -> int:
        started.append(len(workers))
        return 0

    def supervise(command: Sequence[str], processes: int) -> int:
        started.append(processes)
        return 0

    monkeypatch.setattr("fairqueue.worker.run", run)
    monkeypatch.setattr("fairqueue.cli.processes.supervise", supervise)
    typed = 0
    for command, expected in examples():
        if command.startswith("pip "):
            continue
        if command == "fairqueue worker shop.jobs:app shop.jobs:reports":
            reader.types_and_stops(command)
        elif command.startswith("fairqueue worker"):
            with in_folder_of(reader.folder / "shop"):
                reader.types(command, expected)
        elif command.startswith("fairqueue demo"):
            reader.types(f"{command} --workers 1", expected)
        else:
            reader.types(command, expected)
        typed += 1
        if typed == 2:  # it is installed
            engine = create_engine(empty_database_url)
            with engine.begin() as connection:
                connection.exec_driver_sql(SETTING, execution_options={"no_parameters": True})
            engine.dispose()
    assert typed > 20
    assert started == [1, 4]
