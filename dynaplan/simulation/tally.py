"""Whoever counts what becomes of the requests of a simulated service. Moments are virtual seconds."""

from __future__ import annotations

from typing import Protocol

from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.simulation.meter import TrafficMeter
from dynaplan.simulation.outcome import Outcome


class Tally(Protocol):
    """Hears of each request when it comes, at its first token, and when it is answered or lost."""

    def arrived(self) -> None:
        """Count a request that is taken."""
        ...

    def first_token(self, ttft_s: float) -> None:
        """Count a first token that the client gets that long after the request."""
        ...

    def answered(
        self,
        traced: TracedRequest,
        worker: int,
        begun_s: float,
        first_s: float,
        end_s: float,
        cached_tokens: int,
    ) -> None:
        """Count an answered request: an engine had it at ``begun_s``, its tokens came until ``end_s``.

        ``worker`` is the number of its decode worker; ``cached_tokens`` of its prompt came out of a cache.
        """
        ...

    def lost(self, traced: TracedRequest) -> None:
        """Count a request that is never answered."""
        ...


class OutcomeAndMeter:
    """The tally of a simulation that somebody reads: against the SLO, and as frontends would export it."""

    __slots__ = ("_meter", "_outcome", "arrived", "first_token")

    def __init__(self, outcome: Outcome, meter: TrafficMeter) -> None:
        self._outcome, self._meter = outcome, meter
        self.arrived, self.first_token = meter.arrived, meter.first_token

    def answered(
        self,
        traced: TracedRequest,
        worker: int,
        begun_s: float,
        first_s: float,
        end_s: float,
        cached_tokens: int,
    ) -> None:
        """Count an answered request in both."""
        outcome, came_s, tokens = self._outcome, traced.arrival_s, traced.output_tokens
        decoding_s, took_s = end_s - first_s, end_s - came_s
        self._meter.finished(traced, decoding_s, took_s, cached_tokens)
        itl_s = decoding_s / (tokens - 1) if tokens > 1 else None
        outcome.add(came_s, first_s - came_s, itl_s, took_s, tokens, max(0.0, begun_s - came_s))
        outcome.by_worker[worker] += 1
        if traced.block_hashes:
            outcome.note_hits(traced.prompt_tokens, cached_tokens)

    def lost(self, traced: TracedRequest) -> None:
        """Count a request that is never answered."""
        self._outcome.lost += 1
