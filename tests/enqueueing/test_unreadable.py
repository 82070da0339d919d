"""JSON that PostgreSQL keeps and Python doesn't read: it is the trouble of its own message alone."""

import json
import sys
from typing import Any

import pytest
from click.testing import CliRunner
from sqlalchemy import create_engine, select, text
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import fairqueue as fq
from fairqueue.cli.program import program
from tests.acts import lease_of, put, sql
from tests.fixtures.workers import EngineOf, WorkerOf
from tests.worker.working import LISTENING, is_empty, wait_for_endings

pytestmark = pytest.mark.shared_database

LONG = """'{"n": 1e5000}'"""
PAYLOADS = {"number": LONG, "nesting": "(repeat('[', 3000) || repeat(']', 3000))"}
REFUSED = r"^the stored payload is JSON that can't be read: ValueError: "


def put_unreadable(session: Session, payload: str = LONG) -> int:
    query = f"SELECT fairqueue.message_create('mallory', payload => {payload}::jsonb)"
    id_: int = session.scalars(text(query)).one()
    session.commit()
    return id_


class Whole(fq.TypedMessage[dict[str, int]], payload_type=dict[str, int]):
    pass


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS)
@pytest.mark.parametrize("kind", LISTENING)
def test_a_worker(kind: str, payload: str, session: Session, worker_of: WorkerOf) -> None:
    """It is a dead letter, with the reason; the others of its batch are served, and those that come later."""
    put(session, "acme", 2, payload={"n": 1})
    put_unreadable(session, payload)
    read: list[Any] = []
    with worker_of(kind, lambda message, _: read.append(message.payload)):
        assert wait_for_endings(session, 3) == {"completed": 2, "dead": 1}
        put(session, "acme", payload="late")
        wait_for_endings(session, 4)
    assert read == [{"n": 1}, {"n": 1}, "late"]
    assert is_empty(session)
    assert "JSON that can't be read" in str(session.scalars(select(fq.DeadMessage.error)).one())


@pytest.mark.parametrize("message_type", [fq.Message, Whole])
def test_a_session(session: Session, message_type: type[fq.TypedMessage[Any]]) -> None:
    """The message is there, and can be failed; whoever reads it is told."""
    id_ = put_unreadable(session)
    put(session, "acme", payload={"n": 2})
    batch = session.scalars(fq.dequeue(limit=2, message_type=message_type)).all()
    (message,) = (each for each in batch if each.id == id_)
    (other,) = (each for each in batch if each.id != id_)
    assert other.payload == {"n": 2}
    assert message.raw.startswith('{"n": 1000')
    with pytest.raises(fq.InvalidValue, match=REFUSED):
        _ = message.payload
    assert session.execute(fq.fail(message, retry=False)).one().result == "dead"


@pytest.mark.skipif(sys.version_info < (3, 12), reason="to Python 3.11 all that is nested so deeply is unreadable")
def test_the_command_line_shows_what_is_nested_deeply(session: Session, database_url: str) -> None:
    """With an indent it would take more of Python's stack than there is."""
    id_ = put_unreadable(session, "(repeat('[', 1200) || repeat(']', 1200))")
    done = CliRunner().invoke(program, ["--dsn", database_url, "message", "show", "--json", str(id_)])
    assert done.exit_code == 0, done.output
    assert "[" * 1200 in done.output


@pytest.mark.parametrize("kind", ["async", "asyncpg"])
async def test_an_async_session(kind: str, session: Session, engine_of: EngineOf) -> None:
    put_unreadable(session)
    engine = engine_of(kind)
    async with AsyncSession(engine) as own:
        message = (await own.scalars(fq.dequeue())).one()
        with pytest.raises(fq.InvalidValue, match=REFUSED):
            _ = message.payload
    await engine.dispose()


@pytest.mark.parametrize("message_type", [fq.Message, Whole])
@pytest.mark.parametrize("payload", [None, {"n": 1}])
def test_a_state(payload: object, message_type: type[fq.TypedMessage[Any]], session: Session) -> None:
    """Without what it had done so far, it is as unreadable as without its payload."""
    put(session, "acme", payload=payload)
    (message,) = lease_of(session)
    states = f"ARRAY[{LONG}::jsonb]"
    sql(session, f"SELECT fairqueue.message_defer(ARRAY[{message.id}], ARRAY[1], 0, {states})")
    again = session.scalars(fq.dequeue(message_type=message_type)).one()
    assert again.state.startswith('{"n": 1000')
    with pytest.raises(fq.InvalidValue, match=r"^the stored state is JSON that can't be read: ValueError"):
        _ = again.payload


def test_a_deserializer_of_the_engine(session: Session, database_url: str) -> None:
    """It is used for both, and may raise what it likes."""
    put(session, "acme", payload={"n": 1})
    (message,) = lease_of(session)
    session.execute(fq.defer(message, state=[1.5]))
    session.commit()

    def picky(data: str | bytes) -> object:
        if b"n" in (data if isinstance(data, bytes) else data.encode()):
            raise LookupError("no n")
        return ("read", json.loads(data))

    engine = create_engine(database_url, json_deserializer=picky)
    with Session(engine) as own:
        (message,) = lease_of(own)
    engine.dispose()
    assert message.state == ("read", [1.5])
    with pytest.raises(fq.InvalidValue, match=r"^the stored payload is JSON that can't be read: LookupError: no n$"):
        _ = message.payload


async def test_a_deserializer_of_an_async_engine(session: Session, database_url: str) -> None:
    put(session, "acme", payload={"n": 1.5})
    url = database_url.replace("+psycopg", "+asyncpg")
    engine = create_async_engine(url, json_deserializer=lambda data: json.loads(data, parse_float=str))
    async with AsyncSession(engine) as own:
        assert (await own.scalars(fq.dequeue())).one().payload == {"n": "1.5"}
    await engine.dispose()


def test_the_command_line(session: Session, database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shows the text, live and dead."""
    monkeypatch.setenv("FAIRQUEUE_DSN", database_url)

    def run(*arguments: object) -> str:
        result = CliRunner().invoke(program, [str(each) for each in arguments])
        assert result.exit_code == 0, (result.output, result.exception)
        return result.stdout

    id_ = put_unreadable(session)
    dead = put(session, "acme", payload={"n": 1}, max_attempts=1)
    session.execute(fq.fail([each for each in lease_of(session, 2) if each.id in dead], "broken"))
    session.commit()
    assert f'  {"payload":<16} {{"n": 1000' in run("message", "show", id_)
    assert json.loads(run("message", "show", id_, "--json"))["message"]["payload"].startswith('{"n": 1000')
    assert f'  {"payload":<16} {{"n": 1}}' in run("message", "show", dead[0])
    session.execute(fq.fail((id_, 1), "unreadable", retry=False))
    session.commit()
    assert "unreadable" in run("dead", "list")
    payloads = {row["id"]: row["payload"] for row in json.loads(run("dead", "list", "--json"))["dead"]}
    assert payloads[dead[0]] == {"n": 1}
    assert payloads[id_].startswith('{"n": 1000')
