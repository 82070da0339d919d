"""One running server: its addresses, its start, its end."""

import atexit
import contextlib
import ctypes
import fcntl
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Literal, Self
from urllib.parse import quote, urlencode

from fairqueue.embedded._files import ELSEWHERE, EmbeddedError, locked, trying
from fairqueue.embedded._programs import Programs

_PATIENCE = 60.0  # seconds for a start or a stop
_IMMEDIATELY = 10.0  # and for a stop by SIGQUIT, at which PostgreSQL itself has patience for 5
_SOCKET_PATH_BYTES = 103  # on the strictest system
_PR_SET_PDEATHSIG = 1


class Server:
    """A running server; made by :func:`ephemeral` and :func:`shared`."""

    user: Final = "postgres"

    def __init__(
        self,
        programs: Programs,
        directory: Path,
        users: int,
        settings: Mapping[str, str],
        *,
        tcp: bool,
        temporary: bool,
    ) -> None:
        self.version: Final = programs.version
        self.directory: Final = directory
        self.log: Final = directory / "log"
        self.port = _free_port() if tcp else 5432  # of a socket it is only part of the file's name
        self._programs = programs
        self._users: int | None = users
        self._settings = settings
        self._tcp = tcp
        self._temporary = temporary
        self._owner = os.getpid()
        self._child: subprocess.Popen[bytes] | None = None
        atexit.register(self.stop)
        try:
            self._join()
        except BaseException:
            self._leave()
            raise

    # Where it is.

    @property
    def socket_directory(self) -> str:
        return str(self.directory / "socket")

    @property
    def host(self) -> str:
        """The socket directory; 127.0.0.1 with ``tcp=True``."""
        return "127.0.0.1" if self._tcp else self.socket_directory

    @property
    def password(self) -> str | None:
        """Asked for on TCP only."""
        return (self.directory / "password").read_text() if self._tcp else None

    @property
    def dsn(self) -> str:
        """For psycopg, psql and every other client of libpq."""
        return self._url("postgresql", "postgres")

    def url(self, database: str = "postgres") -> str:
        """For SQLAlchemy."""
        return self._url("postgresql+psycopg", database)

    def _url(self, scheme: str, database: str) -> str:
        database = quote(database, safe="")
        if (password := self.password) is not None:
            return f"{scheme}://{self.user}:{password}@{self.host}:{self.port}/{database}"
        # A space is %20 for everybody; libpq would take a plus for a plus.
        place = urlencode({"host": self.host, "port": self.port}, quote_via=quote)
        return f"{scheme}://{self.user}@/{database}?{place}"

    @property
    def pid(self) -> int:
        """Of the postmaster."""
        if self._child is not None and self._child.poll() is None:
            return self._child.pid
        return int(self._postmaster()[0])

    # What can be done with it.

    def stop(self) -> None:
        """Leave; the last user stops the server. Again: does nothing."""
        if self._users is None or self._owner != os.getpid():  # a forked child runs our atexit too
            return
        with self._mutex():
            self._leave()

    def restart(self, mode: Literal["fast", "immediate"] = "fast") -> None:
        """Stop and start. "immediate" is a crash: the next start recovers from the log."""
        with self._mutex():
            self._halt(signal.SIGINT if mode == "fast" else signal.SIGQUIT)
            self._launch()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<Server PostgreSQL {self.version} in {self.directory}>"

    # How it is done. Of a shared server the mutex is held in all that follows.

    def _mutex(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._temporary else locked(self.directory / "mutex")

    def _join(self) -> None:
        # Whoever started it may have been killed meanwhile, and after a crash its last processes may linger.
        _wait(lambda: self._dead() or self._ready())
        if not self._ready():  # or it was killed just now, and was ready for that moment yet
            _wait(lambda: self._dead() or self._ready())
        if self._dead():
            self._launch()
            return
        self._check_started()
        state = self._postmaster()
        self.port = int(state[3])
        if self._tcp and not state[5].strip():
            raise EmbeddedError("The shared server runs without TCP: first stop the processes that use it.")

    def _leave(self) -> None:
        atexit.unregister(self.stop)
        try:
            if self._temporary:
                self._halt(signal.SIGQUIT)  # before its lock is free, which a sweep may have for a moment
        finally:
            if self._users is not None:
                fcntl.flock(self._users, fcntl.LOCK_UN)  # closing it would leave it with children forked from us
                os.close(self._users)
                self._users = None
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)
            return
        with trying(self.directory / "users") as last:
            if last:
                self._halt(signal.SIGINT)
            elif self._child is not None:
                self._child.returncode = 0  # it outlives us on purpose: nothing to wait for, nor to warn of

    def _launch(self) -> None:
        data, sockets = self.directory / "data", self.directory / "socket"
        if len(os.fsencode(sockets / f".s.PGSQL.{self.port}")) > _SOCKET_PATH_BYTES:
            message = f"{sockets} is too long for a socket: shorten FAIRQUEUE_PG_HOME or TMPDIR."
            raise EmbeddedError(message)
        if {",", '"'} & {*str(sockets)}:  # libpq takes the one for several folders, PostgreSQL the other for their end
            raise EmbeddedError(f"{sockets} holds a comma or a quotation mark: {ELSEWHERE}.")
        if not data.exists():
            self._initialise(data)
        elif (maker := (data / "PG_VERSION").read_text().strip()) != str(self._programs.major):
            raise EmbeddedError(
                f"{data} was made by PostgreSQL {maker}, but {self._programs.folder} is {self.version}. "
                f"Name programs of {maker} in FAIRQUEUE_PG_BIN, or remove {self.directory} to begin anew."
            )
        # No process of the former server lives, though the files it left behind may say so.
        (data / "postmaster.pid").unlink(missing_ok=True)
        shutil.rmtree(sockets, ignore_errors=True)
        self._make(sockets)
        settings = {
            **self._settings,
            "listen_addresses": "127.0.0.1" if self._tcp else "",
            "port": str(self.port),
            "unix_socket_directories": f'"{sockets}"',
        }
        command = [str(self._programs.folder / "postgres"), "-D", str(data)]
        command += (f"--{name}={value}" for name, value in settings.items())
        # The log holds statements, and with them data.
        with locked(self.directory / "server") as lock, open(self.log, "ab", opener=_with_mode(0o600)) as log:
            self._child = subprocess.Popen(
                command,
                **self._programs.options(),
                cwd=self.directory,
                stdout=log,
                stderr=log,
                pass_fds=[lock],  # beyond this block the lock is held by PostgreSQL
                start_new_session=True,  # Ctrl-C is for the program, which stops the server in its own time
                preexec_fn=_die_with_us() if self._temporary else None,  # noqa: PLW1509 (it makes two system calls)
            )
        _wait(lambda: self._dead() or self._ready())
        self._check_started()

    def _initialise(self, data: Path) -> None:
        fresh, password = data.with_name("data.new"), self.directory / "password"
        shutil.rmtree(fresh, ignore_errors=True)
        password.unlink(missing_ok=True)
        self._make(fresh)
        with open(password, "x", opener=_with_mode(0o400)) as file:
            file.write(secrets.token_urlsafe(24))
        self._give(password)
        # One order of text on every machine. Of the C library nothing but C is asked, as not each has C.UTF-8; that is
        # PostgreSQL's own.
        builtin = ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"] if self._programs.major >= 17 else []
        done = self._programs.run(
            "initdb",
            f"--pgdata={fresh}",
            f"--username={self.user}",
            f"--pwfile={password}",
            "--auth-local=trust",  # the socket's directory is closed to everybody else
            "--auth-host=scram-sha-256",
            "--encoding=UTF8",
            "--locale=C",
            *builtin,
            "--no-instructions",
            *(["--no-sync"] if self._temporary else []),
        )
        if done.returncode:
            problem = f"initdb failed as {self._programs.runner}: {done.stderr.strip()}"
            if self._programs.account and "Permission denied" in problem:
                problem += f"\nIt can't pass through a folder above {self.directory}: {ELSEWHERE}."
            raise EmbeddedError(problem)
        fresh.rename(data)

    def _make(self, directory: Path) -> None:
        directory.mkdir(mode=0o700)
        self._give(directory)

    def _give(self, path: Path) -> None:
        if account := self._programs.account:
            os.chown(path, account.pw_uid, account.pw_gid, follow_symlinks=False)

    def _check_started(self) -> None:
        if self._dead() or not self._ready():
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-10:])
            raise EmbeddedError(f"PostgreSQL {self.version} did not start in {self.directory}:\n{tail}")

    def _halt(self, signum: signal.Signals) -> None:
        for attempt in (signum, signal.SIGKILL):
            if self._dead():
                break
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, attempt)
            _wait(self._dead)
        if not self._dead():
            raise EmbeddedError(f"PostgreSQL {self.version} in {self.directory} cannot be stopped.")
        if self._child is not None:
            self._child.wait()  # at once: it is dead

    def _dead(self) -> bool:
        return _none_lives(self.directory)

    def _ready(self) -> bool:
        """Ready by its own account, the eighth line of postmaster.pid, which a crash leaves behind, and listening."""
        state = self._postmaster()
        if len(state) < 8 or state[7].strip() != "ready":
            return False
        with socket.socket(socket.AF_UNIX) as client:
            return client.connect_ex(f"{self.socket_directory}/.s.PGSQL.{state[3]}") == 0

    def _postmaster(self) -> list[str]:
        try:
            return (self.directory / "data/postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return []


def ended(directory: Path) -> bool:
    """End the server there, which nobody uses any more; whether no process of it lives.

    One outlives its owner where the kernel doesn't tell it of that death, as on macOS.
    """
    if not _none_lives(directory) and (pid := _orphan(directory / "data")):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGQUIT)
        _wait(lambda: _none_lives(directory), _IMMEDIATELY)
    return _none_lives(directory)


def _orphan(data: Path) -> int | None:
    """The postmaster on ``data``, by the file that it writes and by its command line: in another container the same
    number is another process, and that of one which is dead may have become another's."""
    try:
        pid = int((data / "postmaster.pid").read_text().split("\n")[0])
        ps = ["ps", "-ww", "-o", "command=", "-p", str(pid)]
        found = subprocess.run(ps, capture_output=True, check=False).stdout
    except (OSError, ValueError):  # no such file, or none that is whole; or no ps
        return None
    return pid if b" -D %b " % os.fsencode(data) in found else None


def _none_lives(directory: Path) -> bool:
    with trying(directory / "server") as free:
        return free


def _wait(condition: Callable[[], bool], patience: float = _PATIENCE) -> None:
    deadline = time.monotonic() + patience
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)


def _with_mode(mode: int) -> Callable[[str, int], int]:
    """Opens a file that has this mode if it is made by that."""
    return lambda path, flags: os.open(path, flags, mode)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _die_with_us() -> Callable[[], None] | None:
    """What the child does between fork and exec: ask the kernel for a signal at our death."""
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl  # bound beforehand
    parent = os.getpid()

    def die_with_us() -> None:
        prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGQUIT))
        if os.getppid() != parent:  # too late to be told
            os._exit(1)

    return die_with_us
