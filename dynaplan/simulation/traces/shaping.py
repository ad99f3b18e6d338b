"""Traces made denser or thinner, still one request at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from heapq import heappop, heappush

from dynaplan.gateway.traced_requests import TracedRequest
from dynaplan.util.errors import ConfigError
from dynaplan.util.splitmix import uniform_draws

SPREAD_S = 5.0
"""Seconds over which the copies of a request are spread: they stand for other users, not for one user's
burst."""


def scaled(trace: Iterable[TracedRequest], rate_scale: float, *, seed: int = 1) -> Iterator[TracedRequest]:
    """Return the trace with ``rate_scale`` times the requests, over the same time.

    The load rises and falls as fast as before, as with that many times the users. Each request comes
    ``rate_scale`` times on average: the first one as it was, the others up to ``SPREAD_S`` later and with
    prefixes of their own, so that they hit each other's cache no more than strangers do. A scale below 1
    leaves requests out. 1 changes nothing. Deterministic under the seed.
    """
    if not (math.isfinite(rate_scale) and rate_scale > 0):
        raise ConfigError(f"rate-scale: {rate_scale!r}", hint="Expected a number, more than 0.")
    return iter(trace) if rate_scale == 1 else _scaled(trace, rate_scale, uniform_draws(seed))


def _scaled(
    trace: Iterable[TracedRequest], rate_scale: float, draws: Iterator[float]
) -> Iterator[TracedRequest]:
    whole, part = divmod(rate_scale, 1.0)
    users = math.ceil(rate_scale)
    waiting: list[tuple[float, int, TracedRequest]] = []
    number = 0
    for request in trace:
        while waiting and waiting[0][0] <= request.arrival_s:
            yield heappop(waiting)[2]
        copies = int(whole) + (next(draws) < part if part else 0)
        for user in range(copies):
            arrival_s = request.arrival_s + (SPREAD_S * next(draws) if user else 0.0)
            hashes = tuple(block * users + user for block in request.block_hashes)
            number += 1
            copy = replace(request, arrival_s=arrival_s, block_hashes=hashes)
            heappush(waiting, (arrival_s, number, copy))
    while waiting:
        yield heappop(waiting)[2]
