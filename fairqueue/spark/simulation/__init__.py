"""A multi-tenant queue simulated: how long would my quiet tenants wait, with 10,000 tenants and 50 workers?

::

    from fairqueue.spark.simulation import Scenario, run

    for scheduler in ("arrival", "fair"):
        quiet, noisy, all_ = run(Scenario(scheduler=scheduler, tenants=1_000, workers=10, load=1.1, messages=20_000))
        print(scheduler, quiet["wait_p99"], noisy["wait_p99"])

:func:`run` needs NumPy alone; :func:`simulate` runs a :func:`grid` of scenarios on Spark, one a task, and
``simulation.picture.draw`` makes a picture of what came of it.

Same seed, same result, wherever it runs: the seed decides all that chance does, and time is counted in whole
nanoseconds.

Limitations: it simulates the order of service, not the database. A dequeue takes no time and one message; a worker
learns of a message at once; no lease runs out, nothing fails, nothing is tried again. So for waits of many
milliseconds it is right, and of a queue that dequeues as fast as its workers ask; ``python -m benchmarks`` says how
fast that is. A simulation begins with an empty queue and idle workers: with a load of 1 and above, waits grow for as
long as messages arrive, so they depend on how many there are. All messages of a simulation are in memory, some 300
bytes each.
"""

from __future__ import annotations

from .fan_out import simulate
from .loads import Channel, Load
from .results import COLUMNS, GROUPS, run
from .scenarios import Scenario, grid

__all__ = ["COLUMNS", "GROUPS", "Channel", "Load", "Scenario", "grid", "run", "simulate"]
