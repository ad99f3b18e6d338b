"""The smallest number of workers that is enough: doubling and halving instead of trying each.

Assumes that more workers are never worse. Both ways of sizing use it.
"""

from __future__ import annotations

from collections.abc import Callable

MOST_WORKERS = 4096
"""Workers at which the search gives up and returns this number; the GPU budget cuts it down afterwards."""

GROWTH = 2
"""Factor by which each step upwards exceeds the one before."""


def smallest_enough(is_enough: Callable[[int], bool], least: int) -> int:
    """Find the smallest number of workers from ``least`` to ``MOST_WORKERS`` that is enough.

    Goes up in steps of 1, 2, 4, ... until a number is enough, then halves the last step.
    """
    low, high = least - 1, least
    while high < MOST_WORKERS and not is_enough(high):
        low, high = high, min(high + GROWTH * (high - low), MOST_WORKERS)
    high = min(high, MOST_WORKERS)
    while high - low > 1:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return high
