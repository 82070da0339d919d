"""Pauses between tries, of workers and of what starts them."""

from __future__ import annotations

import random

__all__ = ["backoff"]


def backoff(failures: int, first: float, longest: float) -> float:
    """Seconds before the next try: the first doubled with each failure, up to the longest, half of it at random."""
    # With some more the power would be more than a float holds.
    return min(first * 2.0 ** min(failures, 1000), longest) * random.uniform(0.5, 1)  # noqa: S311
