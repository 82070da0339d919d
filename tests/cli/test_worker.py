"""``fairqueue worker``: real processes on real modules, and the signals that they get."""

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from sqlalchemy import make_url, text
from sqlalchemy.orm import Session

import fairqueue as fq
from fairqueue.cli import processes
from fairqueue.cli.worker import worker
from tests import acts
from tests.cli import COMMAND, in_folder_of

MODULE = """
import os, signal, time
from pathlib import Path
from sqlalchemy import create_engine
import fairqueue as fq

engine = create_engine(os.environ["DATABASE_URL"])
app = fq.Worker(engine, concurrency=2, poll=0.05, grace={grace})
other = fq.Worker(engine, queue="other", concurrency=2, poll=0.05)
nothing = 1

@app.handler
def work(message, session):
    if message.payload == "sleep":
        Path("asleep").touch()
        time.sleep(60)
    if message.payload == "fail":
        raise ValueError("failed")
    if message.payload == "die" and message.attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)

@other.handler
async def work_too(message):
    pass
"""


def _heed_signals() -> None:
    """A shell's background job ignores Ctrl-C, and with nohup its end, and so would it if the tests ran in one."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Program:
    """``fairqueue worker`` in a folder with a module, and what it says."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        self.environment = os.environ | {"DATABASE_URL": url, "PYTHONUNBUFFERED": "1"}
        package = folder / "shop"
        package.mkdir()
        (package / "__init__.py").write_text("__import__('sys').modules['psycopg2'] = None  # as if it isn't installed")
        (package / "jobs.py").write_text(MODULE.format(grace=30))
        (package / "hasty.py").write_text(MODULE.format(grace=0))
        (package / "other_driver.py").write_text("__import__('sqlalchemy').create_engine('postgres://localhost/app')")
        self.log = folder / "log"

    @contextlib.contextmanager
    def running(self, *arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
        with (
            self.log.open("wb") as log,
            subprocess.Popen(
                [*COMMAND, "worker", *arguments],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=log,
                preexec_fn=_heed_signals,  # noqa: PLW1509
            ) as process,
        ):
            try:
                yield process
            finally:
                process.kill()  # and its children, if any, go with it

    def said(self) -> str:
        return self.log.read_text()

    def workers(self, queue: str = "default") -> list[int]:
        """The processes that said that they work on a queue."""
        return [
            int(pid) for pid in re.findall(rf" (\d+) INFO fairqueue\.worker: \S+ works on queue '{queue}'", self.said())
        ]


@pytest.fixture
def program(tmp_path: Path, database_url: str) -> Program:
    return Program(tmp_path, database_url)


def left(session: Session) -> int:
    session.rollback()
    return session.query(fq.Message).count()


def alive(pid: int) -> bool:
    """A process that is neither gone nor dead and merely not yet asked for."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:  # also where it goes while we read
        return False
    except FileNotFoundError:  # no Linux
        return True


def test_it_works_until_it_is_told_to_stop(program: Program, session: Session) -> None:
    acts.put(session, "acme", 3)
    acts.put(session, "acme", 3, queue="other")
    with program.running("shop.jobs:app", "shop.jobs:other") as process:
        acts.wait_until(lambda: left(session) == 0)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    assert "Traceback" not in program.said()


def test_unfinished_work_is_told_by_the_exit_code(program: Program, session: Session) -> None:
    """That of a process, and so that of several."""
    acts.put(session, "acme", payload="sleep")
    with program.running("shop.hasty:app", "--processes", "2") as process:
        acts.wait_until((program.folder / "asleep").exists)
        process.terminate()
        assert process.wait(30) == 3
    assert left(session) == 1


def test_several_processes(program: Program, session: Session) -> None:
    """One that dies is replaced, and one that somebody else stops; all of them stop together.

    That one ends with 0: it has done as it was told, but not by the parent, which still wants so many of them.
    """
    with program.running("shop.jobs:app", "--processes", "3") as process:
        acts.wait_until(lambda: len(program.workers()) == 3)
        first = program.workers()
        assert len({*first, process.pid}) == 4
        assert all(map(alive, first))

        (id_,) = acts.put(session, "acme", payload="die")
        acts.wait_until(lambda: len(program.workers()) == 4)
        assert "was killed by SIGKILL; another one in" in program.said()
        acts.expire(session, [id_])
        acts.wait_until(lambda: left(session) == 0)

        stopped = next(filter(alive, first))
        os.kill(stopped, signal.SIGTERM)
        acts.wait_until(lambda: len(program.workers()) == 5)
        assert f"worker process {stopped} ended with exit code 0; another one in" in program.said()

        pids = [pid for pid in program.workers() if alive(pid)]
        assert len(pids) == 3
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert not any(map(alive, pids))
    assert "Traceback" not in program.said()


@pytest.mark.parametrize("processes", [1, 2])
def test_loggers_that_a_module_disables(program: Program, session: Session, processes: int) -> None:
    """As dictConfig() does by default with those that are there: what fairqueue has to say is seen all the same."""
    (program.folder / "shop" / "logs.py").write_text(
        "import logging.config\n"
        "logging.getLogger('shop').info('before')\n"
        f"logging.config.dictConfig({{'version': 1}})\n{MODULE.format(grace=30)}"
        "logging.getLogger('shop.late').info('after')\n"
    )
    acts.put(session, "acme", payload="fail", max_attempts=1)
    with program.running("shop.logs:app", "--processes", str(processes)) as process:
        acts.wait_until(lambda: len(program.workers()) == processes and left(session) == 0)
        process.terminate()
        assert process.wait(30) == 0
    said = program.said()
    assert "the message is a dead letter now" in said
    assert "ValueError: failed" in said
    for name, word in {"shop": "before", "shop.late": "after"}.items():
        assert len(re.findall(rf"^\d.* INFO {name}: {word}$", said, re.MULTILINE)) == processes


def test_logging_that_a_module_sets_up(program: Program) -> None:
    """In the plainest way, which has no effect where it is set up already. The level is that of the option."""
    (program.folder / "shop" / "logs.py").write_text(
        f"import logging\nlogging.basicConfig(format='mine: %(message)s')\n{MODULE.format(grace=30)}"
    )
    with program.running("shop.logs:app") as process:
        acts.wait_until(lambda: re.search(r"^mine: .* works on queue", program.said(), re.MULTILINE))
        process.terminate()
        assert process.wait(30) == 0
    assert program.workers() == []


def test_the_processes_end_with_a_parent_that_is_killed(program: Program, session: Session) -> None:
    acts.put(session, "acme", 3)
    with program.running("shop.jobs:app", "--processes", "2") as process:
        acts.wait_until(lambda: len(program.workers()) == 2 and left(session) == 0)
        pids = program.workers()
        assert all(map(alive, pids))
        process.kill()
        acts.wait_until(lambda: not any(map(alive, pids)))
    assert program.said().count("has stopped; handed back unfinished: 0") == 2


def test_the_processes_end_before_their_parent_when_the_terminal_is_closed(program: Program, session: Session) -> None:
    acts.put(session, "acme", 3)
    with program.running("shop.jobs:app", "--processes", "2") as process:
        acts.wait_until(lambda: len(program.workers()) == 2 and left(session) == 0)
        pids = program.workers()
        process.send_signal(signal.SIGHUP)
        assert process.wait(30) == 0
        assert not any(map(alive, pids))
    assert program.said().count("has stopped; handed back unfinished: 0") == 2


def test_a_signal_while_another_one_is_handled() -> None:
    """Wherever it has got to."""
    slot = processes._Slot(["sleep", "60"])
    interrupted = 0

    def interrupt(_: object, what: str, __: object) -> Any:
        nonlocal interrupted
        if what == "line":
            interrupted += 1
            slot.stop()
        return interrupt

    def stop() -> None:
        sys.settrace(interrupt)
        slot.stop()
        sys.settrace(None)

    stopping = threading.Thread(target=stop, daemon=True)
    stopping.start()
    stopping.join(10)
    assert not stopping.is_alive()
    assert interrupted > 1


def test_a_process_is_not_told_again_by_a_terminal(tmp_path: Path) -> None:
    """Its shell sends a signal, and the system: the second one would have it not wait for its handlers."""
    heeds = f"trap 'echo . >> {tmp_path}/told' TERM; touch {tmp_path}/ready"
    slot = processes._Slot(["sh", "-c", f"{heeds}; until [ -e {tmp_path}/end ]; do sleep 0.01; done"])
    slot.thread.start()
    acts.wait_until((tmp_path / "ready").exists)
    slot.stop(again=False)
    acts.wait_until((tmp_path / "told").exists)
    slot.stop(again=False)
    (tmp_path / "end").touch()
    slot.thread.join(30)
    assert not slot.thread.is_alive()
    assert (tmp_path / "told").read_text() == ".\n"


@pytest.fixture
def here(program: Program, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process works in the program's folder."""
    monkeypatch.setenv("DATABASE_URL", program.environment["DATABASE_URL"])
    with in_folder_of(program.folder / "shop"):
        yield


@pytest.mark.parametrize(
    ("app", "said"),
    [
        ("nowhere:app", "nowhere:app: no module named 'nowhere'; start it where the module can be imported from"),
        ("shop.nowhere:app", "no module named 'shop.nowhere'"),
        ("shop.jobs:none", "shop.jobs has no 'none'; its workers are app, other;"),
        ("shop.jobs:nothing", "shop.jobs:nothing: must be a fairqueue.Worker, not int"),
        ("shop:app", "shop has no 'app'; it has no fairqueue.Worker;"),
        (
            "shop.other_driver:app",
            "dialects:postgres; an engine's URL begins with postgresql+psycopg://",
        ),
    ],
)
@pytest.mark.usefixtures("here")
def test_what_is_no_worker_is_told_in_one_line(app: str, said: str) -> None:
    """By a process, too: see test_several_processes_of_no_worker_are_not_replaced."""
    done = CliRunner().invoke(worker, [app])
    assert (done.exit_code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("fairqueue: ")
    assert said in line


@pytest.mark.usefixtures("here")
def test_a_worker_that_is_named_twice() -> None:
    done = CliRunner().invoke(worker, ["shop.jobs:app", "shop.jobs:other", "shop.jobs:app"])
    said = "fairqueue: shop.jobs:app: is named more than once; see `worker --help`\n"
    assert (done.exit_code, done.stderr) == (2, said)


def test_several_processes_of_no_worker_are_not_replaced(program: Program) -> None:
    with program.running("shop.jobs:none", "--processes", "2") as process:
        assert process.wait(30) == 2
    assert program.said().count("shop.jobs has no 'none'") == 2
    assert program.said().count("ended with exit code 2: the command line is wrong, so no other one is started") == 2
    assert program.said().count("\n") == 4


def test_modules_of_a_project_are_not_taken_for_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though several processes are started in its folder, by the names of modules."""
    for name in ("click", "queue"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of the project')")
    monkeypatch.chdir(tmp_path)
    commands: list[list[str]] = []
    monkeypatch.setattr(processes, "supervise", lambda command, _: commands.append(command))
    CliRunner().invoke(worker, ["jobs:app", "--processes", "2"], catch_exceptions=False)
    done = subprocess.run([*commands[0], "--help"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_folder_goes_before_other_modules_of_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is on the path already, behind others, as of what is installed from there."""
    for folder, app in {"other": "''", "here": "0"}.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "jobs_of_a_folder.py").write_text(f"app = {app}")
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "other"), *sys.path, str(tmp_path / "here")])
    commands: list[list[str]] = []
    monkeypatch.setattr(processes, "supervise", lambda command, _: commands.append(command))
    CliRunner().invoke(worker, ["jobs_of_a_folder:app", "--processes", "2"], catch_exceptions=False)
    assert "-P" in commands[0]
    refused = CliRunner().invoke(worker, ["jobs_of_a_folder:app"])
    assert "must be a fairqueue.Worker, not int" in refused.output


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("import there_is_no_such_module", "ModuleNotFoundError: "),
        ("import psycopg2", "ModuleNotFoundError: "),
        ("import psycopg.nothing", "ModuleNotFoundError: "),
        ("from psycopg import errros", "ImportError: cannot import name 'errros'"),
        (r"'\ud800'.encode()", "UnicodeEncodeError: "),
        (
            "__import__('sqlalchemy.orm').orm.registry().mapped(type('A', (), {'__tablename__': 'a'}))",
            "ArgumentError: ",
        ),
    ],
)
def test_a_mistake_in_a_module_is_told_in_full(program: Program, line: str, said: str) -> None:
    (program.folder / "shop" / "broken.py").write_text(line)
    with program.running("shop.broken:app") as process:
        assert process.wait(30) == 1
    _, first, *_, last = program.said().splitlines()
    assert 'broken.py", line 1, in <module>' in first  # without the lines that led there
    assert last.startswith(f"fairqueue: shop.broken can't be imported: {said}")


def test_a_driver_that_an_engine_takes_for_granted_is_told_in_one_line(program: Program) -> None:
    (program.folder / "shop" / "broken.py").write_text(
        "__import__('sqlalchemy').create_engine('postgresql+psycopg2:///')"
    )
    with program.running("shop.broken:app") as process:
        assert process.wait(30) == 1
    assert program.said() == (
        "fairqueue: psycopg2 is not installed; begin the engine's URL with postgresql+psycopg://\n"
    )


def test_a_role_without_rights_is_told_which_one_it_needs(
    program: Program, database_url: str, session: Session
) -> None:
    role = f"no_worker_{secrets.token_hex(4)}"
    session.execute(text(f"CREATE ROLE {role} LOGIN PASSWORD 'x'"))
    session.commit()
    program.environment["DATABASE_URL"] = (
        make_url(database_url).set(username=role, password="x").render_as_string(hide_password=False)
    )
    try:
        with program.running("shop.jobs:app", "--log-level", "error") as process:
            assert process.wait(30) == 1
    finally:
        session.execute(text(f"DROP ROLE {role}"))
        session.commit()
    assert program.said() == (
        "fairqueue: permission denied for schema fairqueue; the owner of the queue's schema can give the right:"
        " `fairqueue grant ROLE worker`\n"
    )


def test_a_database_without_the_queue_is_told_in_one_line(program: Program, empty_database_url: str) -> None:
    program.environment["DATABASE_URL"] = empty_database_url
    with program.running("shop.jobs:app", "--log-level", "error") as process:
        assert process.wait(30) == 1
    assert program.said().startswith("fairqueue: schema 'fairqueue' has no fairqueue")
    assert program.said().count("\n") == 1


def stop(slot: processes._Slot) -> None:
    slot.stop()
    slot.thread.join(30)
    assert not slot.thread.is_alive()


def test_pauses_grow_and_end_with_a_stop(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What can't start isn't started again and again as fast as possible; a stop needn't wait for the pause."""
    monkeypatch.setattr(processes, "_FIRST_PAUSE", 0.001)
    slot = processes._Slot(["sh", "-c", f"echo >> {tmp_path}/starts; exit 7"])
    slot.thread.start()
    acts.wait_until(lambda: len(caplog.messages) > 7)
    stop(slot)
    assert slot.code == 7
    pauses = [float(message.split()[-2]) for message in caplog.messages]
    assert pauses[7] >= 0.1 > pauses[0]
    assert all("ended with exit code 7" in message for message in caplog.messages)


def test_it_goes_on_however_often_it_has_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a night without the database: 2**1024 seconds are more than a float holds."""
    assert 0 < processes._pause(2000) <= processes._LONGEST_PAUSE
    monkeypatch.setattr(processes, "_FIRST_PAUSE", 0.0)
    slot = processes._Slot([f"{tmp_path}/nothing"])
    slot.thread.start()
    acts.wait_until(lambda: len(caplog.messages) > 20 or not slot.thread.is_alive())
    assert slot.thread.is_alive()
    stop(slot)


def test_it_goes_on_after_a_signal_without_a_name(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_FIRST_PAUSE", 0.001)
    number = signal.SIGRTMIN + 1
    slot = processes._Slot([sys.executable, "-c", f"import os; os.kill(os.getpid(), {number:d})"])
    slot.thread.start()
    acts.wait_until(lambda: len(caplog.messages) > 1 or not slot.thread.is_alive())
    assert slot.thread.is_alive()
    stop(slot)
    assert f" was killed by signal {number:d}; another one in" in caplog.text


def test_what_has_worked_is_tried_again_when_its_command_line_is_wrong(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while a new release is being put in its place."""
    # It stops in the third pause, as the next process might be killed before it says anything.
    pauses = iter((0.001, 0.001, 3600.0))
    monkeypatch.setattr(processes, "_pause", lambda _: next(pauses))
    monkeypatch.setattr(processes, "_SETTLED", 0.05)
    first = f"test -e {tmp_path}/begun || {{ touch {tmp_path}/begun; sleep 0.1; exit 1; }}; exit 2"
    slot = processes._Slot(["sh", "-c", first])
    slot.thread.start()
    acts.wait_until(lambda: caplog.text.count("ended with exit code 2; another one in") > 1)
    stop(slot)
    assert slot.code == 2


def test_what_cannot_be_started_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_FIRST_PAUSE", 0.001)
    slot = processes._Slot([f"{tmp_path}/later"])
    slot.thread.start()
    acts.wait_until(lambda: "worker process could not be started: [Errno 2]" in caplog.text)
    (tmp_path / "later").symlink_to("/bin/cat")  # which goes on until its stdin ends, and says nothing
    acts.wait_until(lambda: slot._process is not None)
    stop(slot)
    assert slot.code == 0


def test_what_is_stopped_before_it_was_started_is_not_started(tmp_path: Path) -> None:
    slot = processes._Slot(["touch", f"{tmp_path}/started"])
    slot.stop()
    slot.thread.start()
    slot.thread.join(30)
    assert not slot.thread.is_alive()
    assert not (tmp_path / "started").exists()
