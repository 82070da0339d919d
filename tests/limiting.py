"""Short words for limits: setting them, each in a transaction of its own, and serving for longer than a test takes."""

import time
from typing import Any

from sqlalchemy.orm import Session

import fairqueue as fq
from tests.acts import lease_of, take

_DAY = 86_400_000
#: When the clock stands, in Unix milliseconds: tomorrow at noon. That is later than all that the real clock says while
#: tests run, and the partitions of that day's history are there, so that not each test has to make them.
NOW = (int(time.time() * 1000) // _DAY + 1) * _DAY + _DAY // 2
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
