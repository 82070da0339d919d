"""Whatever goes wrong at the command line is one line on stderr, with the way out, and an exit code."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import click
import psycopg
import pytest
from click.testing import CliRunner
from sqlalchemy import Engine, create_engine, event, make_url, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

import fairqueue as fq
from fairqueue import embedded
from fairqueue.cli import status
from fairqueue.cli.base import Command
from fairqueue.cli.program import program
from fairqueue.cli.target import make_engine
from tests import acts
from tests.cli import COMMAND


def complaint(*arguments: str, code: int, environment: dict[str, str] | None = None) -> str:
    """The one line that is all that comes."""
    empty = {"FAIRQUEUE_DSN": None, "DATABASE_URL": None, "FAIRQUEUE_SCHEMA": None}
    result = CliRunner().invoke(program, arguments, env={**empty, **(environment or {})})
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert result.stderr.startswith("fairqueue: ")
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    return result.stderr.removeprefix("fairqueue: ").removesuffix("\n")


@pytest.mark.shared_database
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["frob"], "No such command 'frob'"),
        (["status", "--frob"], "No such option"),
        (["status", ""], "queue must have 1 to 255 characters"),
        (["status", "--limit", "-1"], "--limit: "),
        (["status", "--watch", "--json"], "leave --watch out"),
        (["status", "--watch", "mails"], "--watch: must be a number of seconds, not 'mails'; name the queue before it"),
        (["status", "--watch", "0"], "--watch: must be from 0.1 to 86400 seconds, not 0"),
        (["status", "--watch", "nan"], "--watch: must be from 0.1 to 86400 seconds, not nan"),
        (["status", "--watch", "inf"], "--watch: must be from 0.1 to 86400 seconds, not inf"),
        (["channel", "set", "acme"], "nothing to set: give at least one of --weight, --max-concurrency, "),
        (["channel", "set", "acme", "--weight", "heavy"], "--weight: must be a number or 'default', not 'heavy'"),
        (["channel", "set", "acme", "--weight", "nan"], "weight must be a number from 0.01 to 1000, not nan"),
        (["channel", "set", "acme", "--burst", "1.5"], "--burst: must be a whole number or 'default', not '1.5'"),
        (["channel", "set", "acme", "--overflow", "spill"], "overflow must be 'reject' or 'drop', not 'spill'"),
        (["channel", "set", "", "--weight", "1"], "name must have 1 to 255 characters, not 0"),
        (["channel", "pause"], "Missing argument 'NAME'; see `fairqueue channel pause --help`"),
        (["channel", "pause", "acme", "--until", "2030-01-01"], "--until: must be a time with its zone, such as 20"),
        (["channel", "pause", "acme", "--until", "soon"], "--until: must be a time with its zone"),
        (["channel", "pause", "acme", "--for", "10"], "with s, m, h or d behind it, such as 10m, not '10'"),
        (["channel", "pause", "acme", "--for", "1000000s"], "--for: must be a whole number of at most six digits with"),
        (["channel", "pause", "acme", "--for", "1.5h"], "--for: must be a whole number of at most six digits with"),
        (["channel", "pause", "acme", "--for", "1m", "--until", "2030-01-01T00:00:00Z"], "only one of --until and"),
        (
            ["channel", "pause", "acme", "--until", "9999-12-31T23:59:59+00:00"],
            "until must be in the years 2 to 9998 (UTC), not 9999-12-31T23:59:59+00:00: leave it out for no end",
        ),
        (
            ["channel", "pause", "acme", "--until", "2020-01-31T09:00:00+00:00"],
            "--until must be a time ahead, not 2020-01-31 09:00:00+00:00, as the clock of the queue says 20",
        ),
        (["channel", "pause", "acme", "--for", "0s"], "--for must be longer than 0; `fairqueue channel resume`"),
        (["queue", "set"], "Missing argument 'NAME'"),
        (
            ["queue", "set", "mails"],
            "nothing to set: give at least one of --max-concurrency, --max-attempts, --backoff, --max-backoff, ",
        ),
        (
            ["queue", "set", "mails", "--max-attempts", "many"],
            "--max-attempts: must be a whole number or 'default', not 'many'; see `fairqueue queue set --help`",
        ),
        (["queue", "set", "mails", "--backoff", "1m"], "--backoff: must be a number or 'default', not '1m'"),
        (["queue", "set", "mails", "--history-days", "7.5"], "--history-days: must be a whole number or 'default'"),
        (["queue", "set", "mails", "--max-attempts", "0"], "max_attempts must be a whole number from 1 to 2147483647"),
        (["queue", "set", "mails", "--max-backoff", "nan"], "max_backoff must be between 0 and 31557600 seconds"),
        (["queue", "set", "mails", "--history-days", "36501"], "history_days must be a whole number from 0 to 36500"),
        (
            ["queue", "set", "mails", "--max-concurrency", "5", "--channel-weight", "0"],
            "channel_weight must be a number from 0.01 to 1000, not 0.0",
        ),
        (["queue", "set", "mails", "--channel-overflow", "spill"], "channel_overflow must be 'reject' or 'drop'"),
        (["queue", "set", "", "--max-attempts", "1"], "name must have 1 to 255 characters, not 0"),
        (["queue", "pause"], "Missing argument 'NAME'"),
        (["queue", "pause", ""], "queue must have 1 to 255 characters, not 0"),
        (["queue", "pause", "mails", "--for", "1m", "--until", "2030-01-01T00:00:00Z"], "only one of --until and"),
        (["queue", "pause", "mails", "--until", "2020-01-31T09:00:00+00:00"], "--until must be a time ahead, not 2020"),
        (["queue", "pause", "mails", "--for", "0s"], "--for must be longer than 0; `fairqueue queue resume` ends a"),
        (["queue", "resume"], "Missing argument 'NAME'"),
        (["queue", "resume", ""], "queue must have 1 to 255 characters, not 0"),
        (["message", "show", "x"], "ID: the id of a message is a whole number from 1 on, not 'x'"),
        (["message", "show", "0"], "ID: the id of a message is a whole number from 1 on, not '0'"),
        (["message", "show", str(2**63)], "ID: the id of a message is a whole number from 1 on, not"),
        (["message", "show", "9" * 5000], "ID: the id of a message is a whole number from 1 on, not"),
        (["message", "cancel"], "Missing argument 'ID...'"),
        (["message", "cancel", str(2**63)], "ID...: "),
        (["dead", "redrive"], "give either their IDs, or --queue"),
        (["dead", "redrive", "1", "--queue", "default"], "give either their IDs, or --queue"),
        (["dead", "list", "--channel", "acme"], "give --queue too"),
        (["dead", "list", "--limit", str(2**63)], "--limit: "),
        (["dead", "list", "--queue", ""], "queue must have 1 to 255 characters"),
        (["dead", "list", "--queue", "q", "--channel", ""], "channel must have 1 to 255 characters"),
        (["dead", "redrive", "--queue", "\udcff"], "queue holds a character that PostgreSQL can't store"),
        (["channel", "list", "--queue", ""], "queue must have 1 to 255 characters"),
        (["grant", "\udcff", "worker"], "role must be a name of 1 to 63 bytes, not "),
        (["grant", "role"], "give the KIND of the role"),
        (["grant", "role", "worker", "--revoke"], "leave KIND out"),
        (["grant", "role", "king"], "kind must be producer, worker, observer, operator or pipeline, not 'king'"),
        (["grant", "public", "worker"], "role must be one that exists, not 'public'"),
        (["worker"], "Missing argument 'MODULE:APP...'"),
        (["worker", "shop.jobs"], "must be a module and a Worker in it, such as shop.jobs:app, not 'shop.jobs'"),
        (["worker", "a:b", "--processes", "0"], "--processes: "),
        (["demo", "--tenants", "0"], "--tenants: 0 is not in the range 1<=x<=1000"),
        (["--schema", "", "status"], "schema must be a name of 1 to 63 bytes, not ''"),
    ],
)
def test_a_wrong_command_line(arguments: list[str], said: str, database_url: str, session: Session) -> None:
    assert said in complaint(*arguments, code=2, environment={"FAIRQUEUE_DSN": database_url})
    for table in ("channel", "queue"):
        assert session.execute(text(f"SELECT count(*) FROM fairqueue.{table}")).scalar_one() == 0


@pytest.mark.parametrize(
    ("url", "code", "said"),
    [
        ("", 2, "use --dsn, FAIRQUEUE_DSN or DATABASE_URL"),
        ("mysql://u:s3cret@h/d", 2, "must begin with postgresql:// or postgresql+psycopg://, not mysql://"),
        ("host=h password=s3cret", 2, "must begin with postgresql:// or postgresql+psycopg://"),
        ("s3cret@://h/d", 2, "must begin with postgresql:// or postgresql+psycopg://"),
        ("postgresql://u:s3cret\udcff@127.0.0.1/d", 2, "no text in UTF-8"),
        ("postgresql://u:s3cret@h:port/d", 2, "write postgresql://"),
        ("postgresql://u:s3cret@127.0.0.1:{free_port}/d", 1, "check the host and the port"),
        ("postgresql://u:s3cret@/d?host=/nowhere", 1, "check the host and the port"),
        ("postgresql://u:s3cret@no-such-host.invalid/d", 1, "check the host"),
        (
            "postgresql://u:s3cret@127.0.0.1/d?frob=1",
            1,
            'invalid connection option "frob"; check the options of the database URL',
        ),
    ],
)
def test_a_database_that_cannot_be_reached(url: str, code: int, said: str) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))  # and doesn't listen
        url = url.format(free_port=probe.getsockname()[1])
        line = complaint("status", code=code, environment={"DATABASE_URL": url})
    assert said in line
    assert "s3cret" not in line


def test_a_server_that_refuses() -> None:
    with embedded.ephemeral(tcp=True) as server:
        url = make_url(server.url())
        wrong = url.set(password="s3cret").render_as_string(hide_password=False)
        line = complaint("--dsn", wrong, "status", code=1)
        assert "password authentication failed" in line
        assert "s3cret" not in line
        nowhere = url.set(database="nowhere").render_as_string(hide_password=False)
        assert 'database "nowhere" does not exist; check the database URL' in complaint(
            "--dsn", nowhere, "status", code=1
        )


@pytest.mark.parametrize(
    ("group", "name", "command"),
    [
        ("channel", "acme", ["status"]),
        ("channel", "acme", ["channel", "list"]),
        ("queue", "default", ["status"]),
        ("queue", "default", ["queue", "list"]),
    ],
)
def test_a_time_that_python_cannot_read_is_not_blamed_on_the_connection(
    group: str, name: str, command: list[str], database_url: str, session: Session
) -> None:
    acts.put(session, "acme")
    acts.sql(session, f"SELECT fairqueue.{group}_set('{name}', paused => true, resume_at => '20000-01-01')")
    line = complaint("--dsn", database_url, *command, code=1)
    assert line.startswith("timestamp too large (after year 10K): ")
    ends_it = "`fairqueue channel resume`, or `fairqueue queue resume`, ends it"
    assert line.endswith(f"is none that Python knows, as the end of a pause may be: {ends_it}")
    assert CliRunner().invoke(program, ["--dsn", database_url, group, "resume", name]).exit_code == 0
    assert CliRunner().invoke(program, ["--dsn", database_url, *command]).exit_code == 0


@pytest.fixture
def stranger(database_url: str, engine: Engine) -> Iterator[str]:
    """A URL of somebody who may log in and nothing else."""
    with engine.begin() as connection:
        connection.execute(text("CREATE ROLE cli_stranger LOGIN PASSWORD 'x'"))
    yield make_url(database_url).set(username="cli_stranger", password="x").render_as_string(hide_password=False)
    with engine.begin() as connection:
        connection.execute(text("DROP OWNED BY cli_stranger"))
        connection.execute(text("DROP ROLE cli_stranger"))


@pytest.mark.parametrize(
    "command",
    [
        *(["status"], ["channel", "list"], ["channel", "set", "acme", "--weight", "2"], ["channel", "pause", "acme"]),
        *(["queue", "list"], ["queue", "set", "default", "--backoff", "2"], ["queue", "set", "new", "--backoff", "2"]),
        *(["queue", "pause", "default"], ["queue", "resume", "default"]),
        *(["message", "show", "1"], ["message", "cancel", "1"], ["dead", "list"], ["dead", "redrive", "1"], ["check"]),
    ],
)
def test_a_role_without_rights(command: list[str], stranger: str, database_url: str, session: Session) -> None:
    """What an observer may not do is one line, too; an operator may do it, whatever comes of it."""
    acts.put(session, "acme")
    acts.sql(session, "SELECT fairqueue.queue_set('default', paused => true)")
    line = complaint("--dsn", stranger, *command, code=1)
    assert line.startswith("permission denied for ")
    assert "`fairqueue grant ROLE observer`" in line
    for kind in ("observer", "operator"):
        CliRunner().invoke(program, ["--dsn", database_url, "grant", "cli_stranger", kind])
        result = CliRunner().invoke(program, ["--dsn", stranger, *command])
        looks = command[-1] in {"status", "list"} or "show" in command
        assert ("permission denied" in result.output) == (kind == "observer" and not looks)
        assert result.output.count("\n") == 1 or looks or kind == "operator"


#: Those of Spark that a role of the kind pipeline may run.
LOADS = [["archive", "/nowhere"], ["enqueue", "/nowhere", "--channel", "tenant"]]


@pytest.mark.parametrize("command", LOADS)
def test_a_role_that_may_not_load(command: list[str], stranger: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyspark")
    monkeypatch.setenv("PGPASSWORD", "")  # which they set
    told = "the owner of the queue's schema can give the right: `fairqueue grant ROLE pipeline`"
    assert complaint("--dsn", stranger, "spark", *command, code=1) == (
        f"permission denied for schema fairqueue; {told}"
    )


@pytest.mark.parametrize("command", [*LOADS, ["clean"]])
def test_spark_on_a_schema_that_does_not_work(
    command: list[str], database_url: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused before Spark starts, and before anything is dropped."""
    pytest.importorskip("pyspark")
    monkeypatch.setenv("PGPASSWORD", "")
    monkeypatch.setattr("fairqueue.spark.local_session", lambda *_, **__: pytest.fail("Spark is started"))
    elsewhere = complaint("--dsn", database_url, "--schema", "q2", "spark", *command, code=1)
    assert elsewhere.startswith("schema 'q2' has no fairqueue; run ")
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE fairqueue.message DISABLE TRIGGER ALL"))
    silent = complaint("--dsn", database_url, "spark", *command, code=1)
    assert silent.startswith("triggers of fairqueue.message are switched off, ")


@pytest.mark.parametrize("command", [["migrate"], ["grant", "cli_stranger", "worker"]])
def test_what_only_the_owner_may_do(command: list[str], stranger: str, database_url: str) -> None:
    """Neither somebody without rights, nor one who has all that can be given."""
    line = complaint("--dsn", stranger, *command, code=1)
    told = "only the owner of the queue's schema can do this: connect as that role"
    assert line == f"permission denied for schema fairqueue; {told}"
    CliRunner().invoke(program, ["--dsn", database_url, "grant", "cli_stranger", "operator"])
    if command[0] == "grant":
        assert "which owns the queue in schema 'fairqueue', can give and take rights in it" in complaint(
            "--dsn", stranger, *command, code=1
        )


def test_a_schema_in_which_everybody_may_create(stranger: str, engine: Engine) -> None:
    """What the server says of its own is better than what is true in general."""
    with engine.begin() as connection:
        connection.execute(text("CREATE SCHEMA theirs"))
        connection.execute(text("GRANT ALL ON SCHEMA theirs TO PUBLIC"))
    assert "Choose a schema of its own for the queue" in complaint(
        "--dsn", stranger, "--schema", "theirs", "migrate", code=1
    )


def test_a_schema_that_may_not_be_made(stranger: str) -> None:
    line = complaint("--dsn", stranger, "--schema", "q2", "migrate", code=1)
    assert "permission denied for database" in line
    assert "its owner can GRANT CREATE ON DATABASE" in line


def test_a_schema_that_somebody_else_makes(empty_database_url: str) -> None:
    """At the same moment, by hand; others that migrate are waited for."""
    engine = create_engine(empty_database_url)
    waiting = text("SELECT count(*) FROM pg_locks WHERE locktype = 'transactionid' AND NOT granted")
    with (
        engine.connect() as other,
        engine.connect().execution_options(isolation_level="AUTOCOMMIT") as looking,
        ThreadPoolExecutor() as threads,
    ):
        other.execute(text("CREATE SCHEMA fairqueue"))
        refused = threads.submit(complaint, "--dsn", empty_database_url, "migrate", code=1)
        acts.wait_until(lambda: looking.execute(waiting).scalar_one())
        other.commit()
        assert refused.result(30).endswith("; somebody else has made the same at this moment: try again")
    engine.dispose()


def test_times_that_the_driver_cannot_read(database_url: str) -> None:
    """The database, or the role, may have been given another DateStyle."""
    environment = {"FAIRQUEUE_DSN": database_url, "PGDATESTYLE": "German"}
    line = complaint("status", code=1, environment=environment)
    assert line.startswith("can't parse timestamptz with DateStyle 'German, ")
    assert line.endswith("; set PGDATESTYLE=ISO in the environment")


def test_a_driver_without_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as psycopg without [binary] where there is no libpq; its error names no module."""

    def engine(_: str) -> None:
        raise ImportError("no pq wrapper available.\nAttempts made:\n- couldn't import psycopg 'c' implementation")

    monkeypatch.setattr("fairqueue.cli.target.make_engine", engine)
    line = complaint("--dsn", "postgresql://u:s3cret@h/d", "status", code=1)
    assert line == "psycopg is not installed, or not in full; pip install 'fairqueue[cli]'"


@pytest.mark.parametrize(
    ("url", "environment", "limit"),
    [
        ("postgresql://h/d", {}, 10),
        ("postgresql://h/d", {"PGCONNECT_TIMEOUT": "60"}, None),
        ("postgresql://h/d", {"PGSERVICE": "app"}, None),
        ("postgresql:///?service=app", {}, None),
        ("postgresql://h/d?connect_timeout=60", {}, "60"),
    ],
)
def test_how_long_it_waits_for_a_connection(
    monkeypatch: pytest.MonkeyPatch, url: str, environment: dict[str, str], limit: object
) -> None:
    """Not for ever; nor is what the user says of it overruled."""
    for name in ("PGCONNECT_TIMEOUT", "PGSERVICE"):
        monkeypatch.delenv(name, raising=False)
    for name, setting in environment.items():
        monkeypatch.setenv(name, setting)
    engine = make_engine(url)

    @event.listens_for(engine, "do_connect")
    def stop(_: object, __: object, ___: object, parameters: dict[str, object]) -> None:
        raise LookupError(parameters.get("connect_timeout"))

    with pytest.raises(LookupError) as given:
        engine.connect()
    assert given.value.args == (limit,)


@pytest.mark.parametrize("ended", [KeyboardInterrupt(), SystemExit(143)])
def test_what_is_left_behind_is_said(ended: BaseException) -> None:
    """Also where it was a signal that ended the command."""

    @click.command(cls=Command)
    def leaves() -> None:
        try:
            raise ended
        finally:
            raise fq.FairqueueError("the schema may be left behind")

    result = CliRunner().invoke(leaves)
    assert result.exit_code == (130 if isinstance(ended, KeyboardInterrupt) else 143)
    assert result.stderr == "fairqueue: the schema may be left behind\n"


@pytest.mark.parametrize("options", [["status"], ["channel", "set", "acme", "--weight", "1"]])
def test_a_closed_pipe_is_quiet(options: list[str], database_url: str) -> None:
    """Such as that to a pager which was left."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*COMMAND, "--dsn", database_url, *options], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


#: Commands one after the other, each on a stdout as Python makes it.
ONE_BY_ONE = """
import sys
from fairqueue.cli import main

for command in {commands!a}:
    sys.stdout.reconfigure(errors="strict")
    sys.argv[1:] = command
    try:
        main()
    except SystemExit as ended:
        print("ended with", ended.code, flush=True)
"""


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_letters_that_the_terminal_has_not(encoding: str, database_url: str, session: Session) -> None:
    """What is a name to a tenant has no place in every encoding, such as that of a terminal, or of a job's log."""
    acts.put(session, "日本")
    words, table = ["channel", "set", "日本", "--weight", "2"], ["status"]
    commands = [["--dsn", database_url, *command] for command in (words, table)]
    done = subprocess.run(
        [sys.executable, "-c", ONE_BY_ONE.format(commands=commands)],
        env=os.environ | {"PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    *outputs, rest = done.stdout.split(b"ended with 0\n")
    assert (len(outputs), rest) == (2, b"")
    for output in outputs:
        # To a terminal of ASCII, click writes UTF-8.
        assert b"\\u65e5\\u672c" in output or (encoding == "ascii" and "日本".encode() in output)


def test_ctrl_c_is_quiet(database_url: str, engine: Engine, session: Session) -> None:
    """While a command waits for a lock."""
    acts.sql(session, "INSERT INTO fairqueue.channel (name) VALUES ('acme')")
    session.execute(text("SELECT FROM fairqueue.channel FOR UPDATE"))
    with interruptible([*COMMAND, "--dsn", database_url, "channel", "pause", "acme"]) as process:
        waiting = text(
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%channel_set%'"
        )
        # Each look by itself: within a transaction the view stays as it was.
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as other:
            acts.wait_until(lambda: other.execute(waiting).scalar_one())
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30) == ("", "")
    assert process.returncode == 130


@pytest.mark.parametrize(("end", "code"), [(SystemExit(143), 143), (KeyboardInterrupt(), 130)])
def test_a_signal_counts_whatever_the_driver_makes_of_it(end: BaseException, code: int) -> None:
    """It may come in the middle of a conversation with the server, which can't be ended properly then."""
    interrupted = Command("interrupted", callback=partial(raise_in_place_of, end))
    result = CliRunner().invoke(interrupted)
    assert (result.exit_code, result.output) == (code, "")


@pytest.mark.parametrize(("end", "code"), [(SystemExit(143), 143), (KeyboardInterrupt(), 0)])
def test_a_signal_ends_a_watch_whatever_the_driver_makes_of_it(
    end: BaseException, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C is the way to end one."""
    monkeypatch.setattr(status, "_look", lambda *_: raise_in_place_of(end))
    result = CliRunner().invoke(program, ["--dsn", "postgresql:///", "status", "--watch"])
    assert (result.exit_code, result.output) == (code, "")


def raise_in_place_of(end: BaseException) -> None:
    """What SQLAlchemy makes of what psycopg raises after such an end."""
    try:
        try:
            raise end
        finally:
            raise psycopg.OperationalError("cannot exit pipeline mode while busy")
    except psycopg.Error as error:
        raise OperationalError(None, None, error) from error


def test_watch_goes_on_after_a_restart_of_the_server(tmp_path: Path) -> None:
    with embedded.ephemeral() as server:
        url = server.url()
        assert CliRunner().invoke(program, ["--dsn", url, "migrate"]).exit_code == 0
        with (tmp_path / "output").open("w+") as output:
            seen = (tmp_path / "output").read_text
            with interruptible([*COMMAND, "--dsn", url, "status", "new", "--watch=0.1"], output) as process:
                acts.wait_until(lambda: "queue new" in seen())
                server.restart("immediate")
                acts.wait_until(lambda: "fairqueue: " in seen())
                mended = seen().rindex("fairqueue: ")
                acts.wait_until(lambda: seen().count("queue new", mended) > 2)
                process.send_signal(signal.SIGINT)
                assert process.wait(30) == 0
            assert "Traceback" not in seen()


@contextlib.contextmanager
def interruptible(command: list[str], output: Any = subprocess.PIPE) -> Iterator["subprocess.Popen[str]"]:
    with subprocess.Popen(
        command,
        stdout=output,
        stderr=output,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        # A shell's background job ignores Ctrl-C, and so would it if the tests ran in one.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
    ) as process:
        try:
            yield process
        finally:
            process.kill()
