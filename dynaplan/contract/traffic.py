"""Measured traffic: requests, their times, and histograms of their lengths."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

INPUT_TOKENS = (0, 100, 210, 430, 870, 1800, 3600, 7400, 15000, 31000, 63000, 130000)
"""Bucket bounds of the frontends' histogram of prompt lengths, tokens. Dynamo's."""


OUTPUT_TOKENS = (0, 100, 210, 430, 880, 1800, 3700, 7600, 16000, 32000)
"""Bucket bounds of the frontends' histogram of answer lengths, tokens. Dynamo's."""


@dataclass(frozen=True)
class Lengths:
    """Lengths of prompts or answers in tokens, as a histogram.

    ``counts[i]`` requests are longer than bound ``i - 1`` (the first: 0) and no longer than bound ``i``;
    the last of the counts, one more than there are bounds, is of those above the last bound. Counts may be
    shares. ``mean_tokens`` is the exact mean where it is known: coarse buckets are read so that it comes
    out.
    """

    upper_bounds_tokens: tuple[float, ...]
    counts: tuple[float, ...]
    mean_tokens: float | None = None

    @classmethod
    def fixed(cls, tokens: float) -> Lengths:
        """Return the histogram of requests that are all ``tokens`` long."""
        return cls((tokens - min(1.0, tokens / 2), tokens), (0.0, 1.0), tokens)

    @classmethod
    def of(cls, tokens: Sequence[float], buckets_per_doubling: int = 2) -> Lengths:
        """Return the histogram of these lengths, in buckets whose bounds grow by a constant factor."""
        if not tokens:
            return cls((), ())
        growth = 2 ** (1 / buckets_per_doubling)
        bounds = [1.0]
        while bounds[-1] < max(tokens):
            bounds.append(bounds[-1] * growth)
        counts = [0.0] * len(bounds)
        for length in tokens:
            counts[next(index for index, bound in enumerate(bounds) if length <= bound)] += 1
        return cls(tuple(bounds), tuple(counts), sum(tokens) / len(tokens))

    @property
    def total(self) -> float:
        return sum(self.counts)

    @property
    def greatest_mean_tokens(self) -> float:
        """The mean when each length is its bucket's upper bound, and twice the last bound above that."""
        if not self.total or not self.upper_bounds_tokens:
            return 0.0
        highest = (*self.upper_bounds_tokens, 2 * self.upper_bounds_tokens[-1])
        return sum(high * count for high, count in zip(highest, self.counts, strict=True)) / self.total

    def __add__(self, other: Lengths) -> Lengths:
        """Add two histograms of the same bounds. The mean stays exact if both are."""
        counts = tuple(mine + others for mine, others in zip(self.counts, other.counts, strict=True))
        total, mean = self.total + other.total, None
        if total and self.mean_tokens is not None and other.mean_tokens is not None:
            mean = (self.mean_tokens * self.total + other.mean_tokens * other.total) / total
        return Lengths(self.upper_bounds_tokens, counts, mean)


@dataclass(frozen=True)
class Traffic:
    """Measured traffic of one interval: means over its requests, times in ms. None is "no data", 0 is not.

    ``requests`` arrived in the interval. ``isl`` and ``osl`` are the histograms behind the means.
    ``dispersion`` is the variance over the mean of the arrivals in a metric pull, 1 for independent
    clients. ``prefix_hit_rate`` is the part of the prompts' tokens, 0 to 1, that came out of a KV cache.
    ``arrivals`` are the requests of each metric pull, of equal length; none where they are not known.
    ``over_ttft`` and ``over_itl`` are the targets, in ms, that frontends know, each with the requests that
    missed it: counted at the first token and at the end. ``first_tokens`` are the requests of which that can
    be told, the streamed ones; None where they are not counted. ``missing`` says why there is no data.
    """

    interval_s: float
    requests: float | None = None
    isl_tokens: float | None = None
    osl_tokens: float | None = None
    ttft_ms: float | None = None
    itl_ms: float | None = None
    duration_ms: float | None = None
    isl: Lengths | None = None
    osl: Lengths | None = None
    dispersion: float | None = None
    missing: str = ""
    prefix_hit_rate: float | None = None
    arrivals: tuple[float, ...] = ()
    over_ttft: tuple[tuple[float, float], ...] = ()
    over_itl: tuple[tuple[float, float], ...] = ()
    first_tokens: float | None = None

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Traffic:
        """Read the mapping that ``dataclasses.asdict`` makes; KeyError or TypeError for another."""
        over = {
            name: tuple((float(each[0]), float(each[1])) for each in document.get(name, ()))
            for name in ("over_ttft", "over_itl")
        }
        arrivals = tuple(document.get("arrivals", ()))
        return cls(**{**document, **lengths_of(document), **over, "arrivals": arrivals})


USUAL_BOUNDS = {"isl": INPUT_TOKENS[1:], "osl": OUTPUT_TOKENS[1:]}
"""The bounds of the histograms of prompts and of answers that a document leaves out."""


def without_usual_bounds(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return a document of traffic or a forecast without the bounds of histograms that are the usual ones."""
    found = dict(document)
    for name, bounds in USUAL_BOUNDS.items():
        if (lengths := found.get(name)) and tuple(lengths["upper_bounds_tokens"]) == bounds:
            found[name] = {key: value for key, value in lengths.items() if key != "upper_bounds_tokens"}
    return found


def lengths_of(document: Mapping[str, Any]) -> dict[str, Lengths | None]:
    """Return the histograms in a document of traffic or a forecast, as ``isl`` and ``osl``.

    None for a missing one.
    """
    return {
        name: Lengths(
            tuple(each.get("upper_bounds_tokens", bounds)), tuple(each["counts"]), each.get("mean_tokens")
        )
        if (each := document.get(name))
        else None
        for name, bounds in USUAL_BOUNDS.items()
    }
