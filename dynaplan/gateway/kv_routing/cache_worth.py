"""The worth of each worker's cache: the tokens of prompts that it has lately saved from being computed.

A worker that leaves takes its cache with it, and what the cache would have served is computed again
elsewhere. The best guess at that is what it has served of late: w tokens, each fading as exp(-age / T) with
T = ``MEMORY_S``. Under a steady rate r of served tokens per second w is r T: those of the last T seconds.
"""

from __future__ import annotations

from math import exp

MEMORY_S = 600.0
"""T, s: some turns of a conversation, and longer than a worker takes to start and fill its cache."""

DIGITS = 2
"""Significant digits of the tokens: caches that differ by less are worth the same."""


class CacheWorth:
    """The served tokens by worker, faded. Times are monotonic seconds; a worker without any is forgotten."""

    def __init__(self) -> None:
        self._served: dict[int, tuple[float, float]] = {}

    def record_hit(self, worker: int, tokens: int, now_s: float) -> None:
        """Record tokens of a prompt that came out of the worker's cache."""
        if tokens > 0:
            self._served[worker] = (self._decay(worker, now_s) + tokens, now_s)

    def tokens(self, now_s: float) -> dict[int, int]:
        """Return the served tokens by worker, as of now, to ``DIGITS`` digits; absent if none."""
        faded = {worker: _round(self._decay(worker, now_s)) for worker in self._served}
        self._served = {worker: self._served[worker] for worker, tokens in faded.items() if tokens}
        return {worker: tokens for worker, tokens in faded.items() if tokens}

    def _decay(self, worker: int, now_s: float) -> float:
        tokens, at_s = self._served.get(worker, (0.0, now_s))
        return tokens * exp((at_s - now_s) / MEMORY_S)


def _round(tokens: float) -> int:
    step: int = 10 ** max(0, len(str(int(tokens))) - DIGITS)
    return round(tokens / step) * step
