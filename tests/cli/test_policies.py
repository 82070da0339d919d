"""`fairqueue channel` and `fairqueue queue`: what is set is what is said, listed and held to."""

import re
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import select
from sqlalchemy.orm import Session

import fairqueue as fq
from tests import acts
from tests.cli import ODD, Run, document


def test_channel_policies(run: Run, session: Session) -> None:
    def policy() -> Any:
        (channel,) = document(run("channel", "list", "--json"))["channels"]
        return channel

    assert "No channel" in run("channel", "list").stdout
    said = run("channel", "set", ODD, "--queue", "q", "--weight", "2.5", "--max-concurrency", "4").stdout
    assert said == "Channel \\x1b[2J\\u202e[red]x[/red]:smile: of queue q: weight 2.5, max_concurrency 4.\n"
    run("channel", "set", ODD, "--queue", "q", "--max-size", "9", "--overflow", "drop", "--weight", "default")
    assert policy() == {
        "queue": "q",
        "name": ODD,
        "weight": None,
        "max_concurrency": 4,
        "release_interval_ms": None,
        "burst": None,
        "max_size": 9,
        "overflow": "drop",
        "paused": False,
        "resume_at": None,
    }
    run("channel", "pause", ODD, "--queue", "q", "--until", "2200-01-01T00:00:00+00:00")
    assert policy()["resume_at"] == "2200-01-01T00:00:00+00:00"
    output = run("channel", "list").stdout
    assert all(len(line) <= 80 for line in output.splitlines())
    assert re.search(r"^\\x1b\[2J\\\S*… +- +4 +- +- +9 +drop +for [0-9,]+ d *$", output, re.MULTILINE)
    run("channel", "resume", ODD, "--queue", "q")
    assert policy()["paused"] is False
    assert document(run("channel", "list", "--queue", "other", "--json")) == {"channels": []}
    past = datetime(2001, 1, 1, tzinfo=UTC)
    session.add(fq.Channel("acme", release_interval_ms=250, burst=3, paused=True, resume_at=past))
    session.commit()
    assert re.search(r"^acme +- +- +250 +3 +- +- +over *$", run("channel", "list").stdout, re.MULTILINE)


def test_queue_policies(run: Run, session: Session) -> None:
    def policies() -> Any:
        return document(run("queue", "list", "--json"))["queues"]

    assert run("queue", "list").stdout == "No queue has a policy of its own.\n"
    said = run("queue", "set", ODD, "--channel-weight", "2.5", "--max-attempts", "5", "--history-days", "0").stdout
    assert said == ("Queue \\x1b[2J\\u202e[red]x[/red]:smile:: max_attempts 5, history_days 0, channel_weight 2.5.\n")
    run("queue", "set", ODD, "--channel-overflow", "drop", "--channel-weight", "default", "--max-backoff", "31557600")
    (policy,) = policies()
    assert policy == {
        "name": ODD,
        "max_concurrency": None,
        "max_attempts": 5,
        "backoff": 1,
        "max_backoff": 31_557_600,
        "history_days": 0,
        "channel_weight": 1,
        "channel_max_concurrency": None,
        "channel_release_interval_ms": 0,
        "channel_burst": 1,
        "channel_max_size": None,
        "channel_overflow": "drop",
        "paused": False,
        "resume_at": None,
    }
    run("queue", "pause", ODD, "--until", "2200-01-01T00:00:00+00:00")
    assert policies() == [policy | {"paused": True, "resume_at": "2200-01-01T00:00:00+00:00"}]
    run("queue", "set", "mails", "--max-concurrency", "1200", "--channel-max-size", "9")
    assert [each["name"] for each in policies()] == [ODD, "mails"]
    output = run("queue", "list").stdout
    assert all(len(line) <= 80 for line in output.splitlines())
    assert re.search(r"^\\x1b\[2J\\\S*… +- +5 +1 +31557600 +0 +for [0-9,]+ d *$", output, re.MULTILINE)
    assert re.search(r"^mails +1,200 +20 +1 +3600 +30 *$", output, re.MULTILINE)
    assert re.search(r"^\\x1b\[2J\\\S* +1 +- +0 +1 +- +drop *$", output, re.MULTILINE)
    assert re.search(r"^mails +1 +- +0 +1 +9 +reject *$", output, re.MULTILINE)


def test_every_setting_of_a_queue_is_set_and_lifted(run: Run, session: Session) -> None:
    """None of what the model has is missing; what is lifted is as in a queue of which nothing was said."""
    values = {
        "max_concurrency": 7,
        "max_attempts": 3,
        "backoff": 0.5,
        "max_backoff": 60.0,
        "history_days": 90,
        "channel_weight": 2.0,
        "channel_max_concurrency": 5,
        "channel_release_interval_ms": 100,
        "channel_burst": 3,
        "channel_max_size": 1000,
        "channel_overflow": "drop",
    }
    assert {*values} == {column.name for column in fq.Queue.__table__.c} - {"name", "paused", "resume_at", "created_at"}

    def found(name: str) -> dict[str, Any]:
        session.rollback()
        return {field: getattr(session.get_one(fq.Queue, name, populate_existing=True), field) for field in values}

    def options(values: dict[str, Any]) -> list[Any]:
        return [each for field, value in values.items() for each in (f"--{field.replace('_', '-')}", value)]

    said = run("queue", "set", "mails", *options(values)).stdout
    assert said == (
        "Queue mails: max_concurrency 7, max_attempts 3, backoff 0.5, max_backoff 60, history_days 90,"
        " channel_weight 2, channel_max_concurrency 5, channel_release_interval_ms 100, channel_burst 3,"
        " channel_max_size 1000, channel_overflow drop.\n"
    )
    assert found("mails") == values
    session.add(fq.Queue("untouched"))
    session.commit()
    run("queue", "pause", "mails")
    for field in values:
        run("queue", "set", "mails", f"--{field.replace('_', '-')}", "default")
        values[field] = found("untouched")[field]
        assert found("mails") == values
    assert session.get_one(fq.Queue, "mails").paused
    said = run("queue", "set", "new", *options(dict.fromkeys(values, "default"))).stdout
    assert said == "Queue new: all settings at their defaults.\n"
    assert found("new") == values


def test_a_limit_that_a_queue_was_given_holds(run: Run, session: Session) -> None:
    acts.put_all(session, {"acme": 3, "globex": 3})
    run("queue", "set", "default", "--channel-max-concurrency", "1")
    assert sorted(acts.take(session, 6)) == ["acme", "globex"]
    run("queue", "set", "default", "--channel-max-concurrency", "default", "--max-concurrency", "3")
    assert len(acts.take(session, 6)) == 1
    run("queue", "set", "default", "--max-concurrency", "default")
    assert len(acts.take(session, 6)) == 3


def test_a_pause_holds_for_a_channel_a_queue_and_a_time(run: Run, session: Session) -> None:
    acts.put_all(session, {"acme": 2, "globex": 2})
    run("channel", "pause", "acme", "--for", "10m")
    until = session.scalars(select(fq.Channel.resume_at)).one()
    assert until is not None
    assert 590_000 < until.timestamp() * 1000 - acts.clock(session) <= 600_000
    assert acts.take(session, 3) == ["globex", "globex"]
    run("queue", "pause", "default")
    run("channel", "resume", "acme")
    assert acts.take(session, 3) == []
    run("queue", "resume", "default")
    assert acts.take(session, 3) == ["acme", "acme"]
    said = run("queue", "pause", "default", "--for", "1h").stdout
    until = session.scalars(select(fq.Queue.resume_at)).one()
    assert until is not None
    assert 3_590_000 < until.timestamp() * 1000 - acts.clock(session) <= 3_600_000
    assert re.fullmatch(r"Queue default is paused until 2\S+ \S+\.\n", said)
    assert run("queue", "pause", "default").stdout == "Queue default is paused.\n"
    assert run("queue", "resume", "default").stdout == "Queue default is resumed.\n"
    run("channel", "pause", "initech", "--queue", "elsewhere")
    run("queue", "pause", "mails")
    policies = select(fq.Channel.name).union_all(select(fq.Queue.name))
    there = session.scalars(policies).all()
    for misspelt in (["Acme"], ["acme"], ["acme", "--queue", "elsewhere"], ["initech"]):
        assert "is not paused" in run("channel", "resume", *misspelt, code=1).stderr
    for misspelt in (["default"], ["Mails"], ["elsewhere"], ["acme"]):
        assert "is not paused" in run("queue", "resume", *misspelt, code=1).stderr
    assert session.scalars(policies).all() == there
