"""A prompt costs what the simulated service computes of it, by the number of workers and its caches."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from dynaplan.fleet.counts import Targets
from dynaplan.gateway.traced_requests import TracedRequest
from dynaplan.graph.lifecycle import Role
from dynaplan.lab.simulate.oracle.lower_bound import least_gpu_hours
from dynaplan.lab.simulate.oracle.oracle import OracleOptions, find_oracle
from dynaplan.lab.simulate.oracle.prompt_costs import PromptCosts
from dynaplan.lab.simulate.oracle.trace_arrays import trace_arrays
from dynaplan.lab.simulate.run import StaticPolicy, simulate
from dynaplan.simulation.service import ServiceSettings
from tests.unit.simulation.services import service, workers

LOST = TracedRequest(0.5, 0, 5)


def visits(count: int, *, every_s: float = 2.0) -> list[TracedRequest]:
    """The same prompt of 160 tokens again and again; one in between is lost."""
    found = [TracedRequest(number * every_s, 160, 2, tuple(range(10)), 16) for number in range(count)]
    return [found[0], LOST, *found[1:]]


def costs_of(settings: ServiceSettings, measured: dict[int, list[float]]) -> PromptCosts:
    return PromptCosts(lambda level: array("d", measured[level]))


def test_prompts_cost_what_was_measured_with_as_many_workers() -> None:
    costs = costs_of(service(), {1: [0.1, 0.1], 2: [0.2, 0.2]})
    assert list(costs.at(2)) == [0.2, 0.2]
    assert list(costs.at(1)) == [0.1, 0.1]


def test_a_simulated_schedule_has_its_own_costs_and_others_those_of_static_ones() -> None:
    settings = service()
    arrays = trace_arrays(
        visits(3), settings
    )  # windows of 2 s: two, and the last prompt belongs to the second
    costs = costs_of(settings, {1: [0.1] * 3, 2: [0.2] * 3})
    costs.follow(arrays, [1, 2], array("d", [0.11, 0.12, 0.13]))
    assert list(costs.at(1)) == [0.11, 0.1, 0.1]
    assert list(costs.at(2)) == [0.2, 0.12, 0.13]
    costs.follow(arrays, [1, 1], array("d", [0.14] * 3))
    assert list(costs.at(2)) == [0.2] * 3


def test_a_request_is_found_by_its_place_in_the_trace() -> None:
    arrays = trace_arrays(visits(3), service())
    assert [arrays.number_of(place) for place in range(4)] == [0, None, 1, 2]


@pytest.mark.parametrize("is_disaggregated", [True, False])
def test_workers_have_caches_of_their_own(is_disaggregated: bool) -> None:
    """With two workers in turns a prompt is computed twice, once in each cache; one computes it once."""
    settings = service(is_disaggregated=is_disaggregated)
    found = {}
    for count in (1, 2):
        first = workers(count, 1) if is_disaggregated else workers(0, count)
        outcome = simulate(visits(8), settings, first, StaticPolicy()).outcome
        found[count] = outcome.cached_tokens
    assert found[1] - found[2] == 144  # all but the last block of one prompt: a token is always computed


def test_the_lower_bound_of_shared_prefixes_counts_each_block_once() -> None:
    settings = service(is_disaggregated=True)
    trace = visits(200, every_s=0.1)
    alone = [replace(each, block_hashes=(), block_tokens=0) for each in trace]
    shared, separate = (
        least_gpu_hours(trace_arrays(each, settings), settings, 95.0) for each in (trace, alone)
    )
    assert 0 < shared < separate


def test_an_oracle_with_shared_prefixes_is_not_below_its_lower_bound() -> None:
    oracle = find_oracle(
        lambda: visits(60, every_s=0.25), service(is_disaggregated=True), OracleOptions(effort=2)
    )
    bound = oracle.verdict.lower_bound_gpu_hours
    assert bound is not None
    assert 0 < bound <= oracle.result.gpu_hours
    assert oracle.verdict.is_slo_met


def test_a_cache_that_loses_its_blocks_makes_prompts_dear() -> None:
    """Ten prefixes in turns, and room for few: nothing is found, and one prefill worker is too few."""

    def rounds() -> list[TracedRequest]:
        prefix = [tuple(range(100 * number, 100 * number + 25)) for number in range(10)]
        return [TracedRequest(number * 0.3, 400, 2, prefix[number % 10], 16) for number in range(300)]

    roomy = service(is_disaggregated=True, gpus=6)
    engine, timing = roomy.engines[Role.PREFILL]
    narrow = replace(
        roomy, engines={**roomy.engines, Role.PREFILL: (replace(engine, total_blocks=80), timing)}
    )
    needed = {
        name: find_oracle(rounds, settings, OracleOptions(effort=2))
        for name, settings in (("roomy", roomy), ("narrow", narrow))
    }
    assert all(oracle.verdict.is_slo_met for oracle in needed.values())
    assert needed["roomy"].schedule[0][1] == Targets(1, 1)
    assert needed["narrow"].result.gpu_hours > 1.3 * needed["roomy"].result.gpu_hours
