"""Messages with one key, and what there is to say of a second one."""

from typing import Any

from sqlalchemy import text
from sqlalchemy.orm import Session

import fairqueue as fq

KEY = "nightly"
MODES = ["raise", "ignore", "replace"]


def live(session: Session) -> list[tuple[int, Any]]:
    """The messages with the key: their ids and payloads."""
    query = text("SELECT id, payload FROM fairqueue.message WHERE key = :key ORDER BY id")
    found = [(id_, payload) for id_, payload in session.execute(query, {"key": KEY})]
    session.commit()
    return found


def message(session: Session, id_: int) -> fq.Message:
    return session.get_one(fq.Message, id_, populate_existing=True)
