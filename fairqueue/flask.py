"""Flask: the queue of an application, set up in Flask's usual form.

::

    from fairqueue.flask import FairQueue

    db = SQLAlchemy(model_class=Base)
    queue = FairQueue()


    def create_app() -> Flask:
        app = Flask(__name__)
        app.config["SQLALCHEMY_DATABASE_URI"] = "postgresql+psycopg://localhost/app"
        db.init_app(app)
        queue.init_app(app)  # after db: it uses its engine and its metadata
        return app

Enqueueing needs nothing from here. ``db.session`` is the session of the request, so the message commits with its rows::

    @app.post("/<tenant>/documents")
    def upload(tenant: str) -> tuple[dict[str, int], int]:
        document = Document(tenant=tenant, text=request.get_data(as_text=True))
        db.session.add(document)
        db.session.flush()
        fq.enqueue(db.session, tenant, {"document": document.id})
        answer = {"id": document.id}  # before the commit, which expires the document
        db.session.commit()
        return answer, 202

What :class:`FairQueue` does: ``db.create_all()`` and autogenerate know of the queue (:func:`fairqueue.attach`), flushes
raise fairqueue's errors (:func:`fairqueue.translate_errors`), ``flask fairqueue --help`` lists the commands that work
on the application's database. :func:`with_app_context` gives the handlers of a worker an application context.

Without Flask-SQLAlchemy, give an engine: ``queue.init_app(app, engine)``. Its metadata is yours to attach. Where a URL
is given, it is for the commands alone.

=================== ==================================================================================================
FAIRQUEUE_SCHEMA    the schema of the queue; unless set, the one that ``db.metadata`` has attached, else that of the
                    engine (:func:`fairqueue.in_schema`), else "fairqueue"
FAIRQUEUE_MANAGE    False: another application's migrations install it; unless set, as attached, else True
=================== ==================================================================================================

Limitations: with several binds, the queue is in the default one, and so is all that a worker's handlers write. Their
session is made of the worker's engine: what listens to ``db.session`` doesn't hear of it; listen to
``sqlalchemy.orm.Session`` instead. A metadata is shared by all applications that use it;
if these name different schemas, each of them installs all. An engine that several applications share goes to the schema
of the last one.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

from click import Context, Group, pass_context
from flask import Flask
from sqlalchemy import URL, Engine
from sqlalchemy.orm import Session, scoped_session

from ._checks import check_flag
from .cli import Target, commands
from .errors import InvalidValue, translate_errors
from .installation import attach, installations
from .models.base import in_schema
from .schema import DEFAULT_SCHEMA, check_schema_name, schema_of
from .worker.handlers import AROUND

__all__ = ["FairQueue", "with_app_context"]

P = ParamSpec("P")
R = TypeVar("R")


class FairQueue:
    """The extension; one object serves any number of applications.

    :param app: the same as calling :meth:`init_app` with it.
    :param engine: that of the applications for which none is given.
    """

    def __init__(self, app: Flask | None = None, engine: Engine | URL | str | None = None) -> None:
        self._engine = engine
        if app is not None:
            self.init_app(app)

    def init_app(self, app: Flask, engine: Engine | URL | str | None = None) -> None:
        """Set up the queue of an application; talks to no database.

        :param app: configured already, and known to Flask-SQLAlchemy, if that is used.
        :param engine: where the queue is, or its URL, for the commands. None: Flask-SQLAlchemy's default engine.
        :raises InvalidValue: if there is no engine, or a value of the configuration makes no sense.
        """
        engine = self._engine if engine is None else engine
        db: Any = app.extensions.get("sqlalchemy") if engine is None else None
        if not hasattr(db, "metadata"):  # another extension of that name, such as Flask-SQLAlchemy-Lite
            db = None
        if db is not None:
            with app.app_context():
                engine = db.engines.get(None)  # none where there is nothing but binds
        if isinstance(engine, URL):
            engine = engine.render_as_string(hide_password=False)
        if not isinstance(engine, Engine | str):
            raise InvalidValue(
                f"engine must be an Engine or a URL, not {engine!r}: give one, or set SQLALCHEMY_DATABASE_URI and call"
                " db.init_app(app) before"
            )
        known = {} if db is None else installations(db.metadata)
        its_own = schema_of(engine.get_execution_options()) if isinstance(engine, Engine) else DEFAULT_SCHEMA
        schema = app.config.setdefault("FAIRQUEUE_SCHEMA", next(iter(known), its_own))
        check_schema_name(schema)
        manage = check_flag("FAIRQUEUE_MANAGE", app.config.setdefault("FAIRQUEUE_MANAGE", known.get(schema, True)))
        if db is not None:
            attach(db.metadata, schema, manage=manage)
        if isinstance(engine, Engine):
            _go_to(engine, schema)
            translate_errors(engine)
        app.cli.add_command(_commands(engine, schema))
        app.extensions["fairqueue"] = self


def with_app_context(app: Flask) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Run a worker's handler in an application context of its own::

        flask_app = create_app()
        with flask_app.app_context():
            app = fq.Worker(db.engine)

        @app.handler
        @with_app_context(flask_app)
        def count(message: fq.LeasedMessage, session: Session) -> None:
            ...  # db.session is the same session here

    With Flask-SQLAlchemy, what the handler calls may use ``db.session``: it is the session that the handler was given,
    in whose transaction the message is completed. Don't commit, roll back, close or remove it: the worker does, and in
    an application context, too, so that types and listeners of yours find one. In an
    application context of your own, and for a handler that takes no session, it is another one, which is yours to
    commit.

    :raises InvalidValue: for an async handler: Flask-SQLAlchemy is synchronous.
    """

    def decorate(handler: Callable[P, R]) -> Callable[P, R]:
        kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction)
        if any(kind(handler) for kind in kinds):
            name = getattr(handler, "__qualname__", handler)  # a functools.partial has none
            raise InvalidValue(f"handler must be a plain function, not async, and not yield: {name}")

        inside: ContextVar[Session | None] = ContextVar("inside", default=None)

        @contextmanager
        def around(session: Session | None) -> Iterator[None]:
            with app.app_context(), _as_db_session(app, session):
                token = inside.set(session)
                try:
                    yield
                finally:
                    inside.reset(token)

        @functools.wraps(handler)
        def in_context(*args: P.args, **kwargs: P.kwargs) -> R:
            session = next((value for value in (*args, *kwargs.values()) if isinstance(value, Session)), None)
            if session is not None and inside.get() is session:
                return handler(*args, **kwargs)
            with around(session):
                return handler(*args, **kwargs)

        # For the worker, whose flush and commit come after it.
        setattr(in_context, AROUND, around)
        return in_context

    return decorate


@contextmanager
def _as_db_session(app: Flask, session: Session | None) -> Iterator[None]:
    """Let ``db.session`` be ``session`` in the current application context."""
    db: Any = app.extensions.get("sqlalchemy")
    if session is None or not isinstance(getattr(db, "session", None), scoped_session):
        yield
        return
    db.session.registry.set(session)
    try:
        yield
    finally:
        # Or Flask-SQLAlchemy would close it with the context, before the worker has completed the message.
        db.session.registry.clear()


def _commands(place: Engine | str, schema: str) -> Group:
    """The commands of the command line that work on a database, for this one."""

    def target(context: Context) -> None:
        context.obj = Target(place, schema, command="flask fairqueue", setting="FAIRQUEUE_SCHEMA")

    return Group(
        "fairqueue",
        commands,
        callback=pass_context(target),
        help="The queue of this application: what stands in it, policies, dead letters, checks.",
    )


def _go_to(engine: Engine, schema: str) -> None:
    """Let the queue's statements on this engine go to ``schema``."""
    options = engine.get_execution_options()
    if schema == schema_of(options):
        return
    others = options.get("schema_translate_map") or {}
    ours = in_schema(schema)["schema_translate_map"]
    engine.update_execution_options(schema_translate_map={**others, **ours})
