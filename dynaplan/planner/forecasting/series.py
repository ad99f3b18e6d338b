"""A curve of the past, cleaned for forecasting: a value per interval, the newest last; None is "no data"."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import dropwhile

Series = list[float | None]
"""A cleaned history: values finite and not negative, the first one above 0."""

MAX_LOG = 700.0
"""Largest logarithm that is inverted: expm1 of more than about 709 is infinite."""


def clean_history(history: Sequence[float | None], window: int) -> Series:
    """Return the last ``window`` intervals, from the first one that had traffic on.

    NaN, infinite and negative values count as not measured. Zeros before the first traffic say only that no
    client had begun yet.
    """
    known = (_measurement(each) for each in history[-window:])
    return list(dropwhile(lambda value: not value, known))


def has_measurement(history: Sequence[float | None]) -> bool:
    """Tell whether there is any measurement at all, be it 0."""
    return any(_measurement(each) is not None for each in history)


def _measurement(value: float | None) -> float | None:
    """Return the value as a float; None when it is missing, not finite or negative."""
    return float(value) if value is not None and math.isfinite(value) and value >= 0 else None


def last_value(series: Series) -> float:
    """Return the newest measurement; 0 when there is none."""
    return next((each for each in reversed(series) if each is not None), 0.0)


def fill_gaps(series: Series) -> list[float]:
    """Return the series with each gap filled by the measurement before it."""
    filled, last = [], 0.0
    for each in series:
        last = last if each is None else each
        filled.append(last)
    return filled


def logarithms(series: Series) -> Series:
    return [None if each is None else math.log1p(each) for each in series]


def from_logarithm(value: float) -> float:
    """Turn log(1 + x) back into x; a logarithm too large for a float becomes the largest x."""
    return math.expm1(min(value, MAX_LOG))


def join_warm_up(warm_up: Sequence[float | None], live: Sequence[float | None]) -> list[float | None]:
    """Return the curve of a warm-up followed by the live one, which counts from its first traffic on."""
    if not warm_up:
        return [*live]
    return [*warm_up, *dropwhile(lambda value: not value, live)]
