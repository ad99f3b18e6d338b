"""Traffic: measured, its lengths, and its forecast."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dynaplan.gateway.traffic import Lengths, _lengths_of


@dataclass(frozen=True)
class Demand:
    """Requests per second, and their lengths.

    ``prefix_hit_rate`` is the part of the prompts' tokens (0 to 1) that need not be computed.
    ``burstiness`` is the variance of the number of arrivals over its mean: 1 for independent clients
    (Poisson), 0 for a metronome. ``dispersions`` are the same at several time scales, each with the
    length of its windows in s, the shortest first; none where they are not known.
    """

    requests_per_s: float
    isl: Lengths
    osl: Lengths
    prefix_hit_rate: float = 0.0
    burstiness: float = 1.0
    dispersions: tuple[tuple[float, float], ...] = ()

    def times(self, factor: float) -> Demand:
        """Return the demand with ``factor`` times the requests per second, of which as many come together.

        Of arrivals that are left out at random what exceeds the variance of independent ones shrinks with
        their number (thinning), so that one request in a long time is in no burst.
        """
        dispersions = tuple(
            (scale_s, max(0.0, 1 + (index - 1) * factor)) for scale_s, index in self.dispersions
        )
        return replace(self, requests_per_s=self.requests_per_s * factor, dispersions=dispersions)


@dataclass(frozen=True)
class Expected:
    """The forecast of one coming interval: its requests, and their mean lengths; None is "not known".

    ``ahead`` counts intervals after the newest measured one; ``why`` names the method. ``doubt`` is the
    mean absolute error, in requests, of earlier forecasts as far ahead, ``surprise`` the requests by which
    the load has exceeded them lately, but for as many as may miss; 0: not known.
    """

    requests: float | None = None
    isl_tokens: float | None = None
    osl_tokens: float | None = None
    ahead: int = 1
    doubt: float = 0.0
    surprise: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class Foresight:
    """The forecast of the traffic of some coming intervals, the soonest first.

    ``isl`` and ``osl`` are the histograms of recent requests, None where there were none; ``dispersion`` and
    ``prefix_hit_rate`` as in ``Traffic``, ``dispersions`` as in ``Demand``, averaged over the last minutes.
    """

    interval_s: float
    expected: tuple[Expected, ...] = ()
    isl: Lengths | None = None
    osl: Lengths | None = None
    dispersion: float | None = None
    prefix_hit_rate: float | None = None
    dispersions: tuple[tuple[float, float], ...] = ()

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Foresight:
        """Read the mapping that ``dataclasses.asdict`` makes; KeyError or TypeError for another."""
        expected = tuple(Expected(**each) for each in document["expected"])
        dispersions = tuple((float(each[0]), float(each[1])) for each in document.get("dispersions", ()))
        parts = {"expected": expected, "dispersions": dispersions, **_lengths_of(document)}
        return cls(**{**document, **parts})
