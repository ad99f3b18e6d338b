"""The choice of the worker for the next request. Pure: the caller counts the turns and draws numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dynaplan.config.settings.routing import RoutingSettings


@dataclass(frozen=True)
class Candidate:
    """One worker as the router sees it, in the router's own bookkeeping.

    ``active_blocks`` are the KV blocks of its prompts, ``prefill_blocks`` the part of them that it has yet to
    compute, ``overlap_blocks`` the part of the new prompt that it probably has in its cache.
    """

    instance_id: int
    in_flight: int = 0
    active_blocks: int = 0
    prefill_blocks: int = 0
    overlap_blocks: int = 0


@dataclass(frozen=True)
class Inputs:
    """The inputs of a choice besides the candidates.

    ``turn`` counts the choices made so far, ``draw`` is a random number in [0, 1), ``prompt_blocks`` is
    the length of the new prompt in KV blocks. With a ``temperature`` above 0 the mode ``kv`` draws.
    """

    turn: int = 0
    draw: float = 0.0
    prompt_blocks: int = 0
    overlap_weight: float = RoutingSettings.overlap_weight
    temperature: float = RoutingSettings.router_temperature


def round_robin(candidates: Sequence[Candidate], inputs: Inputs) -> Candidate:
    """Choose one candidate after the other, by the number of the request."""
    return candidates[inputs.turn % len(candidates)]


def random_choice(candidates: Sequence[Candidate], inputs: Inputs) -> Candidate:
    """Choose any of them, all alike probable."""
    return candidates[int(inputs.draw * len(candidates))]


def least_loaded(candidates: Sequence[Candidate], inputs: Inputs) -> Candidate:
    """Choose the one with the fewest requests in flight; equals take turns."""
    return _lowest(candidates, inputs.turn, lambda candidate: candidate.in_flight)


def kv_cost(candidate: Candidate, inputs: Inputs) -> float:
    """Return the cost of the request there: ``overlap_weight * prefill blocks to compute + active blocks``.

    Both terms count the request as if it were there already. Source: Dynamo's KV router, 0.4 to 1.6.

    With load = weight * prefill blocks + active blocks, the cheapest worker's load exceeds the least one by
    at most weight * its overlap. So a worker that holds everything popular cannot be flooded: of prompts that
    it holds whole it gets at most ``overlap_weight`` more than the least loaded one has, where a prompt that
    is yet to compute counts for ``overlap_weight`` too.
    """
    to_compute = candidate.prefill_blocks + max(0, inputs.prompt_blocks - candidate.overlap_blocks)
    return inputs.overlap_weight * to_compute + candidate.active_blocks + inputs.prompt_blocks


def by_kv_cost(candidates: Sequence[Candidate], inputs: Inputs) -> Candidate:
    """Choose the one where the request costs least, equals in turn; with a temperature, draw one.

    A worker is chosen with a probability proportional to ``exp(-cost / spread / temperature)``, ``spread``
    being the dearest one's cost less the cheapest one's: near 0 the cheapest is chosen nearly always, far
    above 1 all alike. Source: ``softmax_sample`` of Dynamo's KV router, 0.4 to 1.6.
    """
    if inputs.temperature <= 0:
        return _lowest(candidates, inputs.turn, lambda candidate: kv_cost(candidate, inputs))
    costs = [kv_cost(candidate, inputs) for candidate in candidates]
    lowest = min(costs)
    scale = (max(costs) - lowest) * inputs.temperature
    weights = [math.exp((lowest - cost) / scale) if scale else 1.0 for cost in costs]
    left = inputs.draw * sum(weights)
    for candidate, weight in zip(candidates, weights, strict=True):
        left -= weight
        if left < 0:
            return candidate
    return candidates[-1]


Choose = Callable[[Sequence[Candidate], Inputs], Candidate]
"""A routing mode: chooses among at least one candidate."""

MODES: Mapping[str, Choose] = {
    "round-robin": round_robin,
    "random": random_choice,
    "least-loaded": least_loaded,
    "kv-load": least_loaded,
    "kv": by_kv_cost,
}
"""The routing modes by the name they have in the configuration. None may be called without candidates."""


def _lowest(candidates: Sequence[Candidate], turn: int, cost: Callable[[Candidate], float]) -> Candidate:
    costs = [cost(candidate) for candidate in candidates]
    best = min(costs)
    equals = [candidate for candidate, its_cost in zip(candidates, costs, strict=True) if its_cost == best]
    return equals[turn % len(equals)]
