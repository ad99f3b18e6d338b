"""The load of the last hours, which a frontend keeps for charts that are opened later.

Counters know no past: a reader learns only what came since its last reading. So each frontend reads its own
at most every ``STEP_S`` seconds, when a request begins or ends or the history is asked for, and keeps the
difference as one step. Nothing happens while there is no request: the time until the next one is one step
without any. Where frontends share their counters a step counts the requests of all of them.

A step has the observations of each bucket of the histograms, so that any percentile can be read off it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

STEP_S = 10.0
"""The least length of a step in seconds."""

KEPT_S = 6 * 3600.0
"""The time that is kept in seconds: that of the page's longest charts."""


@dataclass(frozen=True)
class LatencyCounts:
    """Observations of a latency: how many in each bucket, not cumulative, and their sum in seconds."""

    buckets: tuple[float, ...] = ()
    sum_s: float = 0.0

    def since(self, before: LatencyCounts) -> LatencyCounts:
        earlier = before.buckets or (0.0,) * len(self.buckets)
        counts = tuple(max(0.0, now - then) for now, then in zip(self.buckets, earlier, strict=True))
        return LatencyCounts(counts, max(0.0, self.sum_s - before.sum_s))

    def to_json(self) -> dict[str, Any]:
        """Return the buckets that have any, by their index."""
        return {
            "buckets": {str(index): count for index, count in enumerate(self.buckets) if count},
            "sum_s": round(self.sum_s, 6),
        }


@dataclass(frozen=True)
class LoadCounts:
    """Requests that ended, tokens that were sent, and the latencies that were observed.

    ``by_model`` are the requests and tokens of each model.
    """

    requests: float = 0.0
    tokens: float = 0.0
    ttft: LatencyCounts = field(default_factory=LatencyCounts)
    itl: LatencyCounts = field(default_factory=LatencyCounts)
    by_model: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def since(self, before: LoadCounts) -> LoadCounts:
        return LoadCounts(
            max(0.0, self.requests - before.requests),
            max(0.0, self.tokens - before.tokens),
            self.ttft.since(before.ttft),
            self.itl.since(before.itl),
            {
                model: (max(0.0, requests - earlier[0]), max(0.0, tokens - earlier[1]))
                for model, (requests, tokens) in self.by_model.items()
                for earlier in [before.by_model.get(model, (0.0, 0.0))]
            },
        )


class LoadHistory:
    """The steps of the last ``KEPT_S`` seconds. ``read`` returns the counts until now; time is monotonic."""

    def __init__(self, read: Callable[[], LoadCounts], now_s: Callable[[], float]) -> None:
        self._read = read
        self._now_s = now_s
        self._last_s = now_s()
        self.due_s = self._last_s + STEP_S
        self._last = read()
        self._steps: deque[tuple[float, float, LoadCounts]] = deque()

    def update(self) -> None:
        """End the current step if ``due_s`` is reached, and drop steps older than ``KEPT_S``."""
        now_s = self._now_s()
        if now_s < self.due_s:
            return
        counts = self._read()
        self._steps.append((now_s, now_s - self._last_s, counts.since(self._last)))
        self._last_s, self._last, self.due_s = now_s, counts, now_s + STEP_S
        while self._steps[0][0] < now_s - KEPT_S:
            self._steps.popleft()

    def to_json(self, bounds_s: Mapping[str, Sequence[float]]) -> dict[str, Any]:
        """Return the steps, oldest first; ``bounds_s`` are the upper bounds of the buckets by latency."""
        self.update()
        now_s = self._now_s()
        return {
            "bounds_s": {name: list(bounds) for name, bounds in bounds_s.items()},
            "steps": [
                {
                    "ended_ago_s": round(now_s - ended_s, 3),
                    "lasted_s": round(lasted_s, 3),
                    "requests": counts.requests,
                    "tokens": counts.tokens,
                    "ttft": counts.ttft.to_json(),
                    "itl": counts.itl.to_json(),
                    "by_model": {name: each for name, each in counts.by_model.items() if any(each)},
                }
                for ended_s, lasted_s, counts in self._steps
            ],
        }
