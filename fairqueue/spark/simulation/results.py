"""What a scenario comes to, for the tenants together, for the quiet ones and for the noisy ones."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import Any

import numpy as np

from .loads import SECOND, Integers, Load, Numbers
from .scenarios import Scenario
from .schedulers import SCHEDULERS
from .simulator import Service, serve
from .workloads import make_load

__all__ = ["COLUMNS", "GROUPS", "PERCENTILES", "measure", "run"]

#: Quiet are the half of the tenants that send least, noisy the one in a hundred that send most, but at least one.
GROUPS = ("quiet", "noisy", "all")
PERCENTILES = (50, 95, 99)

_WAITS = [f"p{percentile}" for percentile in PERCENTILES] + ["max"]
_TYPES = {"str": "string", "int": "bigint", "float": "double", "tuple[float, ...]": "array<double>"}

#: The columns of a row and their types in Spark: the scenario, then what came of it.
COLUMNS: dict[str, str] = {
    **{each.name: _TYPES[str(each.type).removesuffix(" | None")] for each in fields(Scenario)},
    "group": "string",
    "group_tenants": "bigint",
    "group_messages": "bigint",
    **{f"wait_{name}": "double" for name in _WAITS},
    **{f"services_{name}": "double" for name in _WAITS},
    "throughput": "double",
    "utilisation": "double",
    "first_place": "bigint",
    "span": "double",
}


def run(scenario: Scenario) -> list[dict[str, Any]]:
    """Simulate a scenario in this process; a row for each of :data:`GROUPS`.

    ========================  =====================================================================================
    the fields of Scenario    with a file of arrivals, its ``tenants``, ``messages``, ``load`` and mean ``service``
    ``group``                 ``quiet``, ``noisy``, ``all``
    ``group_tenants``         how many of them sent anything
    ``group_messages``        how many they sent
    ``wait_p50`` to ``_max``  seconds from a message's arrival until it is served
    ``services_p50`` ...      the same in mean service times
    ``throughput``            messages of the group served a second, as long as messages arrive
    ``utilisation``           of the workers, by messages of the group, as long as messages arrive
    ``first_place``           how many others were served while a tenant waited for its first service; the worst
    ``span``                  for how many seconds messages arrive
    ========================  =====================================================================================

    What isn't there is None: the waits of nobody, rates where all messages come at once.

    :raises InvalidValue: if the file of arrivals can't be read.
    """
    load = make_load(scenario)
    service = serve(load, scenario.workers, SCHEDULERS[scenario.scheduler](load))
    said = asdict(scenario)
    if scenario.arrivals is not None:
        mean, span = float(load.service.mean()) / SECOND, int(load.at[-1]) / SECOND
        offered = mean * len(load.at) / (scenario.workers * span) if span else None
        said |= {"tenants": len(load.channels), "messages": len(load.at), "service": mean, "load": offered}
    return [said | row for row in measure(load, service, scenario.workers, said["service"])]


def measure(load: Load, service: Service, workers: int, unit: float) -> list[dict[str, Any]]:
    """What :func:`run` says beside the scenario; ``unit`` is the mean service time, in seconds."""
    tenant = load.tenant
    waits: Numbers = (service.started - load.at) / SECOND
    firsts = _first_places(load, service, tenant)
    span = int(load.at[-1])
    done = service.started + load.service <= span
    busy = np.clip(span - service.started, 0, load.service)
    rows = []
    for group, chosen in zip(GROUPS, _groups(tenant), strict=True):
        among = np.isin(tenant, chosen)
        wait = waits[among]
        seconds = dict.fromkeys(_WAITS)
        if len(wait):
            values = [*np.percentile(wait, PERCENTILES).tolist(), float(wait.max())]
            seconds = dict(zip(_WAITS, values, strict=True))
        rows.append(
            {
                "group": group,
                "group_tenants": len(chosen),
                "group_messages": len(wait),
                **{f"wait_{name}": value for name, value in seconds.items()},
                **{f"services_{name}": None if value is None else value / unit for name, value in seconds.items()},
                "throughput": int(done[among].sum()) / span * SECOND if span else None,
                "utilisation": int(busy[among].sum()) / (workers * span) if span else None,
                "first_place": int(firsts[chosen].max()) if len(chosen) else None,
                "span": span / SECOND,
            }
        )
    return rows


def _groups(tenant: Integers) -> list[Integers]:
    """The tenants of each group."""
    counts = np.bincount(tenant)
    # Where two have sent the same, the one with the higher number is the quieter: it was to send less.
    present = np.flatnonzero(counts)[::-1]
    ranked = present[np.argsort(counts[present], kind="stable")]
    return [ranked[: len(ranked) // 2], ranked[-max(1, len(ranked) // 100) :], ranked]


def _first_places(load: Load, service: Service, tenant: Integers) -> Integers:
    """For each tenant, how many messages were served between its first arrival and its first service."""
    place = np.empty(len(tenant), dtype=np.int64)
    place[service.order] = np.arange(len(tenant))
    places = np.full(tenant.max() + 1, len(tenant))
    np.minimum.at(places, tenant, place)
    present, first = np.unique(tenant, return_index=True)
    places[present] -= np.searchsorted(service.started[service.order], load.at[first])
    return places
