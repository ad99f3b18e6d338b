"""What the frontends of the simulated service decide, as the live ones do: where, and whether at all."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from dynaplan.domain.lifecycle import Role
from dynaplan.domain.settings.routing import DisaggregationSettings
from dynaplan.domain.trace import TracedRequest
from dynaplan.simulator.router import SimulatedRouting
from dynaplan.simulator.run import StaticPolicy, simulate
from dynaplan.simulator.service import SimulatedService
from tests.unit.simulator.services import ENGINE, at_once, every, service, workers

PREFIX = tuple(range(1, 7))
"""The hashes of six full blocks: 96 of 100 tokens."""


def prefixed(arrival_s: float = 0.0, hashes: Sequence[int] = PREFIX) -> TracedRequest:
    return TracedRequest(arrival_s, 100, 11, tuple(hashes), ENGINE.block_tokens)


def in_flight(simulated: SimulatedService) -> list[int]:
    return [each.book.in_flight for each in simulated.pools.all(Role.DECODE)]


def test_a_prompt_that_is_short_enough_is_computed_by_the_decode_worker():
    settings = replace(
        service(is_disaggregated=True),
        disaggregation=DisaggregationSettings(
            is_on=True, is_conditional=True, max_local_prefill_length_tokens=100
        ),
    )

    outcome = simulate(at_once([(100, 11), (101, 11)]), settings, workers(1, 1), StaticPolicy()).outcome

    assert (outcome.requests, outcome.remote_prefills) == (2, 1)


def test_onto_a_full_prefill_queue_no_prompt_is_put():
    settings = replace(
        service(is_disaggregated=True),
        disaggregation=DisaggregationSettings(is_on=True, max_prefill_queue_size=2),
    )

    outcome = simulate(at_once([(100, 11)] * 5), settings, workers(1, 1), StaticPolicy()).outcome

    assert (outcome.requests, outcome.remote_prefills) == (5, 2)


def test_while_too_many_wait_for_their_first_token_more_are_refused():
    settings = replace(service(), max_waiting_requests=2)

    outcome = simulate(at_once([(100, 11)] * 5), settings, workers(), StaticPolicy()).outcome

    assert (outcome.requests, outcome.lost) == (2, 3)


def test_who_has_a_first_token_waits_no_more():
    settings = replace(service(), max_waiting_requests=1)

    outcome = simulate(every(0.15, 5, output_tokens=101), settings, workers(), StaticPolicy()).outcome

    assert (outcome.requests, outcome.lost) == (5, 0)


@pytest.mark.parametrize(("overlap_weight", "spread"), [(3.0, [2, 0]), (0.5, [1, 1])])
def test_the_kv_router_weighs_a_cached_prefix_against_what_a_worker_has_to_do(overlap_weight, spread):
    settings = replace(service(), routing=SimulatedRouting("kv", overlap_weight))
    simulated = SimulatedService(settings, workers(0, 2))
    simulated.arrive(prefixed())
    simulated.run_until(0.15)
    simulated.arrive(prefixed())

    assert sorted(in_flight(simulated), reverse=True) == spread


def test_the_kv_router_books_prompts_before_any_engine_has_begun_with_them():
    simulated = SimulatedService(service(router="kv"), workers(0, 2))
    for request in range(4):
        simulated.arrive(prefixed(hashes=range(100 * request, 100 * request + 6)))

    assert in_flight(simulated) == [2, 2]


def test_what_has_been_answered_is_booked_no_more():
    simulated = SimulatedService(service(router="kv", is_disaggregated=True), workers(1, 2))
    for request in range(4):
        simulated.arrive(prefixed(hashes=range(100 * request, 100 * request + 6)))
    simulated.run_out()

    decoding = simulated.pools.all(Role.DECODE)
    assert {
        (each.book.in_flight, each.book.active_blocks, each.book.prefill_blocks) for each in decoding
    } == {(0, 0, 0)}
