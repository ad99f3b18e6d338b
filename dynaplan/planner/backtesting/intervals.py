"""One interval of traffic, as a backtest replays it."""

from __future__ import annotations

from dataclasses import dataclass

from dynaplan.contract.traffic import Lengths


@dataclass(frozen=True)
class Interval:
    """One interval of traffic. Its lengths are the recent ones where its own are too few.

    ``answered`` is the number of answers that ended in it, of which the lengths and the means are.
    ``unexplained_misses`` are the requests that missed the target that most of them missed. None where
    frontends do not count them, and where the engine model is not to blame: too few workers served, or the
    load was above all that had been backtested.
    ``failing`` are the workers that had failed, or were started again unasked, at its end. ``begin_s`` and
    ``requests_before`` are the seconds and the requests before it since the evidence began.
    """

    length_s: float
    requests: float
    arrivals: tuple[float, ...]
    isl: Lengths
    osl: Lengths
    hit_rate: float = 0.0
    unexplained_misses: float | None = None
    failing: int = 0
    answered: float = 0.0
    ttft_ms: float = 0.0
    itl_ms: float = 0.0
    begin_s: float = 0.0
    requests_before: float = 0.0
