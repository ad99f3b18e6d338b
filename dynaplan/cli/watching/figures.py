"""Rates and times of the last minute, from two readings of the frontends' counts."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

WINDOW_S = 60.0
"""The longest time between the two readings that are compared, in seconds."""

TTFT, ITL = "time_to_first_token_seconds", "inter_token_latency_seconds"
REQUESTS = ("requests", "")

Counts = Mapping[tuple[str, str], float]
"""Counts by sample and, of a bucket, its upper bound; buckets are cumulative, as in Prometheus."""


@dataclass(frozen=True)
class LoadFigures:
    """The load of a deployment over the last ``window_s`` seconds, times in ms; None: nothing was counted.

    The times at the percentiles are read off histograms, so they are as exact as their buckets are narrow.
    """

    window_s: float
    requests_per_s: float
    tokens_per_s: float
    ttft_mean_ms: float | None
    ttft_percentile_ms: float | None
    itl_mean_ms: float | None
    itl_percentile_ms: float | None


class LoadWindow:
    """The readings of the last minute; ``percentiles`` are those of TTFT and ITL, from 0 to 100."""

    def __init__(self, percentiles: tuple[float, float] = (95.0, 95.0)) -> None:
        self._percentiles = percentiles
        self._readings: deque[tuple[float, Counts]] = deque()

    def add(self, at_s: float, counts: Counts) -> None:
        """Add a reading; counts that fell are those of frontends that began anew, and begin the window."""
        if self._readings and _has_fallen(self._readings[-1][1], counts):
            self._readings.clear()
        self._readings.append((at_s, counts))
        while len(self._readings) > 2 and at_s - self._readings[0][0] > WINDOW_S:
            self._readings.popleft()

    def figures(self) -> LoadFigures | None:
        """Return the figures of the window; None before the second reading."""
        if len(self._readings) < 2:
            return None
        (first_s, first), (last_s, last) = self._readings[0], self._readings[-1]
        seen = {key: max(0.0, value - first.get(key, 0.0)) for key, value in last.items()}
        window_s = max(last_s - first_s, 1e-9)
        # Each token but the first of a stream is one observation of ITL, each first one of TTFT.
        tokens = seen.get((f"{TTFT}_count", ""), 0.0) + seen.get((f"{ITL}_count", ""), 0.0)
        return LoadFigures(
            window_s,
            seen.get(REQUESTS, 0.0) / window_s,
            tokens / window_s,
            _mean_ms(seen, TTFT),
            percentile_ms(seen, TTFT, self._percentiles[0]),
            _mean_ms(seen, ITL),
            percentile_ms(seen, ITL, self._percentiles[1]),
        )


def percentile_ms(seen: Counts, name: str, percentile: float) -> float | None:
    """Return the time at that percentile in ms; None when nothing was counted.

    Within a bucket times are taken to lie evenly, as by ``histogram_quantile`` of Prometheus; above the last
    bound it is that bound.
    """
    buckets = sorted((float(le), count) for (sample, le), count in seen.items() if sample == f"{name}_bucket")
    if not buckets or buckets[-1][1] <= 0:
        return None
    rank = buckets[-1][1] * percentile / 100
    below_s = below = 0.0
    for bound_s, count in buckets:
        if count >= rank and count > below:
            if math.isinf(bound_s):
                return 1000 * below_s
            return 1000 * (below_s + (bound_s - below_s) * (rank - below) / (count - below))
        below_s, below = bound_s, count
    return 1000 * below_s


def _mean_ms(seen: Counts, name: str) -> float | None:
    count = seen.get((f"{name}_count", ""), 0.0)
    return 1000 * seen.get((f"{name}_sum", ""), 0.0) / count if count > 0 else None


def _has_fallen(before: Counts, now: Counts) -> bool:
    return any(now.get(key, 0.0) < value - 0.5 for key, value in before.items() if key[0].endswith("_count"))
