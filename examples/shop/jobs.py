"""The shop's workers: they count words. Start as many processes as you like.

fairqueue worker examples.shop.jobs:app
"""

from sqlalchemy.orm import Session

import fairqueue as fq
from fairqueue.flask import with_app_context

from .models import Document, WordCount
from .web import app as flask_app
from .web import db

with flask_app.app_context():
    # A worker that is killed keeps its messages for 5 more seconds; then another one gets them.
    app = fq.Worker(db.engine, concurrency=4, lease=5)


@app.handler
@with_app_context(flask_app)  # here `db.session` is `session`, so that functions of the website can be used too
def count_words(message: fq.LeasedMessage, session: Session) -> None:
    """The count is committed together with the completion of the message: however often it is tried, it counts once."""
    document = session.get_one(Document, message.payload["document"])
    session.add(WordCount(document_id=document.id, words=len(document.text.split()), attempt=message.attempt))
