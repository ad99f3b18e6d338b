"""One interval of traffic, as a backtest replays it."""

from __future__ import annotations

from dataclasses import dataclass, field

from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.traffic import Lengths

RECENT_S = 600.0
"""Seconds that are looked at once more for themselves, because they may be how it goes on."""


@dataclass(frozen=True)
class Interval:
    """One interval of traffic. Its lengths are the recent ones where its own are too few.

    ``answered`` is the number of answers that ended in it, of which the lengths and the means are.
    ``serving`` are the workers that served at its end; ``late`` and ``long`` the requests that missed the
    TTFT and the ITL, None where frontends do not count them, of ``first_tokens`` whose times are known.
    ``failing`` are the workers that had failed, or were started again unasked, at its end. ``begin_s`` and
    ``requests_before`` are the seconds and the requests before it since the evidence began.
    """

    length_s: float
    requests: float
    arrivals: tuple[float, ...]
    isl: Lengths
    osl: Lengths
    hit_rate: float = 0.0
    failing: int = 0
    answered: float = 0.0
    ttft_ms: float = 0.0
    itl_ms: float = 0.0
    begin_s: float = 0.0
    requests_before: float = 0.0
    serving: PoolSizes = field(default_factory=PoolSizes)
    late: float | None = None
    long: float | None = None
    first_tokens: float | None = None

    @property
    def life_s(self) -> float:
        """The mean seconds from a request's arrival to its last token."""
        return (self.ttft_ms + (self.osl.mean_tokens or 0.0) * self.itl_ms) / 1000
