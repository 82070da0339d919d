"""What the state machines draw, when their rules apply, what they know of a message, and how they are run."""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.reference import BLOCKED, Entry, Policy

HOUR = 3_600_000
DAY = 24 * HOUR
LEASE = HOUR

NAMES = ["acme", "globex", "initech", "umbrella", "wayne"]
names = st.sampled_from(NAMES)
costs = st.sampled_from([1, 1, 1, 0.1, 2, 7])
#: When a message may be served, in milliseconds from now.
delays = st.sampled_from([0, 0, -1, -5000, DAY, 40])
some = st.integers(0, 1_000_000)
pauses = st.sampled_from([None, None, None, BLOCKED, 40, 2 * HOUR])
limits = st.sampled_from([None, None, 1, 2, 5])
intervals = st.sampled_from([0, 0, 10, 1000, HOUR])
weights = st.sampled_from([1, 1, 2, 3, 0.5, 10])
policies = st.builds(
    Policy,
    weight=weights,
    max_concurrency=limits,
    interval=intervals,
    burst=st.sampled_from([1, 3]),
    paused_until=pauses,
)

Act = TypeVar("Act", bound=Callable[..., None])


def room(act: Act) -> Act:
    """What one call takes in before it serves is bounded, by 68 for a single message: leave out what is beyond."""
    return only_if(lambda machine: len(machine.reference.news) < 50, act)


def leased(act: Act) -> Act:
    return only_if(lambda machine: bool(machine.leases), act)


def only_if(condition: Callable[[Any], bool], act: Act) -> Act:
    @functools.wraps(act)
    def wrapped(machine: Any, **arguments: Any) -> None:
        if condition(machine):
            act(machine, **arguments)

    return cast("Act", wrapped)


@dataclass
class Known:
    """What is known of a message besides its place in the reference."""

    channel: str
    entry: Entry
    max_attempts: int | None = None
    attempt: int = 0
    forgiven: int = 0
    until: int = 0

    def used_up(self, policy: int) -> bool:
        return self.attempt - self.forgiven >= (self.max_attempts or policy)


def run_machine(machine: type[RuleBasedStateMachine], examples: int) -> None:
    """The same examples each time, unless FAIRQUEUE_TEST_EXAMPLES says how many others."""
    chosen = os.environ.get("FAIRQUEUE_TEST_EXAMPLES")
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=int(chosen or examples),
            stateful_step_count=40,
            derandomize=chosen is None,
            deadline=None,
            suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
        ),
    )
