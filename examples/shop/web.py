"""The shop's website, in Flask with Flask-SQLAlchemy: it takes documents.

waitress-serve --listen=127.0.0.1:5000 examples.shop.web:app
"""

from flask import Flask, abort, jsonify, request
from flask.typing import ResponseReturnValue
from flask_sqlalchemy import SQLAlchemy
from sqlalchemy import exc, select

import fairqueue as fq
from fairqueue.flask import FairQueue

from .models import Base, Document, WordCount, database_url

app = Flask(__name__)
app.config["SQLALCHEMY_DATABASE_URI"] = database_url()
# Connections that the database has closed meanwhile are replaced before a request gets one.
app.config["SQLALCHEMY_ENGINE_OPTIONS"] = {"pool_pre_ping": True}

db = SQLAlchemy(app, metadata=Base.metadata)
queue = FairQueue(app)  # `flask --app examples.shop.web fairqueue --help`


@app.post("/<tenant>/documents")
def upload(tenant: str) -> ResponseReturnValue:
    """Store the document, and a message that its words are to be counted: both are committed, or neither."""
    text = request.get_data(as_text=True)
    document = Document(tenant=tenant, name=request.args.get("name", "untitled"), text=text)
    db.session.add(document)
    db.session.flush()  # gives it its id
    fq.enqueue(db.session, tenant, {"document": document.id})

    # Whatever goes wrong from here to the commit takes both with it.
    receipt = {"id": document.id, "title": text.splitlines()[0]}  # a bug: fails for an empty text, with a 500
    if "virus" in text:
        abort(422, "this document is refused")

    db.session.commit()
    return receipt, 202


@app.get("/<tenant>/documents")
def documents(tenant: str) -> ResponseReturnValue:
    """The documents of a tenant, with their words as soon as they are counted."""
    found = select(Document.id, Document.name, WordCount.words).outerjoin(WordCount).where(Document.tenant == tenant)
    return jsonify([row._asdict() for row in db.session.execute(found.order_by(Document.id))])


@app.errorhandler(fq.InvalidValue)
def refused(error: fq.InvalidValue) -> ResponseReturnValue:
    """A tenant with a name that no channel has. Nothing was stored."""
    return {"error": str(error)}, 422


@app.errorhandler(exc.OperationalError)
@app.errorhandler(exc.TimeoutError)  # all connections of the pool are in use
def database_is_away(error: exc.SQLAlchemyError) -> ResponseReturnValue:
    """Nothing was stored; or, if it was the commit that was cut off, perhaps everything was: nobody can know."""
    return {"error": "the database is away, or busy: look whether your document is there, or send it again"}, 503
