"""The pytest plugin: an installed queue for each test, in a database of its own.

Its fixtures, and how long each is good for:

fairqueue_server_url (session)
    the server: FAIRQUEUE_TEST_DSN where that is set, else an embedded one
fairqueue_install (session)
    what is installed once, in a database that those of the tests are copies of
fairqueue_url (test)
    an SQLAlchemy URL of the test's own database
fairqueue_engine (test)
    an Engine, whose sessions raise fairqueue's errors (:func:`fairqueue.translate_errors`)
fairqueue_session (test)
    a Session, in which nothing is committed unless the test or the application does it
fairqueue_async_engine (test)
    an AsyncEngine, for any event loop; its sessions raise the same
fairqueue_clock (test)
    a :class:`fairqueue.testing.Clock` of that database, at real time

Each can be overridden, as fixtures are, by one of the same name in ``conftest.py``. The others then go on from there.
Nothing happens, and nothing is imported, before a test asks for one. With pytest-xdist each process starts an embedded
server of its own; on a server that is given, each uses databases of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from sqlalchemy import Engine
    from sqlalchemy.ext.asyncio import AsyncEngine
    from sqlalchemy.orm import Session

    from . import Clock
    from ._databases import Databases


@pytest.fixture(scope="session")
def fairqueue_server_url() -> Iterator[str]:
    """An SQLAlchemy URL of a server where databases can be created: FAIRQUEUE_TEST_DSN, else an embedded one."""
    from fairqueue import embedded

    if url := embedded.url_in("FAIRQUEUE_TEST_DSN"):
        yield url
        return
    try:
        server = embedded.ephemeral()
    except embedded.EmbeddedError as error:
        error.add_note("Tests can also use a running server: name it in FAIRQUEUE_TEST_DSN.")
        raise
    with server:
        yield server.url()


@pytest.fixture(scope="session")
def fairqueue_install() -> Callable[[Engine], object]:
    """Called once, with an Engine of an empty database: installs the queue, and nothing else.

    Override it to return ``Base.metadata.create_all``, or a function that runs your Alembic history.
    """
    from fairqueue import schema

    def install(engine: Engine) -> None:
        with engine.begin() as connection:
            schema.install(connection)

    return install


@pytest.fixture(scope="session")
def _fairqueue_databases(fairqueue_server_url: str) -> Iterator[Databases]:
    from ._databases import Databases

    with Databases(fairqueue_server_url) as databases:
        yield databases


@pytest.fixture(scope="session")
def _fairqueue_templates(_fairqueue_databases: Databases) -> Iterator[Callable[[Callable[[Engine], object]], str]]:
    """Returns the name of a database in which something has been installed: a folder of tests may have its own."""
    made: dict[Callable[[Engine], object], str | Exception] = {}
    with ExitStack() as stack:

        def name_of(install: Callable[[Engine], object]) -> str:
            if install not in made:
                try:
                    made[install] = stack.enter_context(_installed(_fairqueue_databases, install))
                except Exception as error:  # noqa: BLE001 - of each test that asks for it, but it takes its time once
                    made[install] = error
            name = made[install]
            if isinstance(name, Exception):
                raise name
            return name

        yield name_of


@contextmanager
def _installed(databases: Databases, install: Callable[[Engine], object]) -> Iterator[str]:
    from sqlalchemy import NullPool, create_engine, make_url, text

    with databases.create("template1") as url:
        # Nobody may be connected to a database that is copied, so no connection is kept.
        engine = create_engine(url, poolclass=NullPool)
        install(engine)
        with engine.connect() as connection:
            if not connection.scalar(text("SELECT true FROM pg_proc WHERE proname = 'message_dequeue' LIMIT 1")):
                raise pytest.UsageError(
                    "fairqueue_install has left no queue in the test database: does what it calls, such as your env.py,"
                    " connect to another one?"
                )
        name = make_url(url).database
        assert name is not None
        # An application that has installed it may have kept a connection, in the pool of its own engine.
        databases.close(name)
        yield name


@pytest.fixture
def fairqueue_url(
    _fairqueue_databases: Databases,
    _fairqueue_templates: Callable[[Callable[[Engine], object]], str],
    fairqueue_install: Callable[[Engine], object],
) -> Iterator[str]:
    """An SQLAlchemy URL of this test's own database, everything installed and empty."""
    with _fairqueue_databases.create(_fairqueue_templates(fairqueue_install)) as url:
        yield url


@pytest.fixture
def fairqueue_engine(fairqueue_url: str) -> Iterator[Engine]:
    """An Engine of this test's own database."""
    from sqlalchemy import create_engine

    from fairqueue import translate_errors

    engine = create_engine(fairqueue_url)
    translate_errors(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def fairqueue_session(fairqueue_engine: Engine) -> Iterator[Session]:
    """A Session in this test's own database."""
    from sqlalchemy.orm import Session

    with Session(fairqueue_engine) as session:
        yield session


@pytest.fixture
def fairqueue_async_engine(fairqueue_url: str) -> AsyncEngine:
    """An AsyncEngine of this test's own database; it keeps no connection, so it is of no event loop."""
    from sqlalchemy import NullPool
    from sqlalchemy.ext.asyncio import create_async_engine

    from fairqueue import translate_errors

    engine = create_async_engine(fairqueue_url, poolclass=NullPool)
    translate_errors(engine)
    return engine


@pytest.fixture
def fairqueue_clock(fairqueue_engine: Engine) -> Iterator[Clock]:
    """The time of the queue in this test's own database: ``fairqueue_clock.tick(60)``."""
    from . import Clock

    with Clock(fairqueue_engine) as clock:
        yield clock
