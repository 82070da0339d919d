"""The questions, by name, in the order in which they are asked. Each module has `cases(size)`; see measuring.Case.

A scenario yields records and prints nothing. Its module's docstring is its introduction in the report, and the first
line of that the heading.
"""

from __future__ import annotations

from types import ModuleType

from . import (
    cost,
    dequeueing,
    draining,
    enqueueing,
    fairness,
    flood,
    growth,
    imports,
    latency,
    old_snapshot,
    open_enqueuers,
    peers,
    sizes,
    spark,
)

__all__ = ["SCENARIOS"]

SCENARIOS: dict[str, ModuleType] = {
    "fairness": fairness,
    "enqueueing": enqueueing,
    "dequeueing": dequeueing,
    "draining": draining,
    "growth": growth,
    "sizes": sizes,
    "old-snapshot": old_snapshot,
    "flood": flood,
    "open-enqueuers": open_enqueuers,
    "latency": latency,
    "cost": cost,
    "imports": imports,
    "peers": peers,
    "spark": spark,
}
