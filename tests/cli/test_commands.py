"""The command line: each command does what it says, in words and in JSON, and ends with the right code."""

import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from sqlalchemy import Engine, create_engine, text
from sqlalchemy.orm import Session

import fairqueue as fq
from fairqueue import roles, schema
from fairqueue.cli import Target, commands, status
from fairqueue.cli.program import program
from tests import acts
from tests.cli import ODD, Run, document
from tests.worker.pooler import Pooler


def dead_letter(session: Session, channel: str = "acme", **fields: Any) -> int:
    (id_,) = acts.put(session, channel, max_attempts=1, **fields)
    session.execute(fq.fail(acts.lease_of(session), "no such\nfile"))
    session.commit()
    return id_


def test_status(run: Run, session: Session) -> None:
    acts.put(session, "acme", 3)
    acts.put(session, ODD, 7)
    acts.put(session, "later", 1, delay=3600)
    acts.complete(session, acts.lease_of(session, queue="default"))
    session.merge(fq.Channel("acme", max_concurrency=2, paused=True))
    session.merge(fq.Queue("empty", max_concurrency=9))
    session.commit()
    output = run("status", "--limit", "2").stdout
    assert all(len(line) <= 80 for line in output.splitlines())
    assert re.search(r"^3 channels +9 +1 +0 +\S+ s +1 +0 *$", output, re.MULTILINE)
    assert re.search(r"^\\x1b\[2J\\u202e\[r\S*… +7 ", output, re.MULTILINE)
    assert re.search(r"^acme +2 +0 +0/2 .* paused *$", output, re.MULTILINE)
    assert "… and 1 more channel: 0 ready\n" in output
    assert re.search(r"^0 channels +0 +0 +0/9 ", output, re.MULTILINE)
    found = document(run("status", "default", "--json"))
    (queue,) = found["queues"]
    assert (queue["name"], queue["ready"], queue["channel_count"]) == ("default", 9, 3)
    assert [channel["name"] for channel in queue["channels"]] == [ODD, "acme", "later"]
    assert 0 < queue["channels"][0]["oldest_seconds"] <= queue["oldest_seconds"] < 600
    assert queue["channels"][2]["oldest_seconds"] is None
    (queue,) = document(run("status", "default", "--sort", "oldest", "--json"))["queues"]
    assert [channel["name"] for channel in queue["channels"]] == ["acme", ODD, "later"]
    fq.enqueue_many(session, [{"channel": str(number), "queue": "many"} for number in range(21)])
    session.commit()
    assert "… and 1 more channel: 1 ready\n" in run("status", "many").stdout
    assert len(document(run("status", "many", "--json"))["queues"][0]["channels"]) == 21


def test_status_of_limits_and_of_a_queue_that_is_paused(run: Run, session: Session) -> None:
    acts.put_all(session, {"a": 1, "b": 1})
    session.add_all([fq.Channel("a", release_interval_ms=1500), fq.Channel("b", max_size=9)])
    session.execute(fq.pause(queue="default"))
    session.commit()
    title, _, _, a, b = run("status").stdout.splitlines()
    assert title.split() == ["queue", "default", "paused"]
    assert a.rstrip().endswith(" 1 in 1,500 ms")
    assert b.rstrip().endswith(" size 9")


def test_status_of_nothing(run: Run) -> None:
    assert run("status").stdout == "No queue has anything in it.\n"


@pytest.mark.parametrize("known_by", [None, "channel", "policy", "rotation", "history"])
def test_status_of_a_queue_that_is_not_there(run: Run, session: Session, known_by: str | None) -> None:
    """It is one whose name is misspelt, unless something tells of it."""
    match known_by:
        case "channel":
            session.add(fq.Channel("acme", queue="mails"))
        case "policy":
            session.add(fq.Queue("mails"))
        case "rotation":
            acts.put(session, "acme", queue="mails")
            acts.complete(session, acts.lease_of(session, queue="mails"))
            acts.sql(session, "DELETE FROM fairqueue.history")
        case "history":
            session.execute(fq.cancel(acts.put(session, "acme", queue="mails")))
    session.commit()
    about = [("status", "mails"), ("dead", "list", "--queue", "mails"), ("dead", "redrive", "--queue", "mails")]
    for command, options in product(about, ([], ["--json"])):
        result = run(*command, *options, code=1 if known_by is None else 0)
        if known_by is None:
            assert result.stdout == ""
            assert "queue 'mails': nothing is known of it; its name may be misspelt\n" in result.stderr
    if known_by is not None:
        assert run("status", "mails").stdout.startswith("queue mails\n")
        assert document(run("status", "mails", "--json"))["queues"][0]["ready"] == 0


def test_watching_where_no_screen_can_be_rewritten(run: Run, session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """One table below the other, and whole ones, as where there is no terminal."""
    for number in range(20):
        acts.put(session, f"tenant {number}")
    pauses: list[float] = []
    looks: list[Any] = []
    look = status._look

    def twice(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            raise KeyboardInterrupt

    def noted(*arguments: Any) -> Any:
        looks.append(arguments)
        return look(*arguments)

    monkeypatch.setattr(status, "_look", noted)
    monkeypatch.setattr("fairqueue.cli.status.time.sleep", twice)
    for name, value in {"FORCE_COLOR": "1", "TERM": "dumb"}.items():  # the former is a terminal to rich
        monkeypatch.setenv(name, value)
    output = run("status", "--watch").stdout
    assert (output.count("queue default"), output.count("tenant ")) == (2, 40)
    assert len(looks) == 2


def test_numbers_that_only_postgresql_has(run: Run, session: Session) -> None:
    """JSON has no Infinity."""
    insert = "INSERT INTO fairqueue.message (channel, payload) VALUES ('acme', CAST(:payload AS jsonb)) RETURNING id"
    id_ = session.scalar(text(insert), {"payload": f'{{"n": [{"9" * 310}.5, 1.5]}}'})
    session.commit()
    output = run("message", "show", id_, "--json").stdout
    shown = json.loads(output, parse_constant=pytest.fail)
    assert shown["message"]["payload"] == {"n": ["inf", 1.5]}


def test_message_show(run: Run, session: Session) -> None:
    def shown(id_: int) -> Any:
        return document(run("message", "show", id_, "--json"))

    letter = dead_letter(session, payload={"name": ODD}, body=b"\0\xff")
    ready, waiting, running = (
        *acts.put(session, "b", payload=False),
        *acts.put(session, "b", delay=99),
        *acts.put(session, "a", key=ODD, queue="other"),
    )
    acts.take(session, queue="other")
    assert [shown(id_)["status"] for id_ in (ready, waiting, running)] == ["ready", "waiting", "running"]
    assert shown(running)["message"]["key"] == ODD
    assert ODD not in run("message", "show", running).stdout
    assert re.search(r"^ +payload +false$", run("message", "show", ready).stdout, re.MULTILINE)
    assert re.search(
        r"^ +dequeue_at +20\d\d-\d\d-\d\d \d\d:.*\+00:00$", run("message", "show", waiting).stdout, re.MULTILINE
    )
    assert shown(letter)["status"] == "dead"
    assert shown(letter)["message"]["body"] == "00ff"
    assert [end["outcome"] for end in shown(letter)["history"]] == ["dead"]
    output = run("message", "show", letter).stdout
    assert output.startswith(f"Message {letter}: dead\n")
    assert "no such\\nfile" in output
    assert ODD not in output
    run("dead", "redrive", letter)
    assert [shown(letter)["status"], len(shown(letter)["history"])] == ["ready", 1]
    assert run("dead", "redrive", letter, code=1).stdout == f"Message {letter}: no dead letter.\n"
    run("message", "cancel", letter)
    assert [shown(letter)["status"], [end["outcome"] for end in shown(letter)["history"]]] == [
        "ended",
        ["dead", "cancelled"],
    ]
    assert "message 999 not found" in run("message", "show", 999, code=1).stderr


def test_message_cancel(run: Run, session: Session) -> None:
    first, second, third = acts.put(session, "acme", 3)
    assert run("message", "cancel", first, second).stdout == "2 cancelled.\n"
    result = run("message", "cancel", third, first, "--json", code=1)
    assert document(result)["results"] == [{"id": third, "result": "cancelled"}, {"id": first, "result": "not_found"}]
    assert run("message", "cancel", first, code=1).stdout == f"Message {first}: not found.\n"


def test_dead_letters(run: Run, session: Session) -> None:
    assert run("dead", "list").stdout == "No dead letters.\n"
    letters = [dead_letter(session, channel, key="k") for channel in ("acme", "globex", ODD)]
    acts.sql(session, "UPDATE fairqueue.dead_message SET died_at = '2000-01-01' WHERE id = :id", id=letters[1])
    output = run("dead", "list", "--limit", "2").stdout
    assert all(len(line) <= 80 for line in output.splitlines())
    assert [line.split()[0] for line in output.splitlines()] == ["id", str(letters[2]), str(letters[0]), "…"]
    assert "no such\\nfile" in output.replace("Error", "")
    found = document(run("dead", "list", "--queue", "default", "--channel", "acme", "--json"))
    assert (found["count"], found["dead"][0]["id"], found["dead"][0]["error"]) == (1, letters[0], "no such\nfile")
    acts.put(session, "acme", key="k")
    said = run("dead", "redrive", "--queue", "default", code=1).stdout
    assert said == f"2 redriven.\nMessage {letters[0]}: a live message of its channel has its key; it stays dead.\n"
    assert document(run("dead", "redrive", "--queue", "default", "--channel", "globex", "--json")) == {"results": []}


def test_of_many_that_stay_undone_the_first_are_named(run: Run, session: Session) -> None:
    """Such as those of a queue that somebody else is redriving, too."""
    lines = run("message", "cancel", *range(1001, 2026), code=1).stdout.splitlines()
    assert lines == [
        *(f"Message {id_}: not found." for id_ in range(1001, 1021)),
        "… and 1,005 more; --json names all.",
    ]
    assert len(document(run("message", "cancel", *range(1001, 2026), "--json", code=1))["results"]) == 1025


def test_check_finds_repairs_and_says_so_by_its_code(run: Run, session: Session) -> None:
    acts.put(session, "acme", 2)
    acts.put(session, "acme", 2, queue="other")
    for queue in ("default", "other"):
        acts.take(session, queue=queue)
    assert run("check").stdout == "All is well.\n"
    acts.sql(session, "DELETE FROM fairqueue.lane")
    result = run("check", "--json", code=1)
    assert [each["queue"] for each in document(result)["differences"]] == ["default", "other"]
    assert document(result)["left"] == document(result)["differences"]
    assert "queue default, channel acme: a ready message that no lane" in run("check", code=1).stdout
    assert run("check", "other", "--repair").stdout.endswith("\n1 difference repaired.\n")
    run("check", "other")
    repaired = document(run("check", "--repair", "--json"))
    assert ([each["queue"] for each in repaired["differences"]], repaired["left"]) == (["default"], [])
    run("check")
    assert "queue 'defualt' has no message and no policy" in run("check", "defualt", code=1).stderr
    acts.put(session, "acme", queue="with a message")
    session.add_all([fq.Channel("acme", "with a channel"), fq.Queue("with a policy")])
    session.commit()
    for queue in ("with a message", "with a channel", "with a policy"):
        assert run("check", queue).stdout == "All is well.\n"


def test_repairs_whatever_the_database_says_of_isolation(run: Run, session: Session, engine: Engine) -> None:
    acts.put(session, "acme", 2)
    acts.take(session)
    acts.sql(session, "DELETE FROM fairqueue.lane")
    name = engine.url.database
    acts.sql(session, f"ALTER DATABASE \"{name}\" SET default_transaction_isolation = 'repeatable read'")
    assert run("check", "--repair").stdout.endswith("\n1 difference repaired.\n")


def test_behind_a_pooler(run: Run, session: Session, database_url: str) -> None:
    """In transaction mode the next transaction may be on another server connection, where nothing is prepared."""
    queues = [f"queue {number}" for number in range(12)]
    for queue in queues:
        acts.put(session, "acme", 2, queue=queue)
        acts.take(session, queue=queue)
    acts.sql(session, "DELETE FROM fairqueue.lane")
    with Pooler(database_url, servers=2) as pooler:
        assert run("--dsn", pooler.url, "check", "--repair").stdout.endswith("\n12 differences repaired.\n")
        assert set(pooler.transactions) == set(pooler.pids)
    run("check")


def test_grant(run: Run, engine: Engine) -> None:
    def may() -> list[str]:
        rights = "SELECT DISTINCT privilege_type FROM information_schema.table_privileges WHERE grantee = 'Cli % Role'"
        with engine.connect() as connection:
            return sorted(connection.execute(text(rights)).scalars())

    with engine.begin() as connection:
        connection.execute(text('CREATE ROLE "Cli % Role"'))
    try:
        run("grant", "Cli % Role", "observer")
        assert may() == ["SELECT"]
        run("grant", "Cli % Role", "--revoke")
        assert may() == []
        assert all(kind in run("grant", "--help").stdout for kind in roles.KINDS)
    finally:
        with engine.begin() as connection:
            connection.execute(text('DROP OWNED BY "Cli % Role"'))
            connection.execute(text('DROP ROLE "Cli % Role"'))


class TestMigrate:
    def test_installs_once(self, empty_database_url: str, run: Run) -> None:
        options = ("--dsn", empty_database_url, "--schema", "My Q")
        assert "`fairqueue migrate`; or name another" in run(*options, "status", code=1).stderr
        sql = run(*options, "migrate", "--sql").stdout
        assert run(*options, "migrate").stdout == f"Schema My Q is installed, version {schema.HEAD}.\n"
        assert run(*options, "migrate").stdout == f"Schema My Q is at version {schema.HEAD} already.\n"
        assert run(*options, "migrate", "--sql").stdout == ""
        run(*options, "status")
        engine = create_engine(empty_database_url)
        with engine.begin() as connection:
            schema.verify(connection, "My Q")
            schema.uninstall(connection, "My Q")
        with engine.connect() as connection:
            # As psql would: it begins and commits by itself.
            connection.execution_options(isolation_level="AUTOCOMMIT").exec_driver_sql(
                sql, execution_options={"no_parameters": True}
            )
        with engine.connect() as connection:
            schema.verify(connection, "My Q")
        engine.dispose()

    def test_waits_for_another_one(self, empty_database_url: str, run: Run) -> None:
        engine = create_engine(empty_database_url)
        waiting = text("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted")
        with (
            engine.connect() as other,
            engine.connect().execution_options(isolation_level="AUTOCOMMIT") as looking,
            ThreadPoolExecutor() as threads,
        ):
            other.exec_driver_sql(schema.lock_sql("fairqueue"))
            migrated = threads.submit(run, "--dsn", empty_database_url, "migrate")
            acts.wait_until(lambda: looking.execute(waiting).scalar_one())
            schema.install(other)
            other.commit()
            assert migrated.result(30).stdout == f"Schema fairqueue is at version {schema.HEAD} already.\n"
        engine.dispose()

    def test_all_or_nothing(self, empty_database_url: str, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        whole = schema.upgrade_sql
        monkeypatch.setattr(schema, "upgrade_sql", lambda *versions: [*whole(*versions), "SELECT 1/0"])
        result = run("--dsn", empty_database_url, "migrate", code=1)
        assert result.stderr == "fairqueue: division by zero\n"
        engine = create_engine(empty_database_url)
        with engine.connect() as connection:
            assert not connection.execute(text("SELECT to_regnamespace('fairqueue') IS NOT NULL")).scalar_one()
        engine.dispose()

    def test_goes_by_the_version_that_is_there(self, run: Run, engine: Engine) -> None:
        with engine.begin() as connection:
            for name in ("version", "serves"):
                connection.exec_driver_sql(
                    f"CREATE OR REPLACE FUNCTION fairqueue.schema_{name}() RETURNS integer LANGUAGE sql RETURN 99"
                )
        for command in ("migrate", "status", "check"):
            assert "holds version 99" in run(command, code=1).stderr
            assert "upgrade the package" in run(command, code=1).stderr


def test_values_of_a_host_s_own_json(database_url: str, session: Session) -> None:
    """Its engine may read payloads in a way of its own, such as one that keeps all digits."""
    (id_,) = acts.put(session, "acme", payload={"price": 1.5})
    engine = create_engine(database_url, json_deserializer=partial(json.loads, parse_float=Decimal))
    show = ["show", str(id_)]
    result = CliRunner().invoke(program.commands["message"], show, obj=Target(engine))
    assert re.search(r'^ +payload +\{"price": 1.5\}$', result.stdout, re.MULTILINE), result.exception
    result = CliRunner().invoke(program.commands["message"], [*show, "--json"], obj=Target(engine))
    assert document(result)["message"]["payload"] == {"price": 1.5}
    engine.dispose()


def test_another_schema_is_another_queue(run: Run, engine: Engine) -> None:
    run("--schema", "My Q", "migrate")
    with Session(engine.execution_options(**fq.in_schema("My Q"))) as session:
        acts.put(session, "acme", 2)
    assert document(run("--schema", "My Q", "status", "--json"))["queues"][0]["ready"] == 2
    assert document(run("status", "--json"))["queues"] == []
    run("--schema", "My Q", "channel", "set", "acme", "--weight", "3")
    run("--schema", "My Q", "channel", "pause", "acme")
    run("--schema", "My Q", "queue", "set", "default", "--max-attempts", "3")
    run("--schema", "My Q", "queue", "pause", "default")
    run("--schema", "My Q", "check")
    assert document(run("channel", "list", "--json")) == {"channels": []}
    assert document(run("queue", "list", "--json")) == {"queues": []}


def test_a_host_mounts_the_commands_on_its_own_engine(engine: Engine) -> None:
    """What fairqueue.flask does: an engine of the host's, which stays open, and the host's way to show errors."""

    @click.group()
    @click.pass_context
    def host(context: click.Context) -> None:
        context.obj = Target(engine)

    for command in commands:
        host.add_command(command)
    assert CliRunner().invoke(host, ["migrate"]).exit_code == 0
    assert document(CliRunner().invoke(host, ["status", "--json"]))["queues"] == []
    result = CliRunner().invoke(host, ["message", "show", "1"])
    assert (result.exit_code, result.stderr[:11]) == (1, "fairqueue: ")
    assert {command.name for command in commands} == {
        "migrate",
        "status",
        "queue",
        "channel",
        "message",
        "dead",
        "check",
        "grant",
    }


def test_help_is_quick() -> None:
    heavy = "{'sqlalchemy', 'rich', 'anyio', 'psycopg', 'matplotlib'}"
    code = f"import sys, fairqueue.cli.program; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def without(modules: list[str], *calls: list[str]) -> "subprocess.CompletedProcess[str]":
    """Command lines in an interpreter that lacks these modules; their exit codes are in its output."""
    code = f"""
import sys

sys.modules.update(dict.fromkeys({modules}))
from fairqueue.cli.program import program

for call in {calls}:
    try:
        program(call)
    except SystemExit as exit:
        print("exit code", exit.code)
"""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ("benchmarks", "the benchmarks are not in the package: `make bench`, in a checkout of its repository"),
        ("matplotlib", "matplotlib is not installed; pip install 'fairqueue[benchmarks]'"),
    ],
)
def test_benchmarks_that_are_not_here(missing: str, told: str) -> None:
    done = without([missing], ["bench"], ["bench", "--help"])
    assert done.stderr == f"fairqueue: {told}\n"
    assert done.stdout.startswith("exit code 1\n")
    assert "Measure fairness and speed beside other queues" in done.stdout
    assert done.stdout.endswith(f"\n\nHere, {told}.\nexit code 0\n")


def test_spark_that_is_not_here() -> None:
    commands = [["archive", "/nowhere"], ["clean"], ["simulate"]]
    done = without(["pyspark", "pyarrow"], *(["--dsn", "postgresql://h/d", "spark", *command] for command in commands))
    told = r"fairqueue: (pyspark|pyarrow) is not installed; pip install 'fairqueue\[spark\]'\n"
    assert done.stdout == "exit code 1\n" * 3
    assert re.fullmatch(f"({told}){{3}}", done.stderr), done.stderr


def test_every_command_has_help_within_80_columns(run: Run) -> None:
    def walk(command: click.Command, path: tuple[str, ...]) -> None:
        output = run(*path, "--help").stdout
        assert all(len(line) <= 80 for line in output.splitlines()), path
        assert not re.search(r"^(?!Usage:).*\.\.\.$", output, re.MULTILINE), path
        for name, child in getattr(command, "commands", {}).items():
            walk(child, (*path, name))

    walk(program, ())
    assert f"version {fq.__version__}" in run("--version").stdout
    assert "Exit codes:" in run("--help").stdout


@pytest.mark.parametrize("module", ["fairqueue.cli", "fairqueue.demo"])
def test_without_click_it_says_what_to_install(module: str, tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise ModuleNotFoundError(\"No module named 'click'\", name='click')")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-m", module], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert re.fullmatch(r"fairqueue: click is not installed; pip install 'fairqueue\[(cli|demo)\]'\n", done.stderr)
