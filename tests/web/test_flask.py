"""fairqueue.flask: the extension, its commands, and handlers in an application context."""

from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from flask import Flask, current_app, g, has_app_context
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import Engine, MetaData, create_engine, event, make_url, select, text
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import fairqueue as fq
from fairqueue.flask import FairQueue, with_app_context
from fairqueue.installation import installations
from tests.acts import put, wait_until


class Host:
    """An application with Flask-SQLAlchemy."""

    def __init__(self, url: str, attach: dict[str, Any] | None = None, **config: object) -> None:
        class Base(DeclarativeBase):
            pass

        if attach is not None:
            fq.attach(Base.metadata, **attach)
        self.db = SQLAlchemy(model_class=Base)

        class Note(self.db.Model):  # type: ignore[name-defined,misc]
            id: Mapped[int] = mapped_column(primary_key=True)
            text: Mapped[str]

        self.note: Any = Note
        self.app = Flask(__name__)
        self.app.config.update(config, SQLALCHEMY_DATABASE_URI=url)
        self.db.init_app(self.app)
        FairQueue(self.app)
        self.app.add_url_rule("/<tenant>", view_func=self.upload, methods=["POST"])

    def upload(self, tenant: str) -> str:
        self.db.session.add(self.note(text="of a request"))
        fq.enqueue(self.db.session, tenant)
        self.db.session.flush()
        if tenant == "refused":
            raise ValueError(tenant)
        if tenant != "forgotten":
            self.db.session.commit()
        return "done"


HostOf = Callable[..., Host]


@pytest.fixture
def host() -> Iterator[HostOf]:
    """Makes applications, and closes their connections."""
    hosts: list[Host] = []

    def make(url: str, attach: dict[str, Any] | None = None, **config: object) -> Host:
        hosts.append(Host(url, attach, **config))
        return hosts[-1]

    yield make
    for each in hosts:
        with each.app.app_context():
            each.db.engine.dispose()


def count(session: Session, table: str) -> int:
    there: int = session.execute(text(f"SELECT count(*) FROM {table}")).scalar_one()
    return there


@pytest.mark.parametrize("tenant", ["acme", "refused", "forgotten"])
def test_a_message_commits_with_its_request(host: HostOf, database_url: str, session: Session, tenant: str) -> None:
    """One that raises, or ends without a commit, leaves nothing."""
    shop = host(database_url)
    with shop.app.app_context():
        shop.db.create_all()
    answer = shop.app.test_client().post(f"/{tenant}")
    assert answer.status_code == (500 if tenant == "refused" else 200)
    there = 1 if tenant == "acme" else 0
    assert (count(session, "note"), count(session, "fairqueue.message")) == (there, there)


@pytest.mark.parametrize(
    ("attached", "config", "found"),
    [
        (None, {}, {"fairqueue": True}),
        (None, {"FAIRQUEUE_SCHEMA": "My Q", "FAIRQUEUE_MANAGE": False}, {"My Q": False}),
        ({"schema": "jobs", "manage": False}, {}, {"jobs": False}),
        ({"manage": False}, {"FAIRQUEUE_MANAGE": True}, {"fairqueue": True}),
    ],
)
def test_what_is_attached(
    host: HostOf, database_url: str, attached: dict[str, Any] | None, config: dict[str, Any], found: dict[str, bool]
) -> None:
    """What the configuration doesn't say stays as the models say it."""
    shop = host(database_url, attached, **config)
    assert installations(shop.db.metadata) == found
    assert found == {shop.app.config["FAIRQUEUE_SCHEMA"]: shop.app.config["FAIRQUEUE_MANAGE"]}


def test_another_schema(host: HostOf, empty_database_url: str) -> None:
    """create_all() installs into it, and requests and commands go to it, beside the translations that are there."""
    options = {"execution_options": {"schema_translate_map": {"theirs": "public", "fairqueue": "elsewhere"}}}
    shop = host(empty_database_url, FAIRQUEUE_SCHEMA="My Q", SQLALCHEMY_ENGINE_OPTIONS=options)
    with shop.app.app_context():
        shop.db.create_all()
        shop.app.test_client().post("/acme")
        assert shop.db.session.scalar(text('SELECT channel FROM "My Q".message')) == "acme"
        translated = shop.db.engine.get_execution_options()["schema_translate_map"]
        assert translated == {"theirs": "public", "fairqueue": "My Q"}
    done = shop.app.test_cli_runner().invoke(args=["fairqueue", "status"])
    assert done.exit_code == 0, done.output
    assert "acme" in done.output


@pytest.mark.parametrize("named", [None, "fairqueue"], ids=["unless it is named", "where it is named"])
def test_the_schema_of_the_engine(engine: Engine, session: Session, database_url: str, named: str | None) -> None:
    """Requests and commands go to the same one: that of the engine, unless the configuration names another."""
    its_own = create_engine(database_url, execution_options=fq.in_schema("elsewhere"))
    with its_own.begin() as connection:
        fq.schema.install(connection)
    app = Flask(__name__)
    if named is not None:
        app.config["FAIRQUEUE_SCHEMA"] = named
    FairQueue(app, its_own)
    with Session(its_own) as request:
        fq.enqueue(request, "acme")
        request.commit()
    there = {schema: count(session, f"{schema}.message") for schema in ("elsewhere", "fairqueue")}
    assert there == {"elsewhere": named is None, "fairqueue": named is not None}
    done = app.test_cli_runner().invoke(args=["fairqueue", "status"])
    its_own.dispose()
    assert done.exit_code == 0, done.output
    assert "acme" in done.output


def test_what_to_do_without_a_queue(empty: Engine) -> None:
    """In the words of Flask's command line, which has no --schema; also while it watches."""
    app = Flask(__name__)
    FairQueue(app, empty)
    for options in ([], ["--watch"]):
        done = app.test_cli_runner().invoke(args=["fairqueue", "status", *options])
        assert done.exit_code == 1
        assert "`flask fairqueue migrate`; or name another by FAIRQUEUE_SCHEMA" in done.output


@pytest.mark.parametrize(
    ("broken", "arguments", "way_out"),
    [
        ("SELECT", ["channel", "pause", "acme", "--for", "0s"], "; `flask fairqueue channel resume` ends a pause"),
        ("SELECT", ["queue", "pause", "default", "--for", "0s"], "; `flask fairqueue queue resume` ends a pause"),
        (
            "SELECT fairqueue.channel_set('acme', paused => true, resume_at => '20000-01-01')",
            ["channel", "list"],
            ": `flask fairqueue channel resume`, or `flask fairqueue queue resume`, ends it",
        ),
        (
            "ALTER TABLE fairqueue.message DISABLE TRIGGER USER",
            ["status"],
            "; then `flask fairqueue check --repair` makes known",
        ),
    ],
)
def test_ways_out_are_commands_of_flask(engine: Engine, broken: str, arguments: list[str], way_out: str) -> None:
    """Whether they are told of a value, of what the driver can't read, or of what is found in the schema."""
    app = Flask(__name__)
    FairQueue(app, engine)
    with engine.begin() as connection:
        connection.execute(text(broken))
    done = app.test_cli_runner().invoke(args=["fairqueue", *arguments])
    assert done.exit_code != 0
    assert way_out in done.output


def test_another_extension_of_that_name(engine: Engine) -> None:
    """Such as Flask-SQLAlchemy-Lite, which has no metadata, and a session that is none that stands for others."""
    app = Flask("theirs")
    with Session(engine) as its, Session(engine) as given:
        app.extensions["sqlalchemy"] = SimpleNamespace(session=its)
        with pytest.raises(fq.InvalidValue, match="engine must be an Engine or a URL"):
            FairQueue(app)
        FairQueue(app, engine)
        handler = with_app_context(app)(lambda session: session)
        assert handler(given) is given


def test_flushes_raise_our_errors(host: HostOf, database_url: str) -> None:
    shop = host(database_url)
    with shop.app.app_context():
        for _ in range(2):
            fq.enqueue(shop.db.session, "acme", key="nightly")
        with pytest.raises(fq.DuplicateKey):
            shop.db.session.commit()


@pytest.mark.parametrize("kind", ["engine", "text", "URL", "of the extension", "of the application"])
def test_without_flask_sqlalchemy(engine: Engine, database_url: str, session: Session, kind: str) -> None:
    put(session, "acme", 3)
    app = Flask(__name__)
    if kind == "of the extension":
        queue = FairQueue(engine=engine)
        queue.init_app(app)
        assert app.extensions["fairqueue"] is queue
    elif kind == "of the application":
        FairQueue(engine="postgresql://nobody@127.0.0.1:1/nothing").init_app(app, engine)
    else:
        places: dict[str, Any] = {"engine": engine, "text": database_url, "URL": make_url(database_url)}
        FairQueue(app, places[kind])
    done = app.test_cli_runner().invoke(args=["fairqueue", "status"])
    assert done.exit_code == 0, done.output
    assert "acme" in done.output


def test_bad_configuration(host: HostOf, database_url: str, engine: Engine) -> None:
    with pytest.raises(fq.InvalidValue, match=r"engine must be an Engine or a URL, not None: .*db\.init_app"):
        FairQueue(Flask(__name__))
    with pytest.raises(fq.InvalidValue, match="engine must be an Engine or a URL, not MetaData"):
        FairQueue(Flask(__name__), MetaData())  # type: ignore[arg-type]
    binds_alone = Flask(__name__)
    binds_alone.config["SQLALCHEMY_BINDS"] = {"archive": database_url}
    SQLAlchemy(binds_alone)
    with pytest.raises(fq.InvalidValue, match=r"engine must be an Engine or a URL, not None: .*DATABASE_URI"):
        FairQueue(binds_alone)
    FairQueue(binds_alone, engine)
    with pytest.raises(fq.InvalidValue, match="FAIRQUEUE_MANAGE must be True or False, not 'no'"):
        host(database_url, FAIRQUEUE_MANAGE="no")
    with pytest.raises(fq.InvalidValue, match="schema must be a name"):
        host(database_url, FAIRQUEUE_SCHEMA="")

    async def handler(message: fq.LeasedMessage) -> None: ...

    def stepwise(message: fq.LeasedMessage) -> Iterator[None]:
        yield

    async def both(message: fq.LeasedMessage) -> AsyncIterator[None]:
        yield

    named = ((handler, "handler"), (stepwise, "stepwise"), (both, "both"), (partial(handler), "partial.*handler"))
    for wrong, name in named:
        with pytest.raises(fq.InvalidValue, match=rf"handler must be a plain function, .*{name}"):
            with_app_context(Flask(__name__))(wrong)


def work(app: fq.Worker, session: Session) -> None:
    """Run a worker until the queue is empty."""
    with app:
        wait_until(lambda: not live(session))


def live(session: Session) -> int:
    there = count(session, "fairqueue.message")
    session.commit()
    return there


def test_a_handler_in_an_application_context(host: HostOf, database_url: str, session: Session) -> None:
    """Its session is db.session, and what is written there commits with the completion, or not at all."""
    shop = host(database_url)
    with shop.app.app_context():
        shop.db.create_all()
        app = fq.Worker(shop.db.engine, concurrency=4)
    seen: list[tuple[bool, bool]] = []

    @app.handler
    @with_app_context(shop.app)
    def handle(message: fq.LeasedMessage, given: Session) -> None:
        # A real application: Flask has put a proxy before it.
        seen.append((current_app._get_current_object() is shop.app, shop.db.session() is given))  # type: ignore[attr-defined]
        shop.db.session.add(shop.note(text=f"{message.channel} {message.attempt}"))
        shop.db.session.flush()
        if message.channel == "fails" and message.attempt == 1:
            raise ValueError("at first")

    fq.enqueue(session, "works")
    fq.enqueue(session, "fails", backoff=0)
    session.commit()
    work(app, session)
    assert set(seen) == {(True, True)}
    assert len(seen) == 3
    assert sorted(session.scalars(select(shop.note.text))) == ["fails 2", "works 1"]
    assert not has_app_context()

    @with_app_context(shop.app)
    def called_by_name(message: object, db: Session) -> bool:
        return shop.db.session() is db

    assert called_by_name(message=None, db=session)


def test_what_is_written_at_the_end_of_a_handler(host: HostOf, database_url: str, session: Session) -> None:
    """Is flushed and committed in the application context, too: types and listeners may need one."""
    shop = host(database_url)
    with shop.app.app_context():
        shop.db.create_all()
        app = fq.Worker(shop.db.engine)
    seen: list[tuple[str, bool]] = []
    shop.app.teardown_appcontext(lambda _: seen.append(("teardown", True)))

    @app.handler
    @with_app_context(shop.app)
    def handle(message: fq.LeasedMessage, given: Session) -> None:
        g.tenant = message.channel
        for name in ("before_flush", "before_commit", "after_commit"):
            event.listen(given, name, partial(look, name, given), once=True)
        given.add(shop.note(text=message.channel))

    def look(name: str, given: Session, *_: object) -> None:
        seen.append((name, shop.db.session() is given and g.tenant == "acme"))

    fq.enqueue(session, "acme")
    session.commit()
    work(app, session)
    assert seen == [("before_flush", True), ("before_commit", True), ("after_commit", True), ("teardown", True)]
    assert session.scalars(select(shop.note.text)).all() == ["acme"]


def test_a_handler_without_a_session(host: HostOf, database_url: str, session: Session) -> None:
    """db.session is then the handler's own business, and closed after it."""
    shop = host(database_url)
    with shop.app.app_context():
        shop.db.create_all()
        app = fq.Worker(shop.db.engine)

    @app.handler
    @with_app_context(shop.app)
    def handle(message: fq.LeasedMessage) -> None:
        shop.db.session.add(shop.note(text=message.channel))
        if message.channel == "commits":
            shop.db.session.commit()
        else:
            shop.db.session.flush()

    fq.enqueue(session, "commits")
    fq.enqueue(session, "forgets")
    session.commit()
    work(app, session)
    assert session.scalars(select(shop.note.text)).all() == ["commits"]
