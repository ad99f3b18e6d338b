"""A simulated fleet keeps the caches that serve most, as a live one does."""

from __future__ import annotations

import pytest

from dynaplan.gateway.traced_requests import TracedRequest
from dynaplan.graph.lifecycle import Role
from dynaplan.simulation.service import SimulatedService
from tests.unit.simulation.services import service, workers

RARE, POPULAR = tuple(range(1000, 1060)), tuple(range(1, 60))


def talk(first: tuple[int, ...], then: tuple[int, ...]) -> list[TracedRequest]:
    """Two prompts at once, and then the second again and again."""
    at_once = [TracedRequest(0.0, 960, 5, blocks, 16) for blocks in (first, then)]
    return at_once + [TracedRequest(5.0 * turn, 960, 5, then, 16) for turn in range(1, 9)]


def kept(router: str, *, is_disaggregated: bool = False) -> tuple[int, dict[int, int]]:
    """The number of the worker that stays of two, and the cached tokens that each served."""
    simulated = SimulatedService(
        service(router=router, is_disaggregated=is_disaggregated),
        workers(2, 1) if is_disaggregated else workers(0, 2),
    )
    for request in talk(RARE, POPULAR):
        simulated.run_until(request.arrival_s)
        simulated.arrive(request)
    simulated.run_until(60.0)
    simulated.advance_decoders(60.0)
    role = Role.PREFILL if is_disaggregated else Role.DECODE
    served = {each.number: each.engine.model.totals.cached for each in simulated.pools.all(role)}
    simulated.scale(workers(1, 1) if is_disaggregated else workers(0, 1))
    [stays] = simulated.pools.serving(role)
    return stays.number, served


@pytest.mark.parametrize("is_disaggregated", [False, True])
def test_the_worker_whose_cache_serves_stays(is_disaggregated: bool) -> None:
    stays, served = kept("kv", is_disaggregated=is_disaggregated)
    assert served[stays] == max(served.values()) > 0


def test_without_routing_by_caches_the_highest_index_leaves() -> None:
    stays, _ = kept("round-robin")
    assert stays == 1
