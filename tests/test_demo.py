"""The demo: as its user runs it, in a process of its own on the test's server, and step by step."""

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner
from pytest_postgresql.executors import NoopExecutor
from sqlalchemy import create_engine

from fairqueue.cli.program import program
from fairqueue.demo import figures, load, queues, report, run, tables, worker
from fairqueue.demo.command import demo
from fairqueue.demo.show import _server
from fairqueue.demo.work import examine
from fairqueue.testing._databases import Databases
from tests.fixtures.postgres import libpq

COMMAND = [sys.executable, "-m", "fairqueue.demo"]
#: In the one process of pytest that has run it.
of_one_demo = pytest.mark.xdist_group("demo")


@dataclass(frozen=True)
class Ended:
    """What a finished demo left: its words, its picture, and what was in the database before and after it."""

    code: int
    output: str
    errors: str
    picture: Path
    before: list[str]
    after: list[str]


@pytest.fixture(scope="module")
def ended(databases: Databases, template: NoopExecutor, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ended]:
    """A demo of 4 quiet tenants on 43 files, in a database where fairqueue is in use already."""
    files, picture = tmp_path_factory.mktemp("files"), tmp_path_factory.mktemp("picture") / "waits.png"
    write_files(files, 40)
    (files / "broken.py").write_text("def (:\n")
    (files / "text.txt").write_text("one\ntwo\n")
    (files / "binary").write_bytes(b"\0" * 100)
    with databases.create(template.template_dbname) as url:
        with psycopg.connect(libpq(url)) as connection:
            connection.execute("INSERT INTO fairqueue.message (channel) VALUES ('acme')")
        before = contents(url)
        options = ["--files", str(files), "--picture", str(picture), "--tenants", "4", "--workers", "2"]
        done = subprocess.run(
            COMMAND + options, env=environment(url), capture_output=True, text=True, timeout=100, check=False
        )
        yield Ended(done.returncode, done.stdout, done.stderr, picture, before, contents(url))


def write_files(folder: Path, number: int) -> None:
    for each in range(number):
        place = folder / f"package{each % 3}"
        place.mkdir(exist_ok=True)
        (place / f"module{each}.py").write_text(f"def function{each}(x):\n    return x + {each}\n" * 20)


def environment(url: str) -> dict[str, str]:
    return {**os.environ, "FAIRQUEUE_DSN": url, "COLUMNS": "80"}


def contents(url: str) -> list[str]:
    """The schemas and relations of a database, and the messages in its queue."""
    with psycopg.connect(libpq(url)) as connection:
        schemas = connection.execute(
            "SELECT nspname FROM pg_namespace WHERE nspname !~ '^pg_(toast_)?temp' ORDER BY 1"
        ).fetchall()
        relations = connection.execute(
            "SELECT oid::regclass::text FROM pg_class WHERE relnamespace::regnamespace::text !~ '^pg_' ORDER BY 1"
        ).fetchall()
        messages = connection.execute("SELECT channel, attempt FROM fairqueue.message").fetchall()
    return [str(row) for row in schemas + relations + messages]


@of_one_demo
def test_it_succeeds(ended: Ended) -> None:
    assert ended.code == 0, ended.errors
    assert "Traceback" not in ended.errors
    assert "A noisy tenant uploads 43 files, then 4 quiet tenants 3 each." in ended.output


@of_one_demo
def test_every_file_is_done_exactly_once(ended: Ended) -> None:
    assert "Every file has exactly one result, counted in SQL:" in ended.output
    for queue in queues.QUEUES.values():
        assert f"{queue.label:<13}  55 uploads, 55 results; 0 lost, 0 twice, 0 left" in ended.output
    assert " functions counted; 1 unparsable." in ended.output


@of_one_demo
def test_the_table_has_a_row_for_each_tenant_within_80_columns(ended: Ended) -> None:
    starts = [line.split("  ")[0].strip() for line in ended.output.splitlines() if "→" in line]
    assert starts == ["noisy", "quiet 1", "quiet 2", "quiet 3", "quiet 4", "all quiet", starts[-1]]
    assert all(len(line) <= 80 for line in ended.output.splitlines() if "→" in line)


@of_one_demo
def test_the_picture_is_a_png(ended: Ended) -> None:
    assert ended.picture.read_bytes().startswith(b"\x89PNG\r\n")
    assert str(ended.picture) in ended.output


@of_one_demo
def test_nothing_is_left_in_the_database(ended: Ended) -> None:
    assert ended.after == ended.before
    assert "('acme', 0)" in ended.after


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGHUP])
def test_nothing_is_left_after_ctrl_c(end: signal.Signals, database_url: str, tmp_path: Path) -> None:
    """Nor when its terminal is closed."""
    write_files(tmp_path, 500)
    before = contents(database_url)
    process = subprocess.Popen(
        [
            *COMMAND,
            "--files",
            str(tmp_path),
            "--picture",
            str(tmp_path / "waits.png"),
            "--workers",
            "1",
            "--tenants",
            "1",
        ],
        env=environment(database_url),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell's background job ignores Ctrl-C, and so would the demo if the tests ran in one.
        preexec_fn=lambda: signal.signal(end, signal.SIG_DFL),  # noqa: PLW1509
    )
    try:
        wait_for_results(database_url, process)
        os.killpg(process.pid, end)  # as a terminal sends it: to the workers too
        _, errors = process.communicate(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    # Ctrl-C within an exec() of text: CPython takes it for one that nobody has caught, and ends by the signal itself,
    # which shells call the same.
    code = 128 - process.returncode if end == signal.SIGINT and process.returncode < 0 else process.returncode
    assert code == 128 + end, errors
    assert end != signal.SIGINT or errors.endswith("Stopped. Nothing is left in the database.\n")
    if end != signal.SIGHUP:  # of which multiprocessing's own processes die loudly, with nobody there to see it
        assert "Traceback" not in errors
    assert contents(database_url) == before
    assert not (tmp_path / "waits.png").exists()


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGHUP])
def test_it_ends_when_it_is_told_to(end: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the code that shells have for that; and whoever called it has what was there before."""

    def harmless(*_: object) -> None:
        pass

    (tmp_path / "file").write_text("text")
    monkeypatch.setattr("fairqueue.demo.show._race", lambda *_: signal.raise_signal(end))
    before = signal.signal(end, harmless)
    try:
        with pytest.raises(SystemExit) as ended:
            demo.main(["--files", str(tmp_path), "--picture", str(tmp_path / "waits.png")])
        assert signal.getsignal(end) is harmless
    finally:
        signal.signal(end, before)
    assert ended.value.code == 128 + end


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_second_end_does_not_keep_things_from_being_removed(
    end: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    def handler(*_: object) -> None:
        raise SystemExit(end)

    removed: list[object] = []

    def migrate(*arguments: object) -> None:
        signal.raise_signal(end)
        removed.append(arguments[1])

    monkeypatch.setattr(tables, "_migrate", migrate)
    before = signal.signal(end, handler)
    try:
        tables._remove(create_engine("postgresql+psycopg://"), tables.Place.new(""))
        assert signal.getsignal(end) is handler, "it isn't ignored for ever"
    finally:
        signal.signal(end, before)
    assert removed == [tables.downgrade]


@pytest.mark.parametrize(
    ("given", "variable", "told"),
    [
        (False, False, "embedded, thrown away afterwards"),  # a variable that is empty names none
        (False, True, "at FAIRQUEUE_DSN, "),
        (True, True, "at --dsn, "),
    ],
)
def test_it_says_whose_server_it_is(
    given: bool, variable: bool, told: str, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIRQUEUE_DSN", database_url if variable else "")
    assert told in _server(tables.Place.new(database_url), database_url if given else None)


def wait_for_results(url: str, process: "subprocess.Popen[str]") -> None:
    deadline = time.monotonic() + 60
    with psycopg.connect(libpq(url), autocommit=True) as connection:
        while process.poll() is None and time.monotonic() < deadline:
            found = connection.execute(
                "SELECT quote_ident(nspname) FROM pg_namespace WHERE nspname ~ '^fairqueue_demo_[0-9a-f]{8}$'"
            ).fetchone()
            if found and connection.execute(f"SELECT 1 FROM {found[0]}.result LIMIT 1".encode()).fetchone():
                return
            time.sleep(0.02)
    pytest.fail(f"no results; the demo's exit code: {process.poll()}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may look everywhere")
def test_a_picture_where_one_may_not_look(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "closed").mkdir(0)
    with pytest.raises(SystemExit, match="2"):
        demo.main(["--picture", str(tmp_path / "closed" / "waits.png")])
    assert "--picture: can't be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--tenants", "0"], "--tenants: 0 is not in the range 1<=x<=1000"),
        (["--tenants", "many"], "--tenants: 'many' is not a valid integer"),
        (["--workers", "-1"], "--workers: -1 is not in the range 1<=x<=64"),
        (["--batch", "0.5"], "--batch: '0.5' is not a valid integer"),
        (["--files", "/nowhere"], "--files: Directory '/nowhere' does not exist"),
        (["--files", "{empty}"], "--files: no files in "),
        (["--picture", "waits.jpg"], "--picture: must end in .png"),
        (["--picture", "/nowhere/waits.png"], "--picture: can't be written"),
        (["--speed", "9"], "--speed"),
    ],
)
def test_a_bad_option_is_named_in_one_line(
    options: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        demo.main([option.format(empty=tmp_path) for option in options])
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.count("\n") == 1
    assert named in errors


@pytest.mark.parametrize(
    "dsn", ["mysql://localhost", "postgresql://nobody@/nowhere?host=/nowhere", "postgresql://u:p@s:s3cret@h/d"]
)
def test_a_database_out_of_reach_is_one_line(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("text")
    monkeypatch.setenv("FAIRQUEUE_DSN", dsn)
    with pytest.raises(SystemExit, match="1"):
        demo.main(["--files", str(tmp_path), "--picture", str(tmp_path / "waits.png")])
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.count("\n") == 1
    assert errors.startswith("fairqueue: ")
    assert "s3cret" not in errors


@pytest.mark.parametrize("error", [run.WorkersGone, tables.CleanupError])
def test_what_the_demo_cannot_go_on_without_is_one_line(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def race(*_: object) -> None:
        raise error("it is\ngone")

    (tmp_path / "file").write_text("text")
    monkeypatch.setattr("fairqueue.demo.show._race", race)
    with pytest.raises(SystemExit, match="1"):
        demo.main(["--files", str(tmp_path), "--picture", str(tmp_path / "waits.png")])
    assert capsys.readouterr() == ("", "fairqueue: it is gone\n")


def test_the_command_line_has_the_same_demo(tmp_path: Path) -> None:
    """With a database that is named there; DATABASE_URL is the application's, and not for demos."""
    (tmp_path / "file").write_text("text")
    options = ["--files", str(tmp_path), "--picture", str(tmp_path / "waits.png")]
    command = [sys.executable, "-m", "fairqueue.cli", "--dsn", "postgresql://nobody@/nowhere?host=/nowhere", "demo"]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("fairqueue: ")
    assert "/nowhere" in done.stderr
    assert program.commands["demo"] is demo

    refused = CliRunner().invoke(program, ["--dsn", "mysql://localhost", "demo", *options])
    assert (refused.exit_code, refused.stdout) == (2, "")
    said = "a database URL must begin with postgresql:// or postgresql+psycopg://, not mysql://"
    assert refused.stderr == f"fairqueue: {said}\n"


def test_a_quiet_tenant_is_served_in_the_first_round(empty_database_url: str, tmp_path: Path) -> None:
    write_files(tmp_path, 60)
    uploads = load.plan(tmp_path, load.find_files(tmp_path), 4)
    never = get_context("spawn").Event()
    with tables.installed(empty_database_url) as place, place.engine() as engine:
        run.upload(engine, uploads)
        for name, queue in queues.QUEUES.items():
            while worker.serve(engine, queue, name, 8, never):
                pass
        arrival, fair = (figures.measure(engine, name) for name in queues.QUEUES)
    assert [tenant.place for tenant in arrival.tenants] == [1, 61, 64, 67, 70]
    assert sorted(tenant.place for tenant in fair.tenants) == [1, 2, 3, 4, 5]
    assert arrival.count.exact
    assert fair.count.exact
    assert "at place 4 instead of 66;" in report.summary(arrival, fair)


def test_a_file_is_examined_for_what_it_is(tmp_path: Path) -> None:
    def kind(name: str, content: bytes) -> str:
        (tmp_path / name).write_bytes(content)
        return examine(str(tmp_path / name)).kind

    assert kind("a.py", b"lambda: 1\n") == "python"
    assert kind("b.py", b"def (") == "broken python"
    assert kind("c.py", b"\0") == "broken python"
    assert kind("d.py", b"-" * 100_000 + b"1") == "broken python"
    assert kind("e.txt", b"text") == "text"
    assert kind("f.txt", b"\0") == "binary"
    assert examine(str(tmp_path / "gone.py")).kind == "unreadable"


def test_the_findings_are_right(tmp_path: Path) -> None:
    path = tmp_path / "three.py"
    path.write_text("def one(): pass\nasync def two(): pass\nthree = lambda: 3\n")
    findings = examine(str(path))
    assert (findings.size, findings.lines, findings.functions) == (path.stat().st_size, 3, 3)
    assert findings.nodes > 10
    assert 0 < findings.compressed < findings.size
    assert len(findings.sha256) == 64


def test_of_a_large_file_only_the_beginning_is_examined(tmp_path: Path) -> None:
    """Or one of several GB, such as a film, would take longer than its lease, again and again."""
    path = tmp_path / "large"
    with path.open("wb") as file:
        file.truncate((64 << 20) + 1)
    findings = examine(str(path))
    assert (findings.kind, findings.size) == ("binary", 64 << 20)
    assert findings.sha256 == hashlib.sha256(bytes(64 << 20)).hexdigest()


@pytest.mark.parametrize(("files", "tenants"), [(1, 1), (2, 5), (1000, 3)])
def test_quiet_tenants_upload_distinct_files(files: int, tenants: int) -> None:
    paths = [f"/{number}" for number in range(files)]
    uploads = load.plan(Path("/"), paths, tenants)
    assert uploads.uploads[load.NOISY] == paths
    assert len(uploads.quiet) == tenants
    for tenant in uploads.quiet:
        assert len(set(uploads.uploads[tenant])) == len(uploads.uploads[tenant]) == min(load.FEW, files)
