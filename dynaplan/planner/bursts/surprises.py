"""The surprise of a forecast: how far the load has exceeded such forecasts lately."""

from __future__ import annotations

from collections.abc import Sequence


def surprise(outcomes: Sequence[tuple[float, float]], rest: float) -> float:
    """Return by how much requests came in excess of their forecast, but for the part ``rest`` of them.

    It is the least excess e of which so few came in intervals with more than forecast + e; 0 where forecasts
    were hardly ever too low. ``rest`` is what the promise lets miss: surprises that large would break it.
    """
    beyond, may_be = 0.0, rest * sum(came for _, came in outcomes)
    for excess, came in sorted(outcomes, reverse=True):
        beyond += came
        if beyond > may_be:
            return max(0.0, excess)
    return 0.0
