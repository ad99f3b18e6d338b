"""The history that forecasting may begin with: a trace cut into intervals."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from dynaplan.gateway.traced_requests import TracedRequest


class IntervalLoad(NamedTuple):
    """The requests that arrived in one interval, and their mean lengths; None where there were none."""

    requests: int
    isl_tokens: float | None
    osl_tokens: float | None


def interval_history(trace: Iterable[TracedRequest], interval_s: float) -> list[IntervalLoad]:
    """Cut the trace into intervals from 0 s on. One without requests is 0 requests, not left out.

    The last interval is left out, unless it is the only one: the trace ends somewhere in it, and a part of
    an interval would look like a fall of the load. Arrivals must not go back beyond an interval.
    """
    intervals: list[IntervalLoad] = []
    index, count, isl, osl = 0, 0, 0, 0

    def close() -> None:
        means = (isl / count, osl / count) if count else (None, None)
        intervals.append(IntervalLoad(count, *means))

    for request in trace:
        now = math.floor(request.arrival_s / interval_s)
        while index < now:
            close()
            index, count, isl, osl = index + 1, 0, 0, 0
        count, isl, osl = count + 1, isl + request.prompt_tokens, osl + request.output_tokens
    if count and not intervals:
        close()
    return intervals
