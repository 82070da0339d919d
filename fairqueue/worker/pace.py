"""How many messages stand by in a worker, where it isn't told: as few as keep its slots from waiting for the database.

While a dequeue is under way, slots come free: by Little's law as many as take up a message in a second, times the
seconds of the dequeue. So many have to stand by when it is sent, which is when half of them are gone: twice as many are
leased. Where handlers take seconds, that is none. Where they take less than the dequeue, it doubles from one to the
next, up to a hundred, beyond which the time of a dequeue is little beside that of its messages. Nor are more leased
ahead where there is no backlog, as another worker may have a slot for them.

A pace is a guess, and handlers may slow down. So all that stands by is left to other workers when the oldest of it has
done so for a second. At the pace that was seen it takes about half of that at most, so that this is no rule::

    from fairqueue.worker.pace import Pace

    pace = Pace()
    pace.dequeued(10, standing=0, seconds=0.002, now=7.0)   # the first one: ten messages, and none stood by before
    pace.dequeued(10, standing=0, seconds=0.002, now=7.02)  # the second one, 20 ms later: those ten have been begun
    assert pace.prefetch == 2                               # so one is begun while a dequeue is under way
"""

from __future__ import annotations

__all__ = ["Pace"]

#: So many at most: what a worker holds, these and as many again that aren't reported, waits for the end of its lease if
#: that is killed.
_MOST = 100
#: Seconds that a message may stand by before it is left to others.
_PATIENCE = 1.0
#: Seconds of a dequeue that count. One may take longer, when it waits for another's turn or for a server that is away.
_LONGEST = _PATIENCE / 4


class Pace:
    """How fast slots take up messages.

    :param prefetch: how many are to stand by, whatever the pace is; None: as above.
    """

    def __init__(self, prefetch: int | None = None) -> None:
        self.prefetch = prefetch or 0
        #: Seconds that a message may stand by.
        self.patience = _PATIENCE if prefetch is None else float("inf")
        self._adapts = prefetch is None
        self._leased = self._taken = 0
        self._last = float("-inf")

    def dequeued(self, messages: int, *, standing: int, seconds: float, now: float) -> None:
        """A dequeue has come back.

        :param messages: how many it leased.
        :param standing: how many others stand by.
        :param seconds: how long it took.
        :param now: the time, as of :func:`time.monotonic`.
        """
        taken = self._leased - standing
        if self._adapts:
            # At least the time of the dequeue has passed: so this is at most twice what was taken up.
            passed = max(now - self._last, seconds)
            ahead = 2 * min(seconds, _LONGEST)
            self.prefetch = min(_MOST, round((taken - self._taken) * ahead / passed)) if passed else 0
        self._leased += messages
        self._taken, self._last = taken, now

    def rest(self) -> None:
        """There is no backlog, or patience has ended: lease none ahead, and find out anew."""
        if self._adapts:
            self.prefetch = 0
            self._last = float("-inf")
