"""Short words for limits: setting them, each in a transaction of its own, and serving for longer than a test takes."""

from typing import Any

from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import lease_of, take

#: When the clock stands, in Unix milliseconds.
NOW = 1_800_000_000_000
#: Longer than the clock is moved by.
LEASE = 10_000_000


def limit(session: Session, name: str = "acme", **policy: Any) -> None:
    """Set what is named of the policy of a channel."""
    session.merge(fq.Channel(name, **policy))
    session.commit()


def limit_queue(session: Session, **policy: Any) -> None:
    session.merge(fq.Queue("default", **policy))
    session.commit()


def leases(session: Session, count: int = 100) -> list[fq.LeasedMessage]:
    return lease_of(session, count, LEASE)


def serve(session: Session, count: int = 100) -> list[str]:
    """The channels served."""
    return take(session, count, LEASE)
