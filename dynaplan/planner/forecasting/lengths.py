"""A histogram of lengths as a few weighted lengths that stand for it.

Within a bucket the lengths are spread evenly over 3 points (fewer with more than 12 buckets; neighbouring
buckets share one with more than 36). If the exact mean is known, the points of all buckets are shifted by
the same part of the way towards the upper (or lower) ends until the mean comes out: place p in 0..1 of a
bucket becomes p + s (1 - p) for s > 0, p (1 + s) for s < 0. The bucket above the last bound reaches to
twice that bound; no length exceeds ``longest_tokens``.

Wrong about the shape within a coarse bucket; the mean is right where it is known.
"""

from __future__ import annotations

from dataclasses import dataclass

from dynaplan.gateway.traffic import Lengths

POINTS_PER_BUCKET = 3
"""Points that stand for one bucket."""

MOST_POINTS = 36
"""Most points in all: a size takes 2 ms because there are few."""

Bucket = tuple[float, float, float]
"""Lower bound and width in tokens, and count."""


@dataclass(frozen=True, slots=True)
class Points:
    """Lengths in tokens, rising, and the share of each; shares sum to 1. Empty: nothing is known."""

    tokens: tuple[float, ...]
    shares: tuple[float, ...]

    def moment(self, power: int) -> float:
        """Return the mean of that power of the lengths; 0 when there are none."""
        return sum(share * tokens**power for tokens, share in zip(self.tokens, self.shares, strict=True))


def points_of(lengths: Lengths, longest_tokens: float) -> Points:
    """Return the points that stand for the histogram, none longer than ``longest_tokens``."""
    buckets = _buckets(lengths, longest_tokens)
    total = sum(count for _, _, count in buckets)
    if not total:
        return Points((), ())
    number = min(POINTS_PER_BUCKET, MOST_POINTS // len(buckets))
    places = [(index + 0.5) / number for index in range(number)]
    shift = _shift(buckets, total, lengths.mean_tokens)
    tokens = [low + width * _shifted(place, shift) for low, width, _ in buckets for place in places]
    shares = [count / total / number for _, _, count in buckets for _ in places]
    return Points(tuple(max(1.0, length) for length in tokens), tuple(shares))


def _buckets(lengths: Lengths, longest_tokens: float) -> list[Bucket]:
    """Return every bucket with a count, or groups of neighbours, at most ``MOST_POINTS``."""
    bounds = lengths.upper_bounds_tokens
    if not bounds:
        return []
    highs = (*bounds, max(2 * bounds[-1], 1.0))
    lows = (0.0, *bounds)
    used = [
        (min(low, longest_tokens), min(high, longest_tokens), count)
        for low, high, count in zip(lows, highs, lengths.counts, strict=False)
        if count > 0
    ]
    together = -(-len(used) // MOST_POINTS)
    groups = [used[first : first + together] for first in range(0, len(used), together or 1)]
    return [(group[0][0], group[-1][1] - group[0][0], sum(count for *_, count in group)) for group in groups]


def _shift(buckets: list[Bucket], total: float, mean_tokens: float | None) -> float:
    """Return s, from -1 (all at the lower ends) to 1 (at the upper ends), that gives the exact mean."""
    half = sum(width * count for _, width, count in buckets) / total / 2
    if mean_tokens is None or half <= 0:
        return 0.0
    middle = sum((low + width / 2) * count for low, width, count in buckets) / total
    return min(max((mean_tokens - middle) / half, -1.0), 1.0)


def _shifted(place: float, shift: float) -> float:
    """Return the shifted place within a bucket, 0 to 1."""
    return place + shift * (1.0 - place) if shift > 0 else place * (1.0 + shift)
