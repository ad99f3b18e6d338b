"""How far arrivals are from those of independent clients: their dispersion at several time scales.

With A(t) the number of arrivals in a window of t seconds, its index of
dispersion is

    I(t) = variance of A(t) / mean of A(t)

Independent clients (Poisson) have 1 at every scale. Batches that come at any time have the same larger value
at every scale; batches of a clock (every 3 s) have a large value below their period and hardly any above it,
for what one window has too much the next one lacks. One scale alone cannot tell these two apart, and the
queue that they make differs: the first adds up over windows, the second does not.

**Estimate.** The arrivals of an interval by metric pull are summed over windows of 1, 2, 4, ... pulls, as
long as there are two windows, and I is their sample variance (over windows - 1) over their mean, around the
mean of that interval: a load that drifts from interval to interval does not count. Two windows say next to
nothing, so indices are averaged over intervals (half-life 300 s, ``traffic_history.py``).

**Source.** Cox and Lewis, The Statistical Analysis of Series of Events, 1966 (index of dispersion for
counts).
"""

from __future__ import annotations

from collections.abc import Sequence

Dispersions = tuple[tuple[float, float], ...]
"""Windows' lengths in s, growing, each with the index of dispersion at that scale."""

MIN_PULLS = 5
"""Pulls below which an interval says nothing of its arrivals' dispersion."""


def dispersions_of(arrivals: Sequence[float], interval_s: float) -> Dispersions:
    """Return the index of dispersion at each time scale; none for too few pulls, or without arrivals.

    ``arrivals`` are the requests of each pull of an interval; all pulls are of equal length.
    """
    if len(arrivals) < MIN_PULLS or sum(arrivals) <= 0:
        return ()
    pull_s, pulls, found = interval_s / len(arrivals), 1, []
    while len(arrivals) // pulls >= 2:
        windows = [
            sum(arrivals[begin : begin + pulls]) for begin in range(0, len(arrivals) - pulls + 1, pulls)
        ]
        mean = sum(windows) / len(windows)
        if mean > 0:
            squares = sum((each - mean) ** 2 for each in windows)
            found.append((pulls * pull_s, squares / (len(windows) - 1) / mean))
        pulls *= 2
    return tuple(found)


def average_dispersions(before: Dispersions, newest: Dispersions, weight: float) -> Dispersions:
    """Return the mean of both at each scale, ``newest`` counting ``weight``.

    Where ``newest`` is empty ``before`` stays; where it has other scales it stands alone.
    """
    scales = [round(scale_s, 1) for scale_s, _ in before]
    if not newest:
        return before
    if scales != [round(scale_s, 1) for scale_s, _ in newest]:
        return newest
    return tuple(
        (scale_s, old + weight * (index - old))
        for (_, old), (scale_s, index) in zip(before, newest, strict=True)
    )
