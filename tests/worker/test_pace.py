"""How many messages are to stand by, by how fast slots take them up."""

from hypothesis import given
from hypothesis import strategies as st

from fairqueue.worker.pace import Pace

TIMES = st.floats(0, 100, allow_nan=False)


def paced(prefetch: int | None, taken: int, *, seconds: float, passed: float) -> Pace:
    """What it finds when so many were taken up from one dequeue to the next."""
    pace = Pace(prefetch)
    pace.dequeued(taken, standing=0, seconds=seconds, now=1000.0)
    pace.dequeued(5, standing=0, seconds=seconds, now=1000.0 + passed)
    return pace


def test_by_what_handlers_take() -> None:
    """Ten slots, and dequeues of 2 ms."""
    assert paced(None, 10, seconds=0.002, passed=1).prefetch == 0
    assert paced(None, 10, seconds=0.002, passed=0.1).prefetch == 0
    assert paced(None, 10, seconds=0.002, passed=0.02).prefetch == 2
    assert paced(None, 10, seconds=0.002, passed=0.007).prefetch == 6
    assert paced(None, 10, seconds=0.002, passed=0.002).prefetch == 20
    assert paced(None, 500, seconds=0.002, passed=0.002).prefetch == 100


@given(taken=st.integers(0, 60), seconds=TIMES, passed=TIMES)
def test_never_more_than_twice_what_was_taken_up(taken: int, seconds: float, passed: float) -> None:
    """However long an outage was, and whatever the clock did."""
    assert 0 <= paced(None, taken, seconds=seconds, passed=passed).prefetch <= min(2 * taken, 100)
    assert paced(7, taken, seconds=seconds, passed=passed).prefetch == 7


def test_after_an_outage() -> None:
    """Handlers of a second, ten at a time, while the database is away for a minute or the turn is held for two seconds.

    The pauses between tries are no dequeue to be waited for.
    """
    assert paced(None, 20, seconds=60, passed=60).prefetch == 0
    assert paced(None, 20, seconds=2, passed=2).prefetch == 5


@given(taken=st.integers(0, 1000), seconds=TIMES, passed=TIMES)
def test_within_half_of_its_patience(taken: int, seconds: float, passed: float) -> None:
    """At the pace that was seen."""
    pace = paced(None, taken, seconds=seconds, passed=passed)
    assert pace.prefetch * max(seconds, passed) <= taken * pace.patience / 2 + max(seconds, passed)


@given(taken=st.integers(1, 10_000), seconds=TIMES)
def test_what_stands_by_is_not_taken_up(taken: int, seconds: float) -> None:
    pace = Pace()
    pace.dequeued(taken, standing=0, seconds=seconds, now=1000.0)
    pace.dequeued(0, standing=taken, seconds=seconds, now=1000.0 + seconds)
    assert pace.prefetch == 0


def test_without_a_backlog() -> None:
    """It takes two dequeues that came back full to see how fast their messages are taken up."""
    pace = paced(None, 10, seconds=0.002, passed=0.002)
    assert pace.prefetch == 20
    pace.rest()
    assert pace.prefetch == 0
    pace.dequeued(10, standing=0, seconds=0.002, now=1000.01)
    assert pace.prefetch == 0
    pace.dequeued(10, standing=0, seconds=0.002, now=1000.02)
    assert pace.prefetch == 4


def test_what_it_is_told() -> None:
    """Is neither changed nor left to others."""
    pace = Pace(20)
    pace.rest()
    assert pace.prefetch == 20
    assert pace.patience == float("inf")
    assert Pace().patience == 1
