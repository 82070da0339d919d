"""The messages of a scenario: who sends when, and how long it takes. The seed decides all that chance does.

Arrivals are a Poisson process: they come one by one, independently of each other.
"""

from __future__ import annotations

import numpy as np

from .arrivals import read_arrivals
from .loads import SECOND, Channel, Integers, Load, Numbers
from .scenarios import Scenario

__all__ = ["make_load"]

_MILLISECOND = SECOND // 1000


def make_load(scenario: Scenario) -> Load:
    """The messages of a scenario.

    :raises InvalidValue: if the file of arrivals is none.
    """
    # The three don't share a generator: whoever changes one thing of a scenario gets the rest as it was.
    seeds = np.random.SeedSequence(scenario.seed).spawn(3)
    times, tenants, services = (np.random.Generator(np.random.PCG64(seed)) for seed in seeds)
    if scenario.arrivals is not None:
        arrivals = read_arrivals(scenario.arrivals)
        if arrivals.service is not None:
            service = _nanoseconds(arrivals.service)
        else:
            service = _services(scenario, len(arrivals.at), services)
        channels = _channels(scenario, np.arange(arrivals.channels))
        return Load(arrivals.at, arrivals.channel, service, arrivals.cost, channels)
    at = _times(scenario, times)
    channel, tenant = _senders(scenario, tenants)
    return Load(
        np.rint((at - at[0]) * SECOND).astype(np.int64),
        channel,
        _services(scenario, scenario.messages, services),
        np.ones(scenario.messages),
        _channels(scenario, tenant),
    )


def _uploaded(scenario: Scenario) -> int:
    if scenario.workload != "burst":
        return 0
    return scenario.upload if scenario.upload is not None else scenario.messages // 10


def _times(scenario: Scenario, random: np.random.Generator) -> Numbers:
    """When they arrive, in seconds."""
    upload = _uploaded(scenario)
    rate = scenario.load * scenario.workers / scenario.service
    at = np.concatenate((np.zeros(upload), np.cumsum(random.exponential(1 / rate, scenario.messages - upload))))
    if scenario.workload != "diurnal":
        return at
    # By the inverse of the expected number of arrivals up to a time, which for a steady rate would be that time.
    days = np.linspace(0, scenario.cycles, 1 + int(1000 * max(1, scenario.cycles)))
    expected = days + scenario.swing * (1 - np.cos(2 * np.pi * days)) / (2 * np.pi)
    day = at[-1] / expected[-1]
    warped: Numbers = np.interp(at, expected * day, days * day)
    return warped


def _senders(scenario: Scenario, random: np.random.Generator) -> tuple[Integers, Integers]:
    """The channel of each message, and the tenant of each channel."""
    draws, others = random.random(scenario.messages), scenario.tenants - 1
    if scenario.workload in {"zipf", "diurnal"}:
        shares = np.arange(1, scenario.tenants + 1, dtype=np.float64) ** -scenario.skew
        sums = np.cumsum(shares)
        return np.searchsorted(sums, draws * sums[-1]).astype(np.int64), np.arange(scenario.tenants)
    if scenario.workload == "burst":
        quiet = 1 + (draws * others).astype(np.int64)
        quiet[: _uploaded(scenario)] = 0
        return quiet, np.arange(scenario.tenants)
    names = scenario.names
    noisy, spread = draws < 0.5, (2 * draws) % 1
    channel = np.where(noisy, spread * names, names + spread * others).astype(np.int64)
    return channel, np.concatenate((np.zeros(names, dtype=np.int64), np.arange(1, scenario.tenants)))


def _services(scenario: Scenario, messages: int, random: np.random.Generator) -> Integers:
    if scenario.service_law == "constant":
        seconds = np.full(messages, scenario.service)
    elif scenario.service_law == "exponential":
        seconds = random.exponential(scenario.service, messages)
    else:
        # The mean of a lognormal law is exp(mu + sigma ** 2 / 2).
        seconds = random.lognormal(np.log(scenario.service) - 0.5, 1.0, messages)
    return _nanoseconds(seconds)


def _nanoseconds(seconds: Numbers) -> Integers:
    whole: Integers = np.maximum(1, np.rint(seconds * SECOND)).astype(np.int64)
    return whole


def _channels(scenario: Scenario, tenants: Integers) -> list[Channel]:
    weights, interval = scenario.weights, scenario.interval_ms * _MILLISECOND
    return [
        Channel(tenant, weights[min(tenant, len(weights) - 1)], scenario.max_concurrency, interval, scenario.burst)
        for tenant in tenants.tolist()
    ]
