"""The routing modes: which worker gets the next request. Pure: the caller's function draws random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from dynaplan.config.settings.frontend import RoutingSettings

KV_MODE = "kv"
"""The mode in which the cached prefix of a prompt counts."""


class Candidate(NamedTuple):
    """One worker as the router sees it, in the router's own bookkeeping.

    ``active_blocks`` are the KV blocks of its prompts, ``prefill_blocks`` the part of them that it has yet to
    compute, ``overlap_blocks`` the part of the new prompt that it probably has in its cache.
    """

    instance_id: int
    in_flight: int = 0
    active_blocks: int = 0
    prefill_blocks: int = 0
    overlap_blocks: int = 0


class RoutingLogic(Protocol):
    """A routing mode. It keeps what it needs from one choice to the next."""

    def choose(self, candidates: Sequence[Candidate], prompt_blocks: int = 0) -> Candidate:
        """Return one of at least one candidate; the new prompt has that many KV blocks."""
        ...

    def choose_without_load(self, candidates: int) -> int | None:
        """Return the index of the chosen candidate; None in a mode that considers load."""
        ...


@dataclass
class RoundRobin:
    """One candidate after the other; ``turn`` counts the choices."""

    turn: int = 0

    def choose(self, candidates: Sequence[Candidate], prompt_blocks: int = 0) -> Candidate:
        return candidates[self.choose_without_load(len(candidates))]

    def choose_without_load(self, candidates: int) -> int:
        self.turn += 1
        return (self.turn - 1) % candidates


@dataclass
class RandomChoice:
    """Any candidate, with equal probability; ``draw`` returns a random number in [0, 1)."""

    draw: Callable[[], float]

    def choose(self, candidates: Sequence[Candidate], prompt_blocks: int = 0) -> Candidate:
        return candidates[self.choose_without_load(len(candidates))]

    def choose_without_load(self, candidates: int) -> int:
        return int(self.draw() * candidates)


@dataclass
class LeastLoaded:
    """The candidate with the fewest requests in flight; equals take turns."""

    turn: int = 0

    def choose(self, candidates: Sequence[Candidate], prompt_blocks: int = 0) -> Candidate:
        self.turn += 1
        return _lowest(candidates, [each.in_flight for each in candidates], self.turn - 1)

    def choose_without_load(self, candidates: int) -> None:
        return None


@dataclass
class KvAware:
    """The candidate where the request costs least, equals in turn; with a temperature one is drawn.

    A worker is drawn with a probability proportional to ``exp(-cost / spread / temperature)``, ``spread``
    being the highest cost less the lowest one: near 0 the cheapest is chosen nearly always, far above 1 all
    are equally likely. Source: ``softmax_sample`` of Dynamo's KV router, 0.4 to 1.6.
    """

    draw: Callable[[], float]
    overlap_weight: float = RoutingSettings.overlap_weight
    temperature: float = RoutingSettings.router_temperature
    turn: int = 0

    def choose(self, candidates: Sequence[Candidate], prompt_blocks: int = 0) -> Candidate:
        costs = [self.cost(each, prompt_blocks) for each in candidates]
        self.turn += 1
        if self.temperature <= 0:
            return _lowest(candidates, costs, self.turn - 1)
        lowest = min(costs)
        scale = (max(costs) - lowest) * self.temperature
        weights = [math.exp((lowest - cost) / scale) if scale else 1.0 for cost in costs]
        left = self.draw() * sum(weights)
        for candidate, weight in zip(candidates, weights, strict=True):
            left -= weight
            if left < 0:
                return candidate
        return candidates[-1]

    def choose_without_load(self, candidates: int) -> None:
        return None

    def cost(self, candidate: Candidate, prompt_blocks: int) -> float:
        """Return the cost of the request there: ``overlap_weight * blocks to compute + active blocks``.

        Both terms count the request as if it were there already. Source: Dynamo's KV router, 0.4 to 1.6.

        With load = weight * prefill blocks + active blocks, the cheapest worker's load exceeds the least one
        by at most weight * its overlap. So a worker that holds everything popular cannot be flooded: of
        prompts that it holds whole it gets at most ``overlap_weight`` more than the least loaded one has,
        where a prompt that is yet to compute counts for ``overlap_weight`` too.
        """
        to_compute = candidate.prefill_blocks + max(0, prompt_blocks - candidate.overlap_blocks)
        return self.overlap_weight * to_compute + candidate.active_blocks + prompt_blocks


def make_routing_logic(
    mode: str, draw: Callable[[], float], overlap_weight: float, temperature: float
) -> RoutingLogic:
    """Return the mode of that name; ``draw`` returns a random number in [0, 1)."""
    if mode == KV_MODE:
        return KvAware(draw, overlap_weight, temperature)
    if mode == "random":
        return RandomChoice(draw)
    return RoundRobin() if mode == "round-robin" else LeastLoaded()


def _lowest(candidates: Sequence[Candidate], costs: Sequence[float], turn: int) -> Candidate:
    best = min(costs)
    equals = [candidate for candidate, cost in zip(candidates, costs, strict=True) if cost == best]
    return equals[turn % len(equals)]
