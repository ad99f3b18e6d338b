"""By how much a number of misses is off by chance, where misses come together.

Of N requests M missed a target, the part p = M / N. Were they independent, M would have the variance
N p (1 - p). But requests miss together, when a burst comes, and a window with one burst is one observation of
bursts, however many requests came in it. So the window is cut into B parts of equal length, longer than most
bursts (batch means). With n requests and m misses in a part,

    V = B / (B - 1) sum of (m - p n)^2              the variance of M (Cochran, Sampling Techniques, 1977)
    effect = V / (N p (1 - p)), at least 1          the design effect (Kish, Survey Sampling, 1965)

and N requests tell as much as N / effect independent ones would. So with the part q that may miss

    N q + d sqrt(N q (1 - q) effect)

misses are d standard deviations from what was promised.

**Example.** 257 requests came in 15 minutes, 75 of them in a burst, in which 6 missed; 12.9 may. Were they
independent, 7.1 would be few enough for d = -1.645. The effect of 3.3 leaves 2.4, so no worker leaves. Of the
next burst but one 33 would have missed.

**Where it is wrong.** Nothing is known of a burst that is larger than all in the window, and where nobody
missed the effect is 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Z = 1.645
"""Standard deviations within which 95 % of a normal distribution's lower side lie."""

WINDOW_PARTS = 12
"""Parts of a window between which misses are compared."""


def allowed_misses(count: float, part: float, deviations: float, effect: float = 1.0) -> float:
    """Return how many of ``count`` may miss: the expected part, and so many standard deviations more."""
    return count * part + deviations * math.sqrt(count * part * (1 - part) * effect)


def min_requests(may_miss: float) -> int:
    """Return the fewest requests of which a backtest can say that no more than that part miss."""
    return round(Z * Z * (1 - may_miss) / may_miss) + 1


def design_effect(came: Sequence[float], missed: Sequence[float]) -> float:
    """Return the variance of the number of misses over that of independent ones, at least 1; by interval."""
    count, total = sum(came), sum(missed)
    own = total * (1 - total / count) if count else 0.0
    return max(1.0, variance_of_sum(came, missed) / own) if own > 0 else 1.0


def variance_of_sum(came: Sequence[float], counted: Sequence[float]) -> float:
    """Return the variance of the sum of ``counted``; given by interval, as the requests that ``came``."""
    parts = list(zip(_by_parts(came), _by_parts(counted), strict=True))
    mean = sum(counted) / max(1.0, sum(came))
    return len(parts) / max(1, len(parts) - 1) * sum((own - mean * number) ** 2 for number, own in parts)


def _by_parts(values: Sequence[float]) -> list[float]:
    size = -(-len(values) // WINDOW_PARTS) or 1
    return [sum(values[first : first + size]) for first in range(0, len(values), size)]
