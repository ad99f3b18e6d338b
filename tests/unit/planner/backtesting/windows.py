"""Windows of requests that are given, not drawn."""

from __future__ import annotations

from collections.abc import Sequence

from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.planner.backtesting.drawn_requests import DrawnInterval


def given_window(
    requests: Sequence[TracedRequest], interval_s: float = 10.0, settled_s: float = 0.0, begin_s: float = 0.0
) -> list[DrawnInterval]:
    """Return the requests from ``begin_s`` on by intervals; those until ``settled_s`` are settled."""
    last_s = max((each.arrival_s for each in requests), default=begin_s - interval_s)
    window = []
    while begin_s <= last_s:
        end_s = begin_s + interval_s
        own = [each for each in requests if begin_s <= each.arrival_s < end_s]
        window.append(
            DrawnInterval(begin_s, end_s, len(own), lambda own=own: own, end_s <= settled_s, begin_s)
        )
        begin_s = end_s
    return window
