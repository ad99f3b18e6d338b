"""Scales: where a value lies on an axis, and the round values that are written beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

LOGARITHMIC_RATIO = 8.0
"""An adaptive scale is logarithmic when one line reaches this many times as high as another, or the limit."""

MOST_TICKS = 5
"""The largest number of values written beside a logarithmic axis."""

_ROUND_DIGITS = (1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10)


@dataclass(frozen=True)
class Scale:
    """Maps values to 0 (bottom or left) until 1 (top or right), linearly or by the logarithm of value + 1."""

    low: float
    high: float
    is_log: bool = False

    @classmethod
    def fitting(
        cls,
        lines: Sequence[Sequence[float | None]],
        limit: float | None = None,
        *,
        is_adaptive: bool = False,
        is_counted: bool = False,
    ) -> Scale:
        """Return the scale from 0 on that shows these lines and the limit.

        ``is_adaptive`` allows a logarithmic one, which begins at the lowest value from 1 on. ``is_counted``
        says that the values are whole numbers.
        """
        reached = [max(filter(None, values), default=0.0) for values in lines]
        limits = [limit] if limit else []
        high = max([*reached, *limits], default=0.0)
        lowest = min((top for top in [*reached, *limits] if top > 0), default=0.0)
        if is_adaptive and max(reached, default=0.0) > LOGARITHMIC_RATIO * lowest > 0:
            low = min((value for values in lines for value in values if value is not None), default=0.0)
            return cls(low if low >= 1 else 0.0, high * 1.1, is_log=True)
        if is_counted:
            return cls(0.0, max(2.0, 2 * math.ceil(high / 2)))
        return cls(0.0, 4 * round_up(high / 4) if high else 1.0)

    @classmethod
    def spanning(cls, values: Sequence[float]) -> Scale:
        """Return the linear scale between round numbers around these values, from 0 on if that is near."""
        low, high = min(values, default=0.0), max(values, default=1.0)
        if 0 <= low <= high / 2:
            low = 0.0
        step = round_up((high - low) / 5 or abs(high) or 1.0)
        low = math.floor(low / step + 1e-9) * step
        return cls(low, low + step * max(1, math.ceil((high - low) / step - 1e-9)))

    def place(self, value: float) -> float:
        """Return the value's place, from 0 for ``low`` until 1 for ``high``."""
        if not self.is_log:
            return (value - self.low) / (self.high - self.low)
        bottom = math.log1p(self.low)
        return (math.log1p(value) - bottom) / (math.log1p(self.high) - bottom)

    def ticks(self, parts: int = 2) -> list[float]:
        """Return round values from ``low`` to ``high``: the ends of ``parts`` equal parts, or decades."""
        if not self.is_log:
            return [self.low + (self.high - self.low) * part / parts for part in range(parts + 1)]
        decades = range(math.floor(math.log10(max(self.low, 1.0))), math.ceil(math.log10(self.high)) + 1)
        for digits in ((1, 2, 5), (1, 3), (1,)):
            ticks = [digit * 10.0**decade for decade in decades for digit in digits]
            ticks = [tick for tick in ticks if self.low <= tick <= self.high]
            if len(ticks) <= MOST_TICKS:
                break
        return ticks


def round_up(value: float, digits: Sequence[float] = _ROUND_DIGITS) -> float:
    """Return the next number that is one of the digits times a power of ten; 1 for 0."""
    power = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(digit * power for digit in digits if digit * power >= value * (1 - 1e-9))
