"""A histogram of lengths as a few weighted lengths that stand for it."""

from __future__ import annotations

from dataclasses import dataclass

from dynaplan.domain.planning.traffic import Lengths

POINTS_PER_BUCKET = 3
MOST_POINTS = 36
"""A coarse histogram gets several points per bucket, neighbouring buckets of a very fine one share one."""

Bucket = tuple[float, float, float]
"""Lower bound, width, count."""


@dataclass(frozen=True, slots=True)
class Points:
    """Lengths in tokens, rising, and the share of each; the shares sum to 1. Empty: nothing is known."""

    tokens: tuple[float, ...]
    shares: tuple[float, ...]

    def moment(self, power: int) -> float:
        """The mean of that power of the lengths; 0 when there are none."""
        return sum(share * each**power for each, share in zip(self.tokens, self.shares, strict=True))


def points_of(lengths: Lengths, longest_tokens: float) -> Points:
    """The histogram's lengths, spread evenly within each bucket, and shifted there until its mean comes out.

    Nothing is longer than ``longest_tokens``; the bucket above the last bound reaches to twice that bound.
    """
    buckets = _buckets(lengths, longest_tokens)
    total = sum(count for _, _, count in buckets)
    if not total:
        return Points((), ())
    number = min(POINTS_PER_BUCKET, MOST_POINTS // len(buckets))
    places = [(each + 0.5) / number for each in range(number)]
    shift = _shift(buckets, total, lengths.mean_tokens)
    tokens = [low + width * _shifted(place, shift) for low, width, _ in buckets for place in places]
    shares = [count / total / number for _, _, count in buckets for _ in places]
    return Points(tuple(max(1.0, each) for each in tokens), tuple(shares))


def _buckets(lengths: Lengths, longest_tokens: float) -> list[Bucket]:
    """Every bucket with something in it, or as few groups of neighbours as there may be points."""
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
    return [(each[0][0], each[-1][1] - each[0][0], sum(count for *_, count in each)) for each in groups]


def _shift(buckets: list[Bucket], total: float, mean_tokens: float | None) -> float:
    """From -1 (everything at the lower ends) to 1 (at the upper ends): where the mean is the exact one."""
    half = sum(width * count for _, width, count in buckets) / total / 2
    if mean_tokens is None or half <= 0:
        return 0.0
    middle = sum((low + width / 2) * count for low, width, count in buckets) / total
    return min(max((mean_tokens - middle) / half, -1.0), 1.0)


def _shifted(place: float, shift: float) -> float:
    return place + shift * (1.0 - place) if shift > 0 else place * (1.0 + shift)
