"""Whoever counts what becomes of the requests of a simulated service. Moments are virtual seconds."""

from __future__ import annotations

from typing import Protocol

from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.simulation.outcome import Outcome


class Tally(Protocol):
    """Hears of each request when it is answered or lost."""

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


class OutcomeTally:
    """The tally of a simulation that somebody reads: against the SLO."""

    def __init__(self, outcome: Outcome) -> None:
        self._outcome = outcome

    def answered(
        self,
        traced: TracedRequest,
        worker: int,
        begun_s: float,
        first_s: float,
        end_s: float,
        cached_tokens: int,
    ) -> None:
        """Count an answered request."""
        outcome, came_s, tokens = self._outcome, traced.arrival_s, traced.output_tokens
        itl_s = (end_s - first_s) / (tokens - 1) if tokens > 1 else None
        queued_s = begun_s - came_s if begun_s > came_s else 0.0
        outcome.add(came_s, first_s - came_s, itl_s, end_s - came_s, tokens, queued_s)
        outcome.by_worker[worker] += 1
        if traced.block_hashes:
            outcome.note_hits(traced.prompt_tokens, cached_tokens)

    def lost(self, traced: TracedRequest) -> None:
        """Count a request that is never answered."""
        self._outcome.lost += 1


class NoTally:
    """The tally of a simulation of which only the meter is read."""

    def answered(
        self,
        traced: TracedRequest,
        worker: int,
        begun_s: float,
        first_s: float,
        end_s: float,
        cached_tokens: int,
    ) -> None:
        pass

    def lost(self, traced: TracedRequest) -> None:
        pass
