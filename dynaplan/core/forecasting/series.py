"""A curve of the past, made fit for forecasting: a value per interval, the newest last; None is "no data"."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import dropwhile

Series = list[float | None]
"""A cleaned history: finite and not negative, and its first value is above 0."""

LARGEST_LOG = 700.0
"""expm1 of more would be infinite."""


def measured(history: Sequence[float | None], window: int) -> Series:
    """The last ``window`` intervals, from the first that had traffic on.

    What is NaN, infinite or negative was not measured. Intervals of 0 before the first traffic say only that
    nobody had begun yet.
    """
    known = (_measurement(each) for each in history[-window:])
    return list(dropwhile(lambda each: not each, known))


def was_measured(history: Sequence[float | None]) -> bool:
    """Whether there is any measurement at all, be it 0."""
    return any(_measurement(each) is not None for each in history)


def _measurement(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) and value >= 0 else None


def last_value(series: Series) -> float:
    """The newest measurement; 0 when there is none."""
    return next((each for each in reversed(series) if each is not None), 0.0)


def carried_on(series: Series) -> list[float]:
    """The series with each gap filled by the measurement before it."""
    filled, last = [], 0.0
    for each in series:
        last = last if each is None else each
        filled.append(last)
    return filled


def logarithms(series: Series) -> Series:
    """log(1 + x) of every measurement."""
    return [None if each is None else math.log1p(each) for each in series]


def from_logarithms(values: Sequence[float]) -> list[float]:
    """The inverse of ``logarithms``; never infinite."""
    return [math.expm1(min(each, LARGEST_LOG)) for each in values]


def joined(warm_up: Sequence[float | None], live: Sequence[float | None]) -> list[float | None]:
    """A warm-up's curve with the live one after it, which counts from its first traffic on."""
    if not warm_up:
        return [*live]
    return [*warm_up, *dropwhile(lambda each: not each, live)]
