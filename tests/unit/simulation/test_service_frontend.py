"""What the frontends of the simulated service decide, as the live ones do: where, and whether at all."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from dynaplan.config.settings.frontend import DisaggregationSettings
from dynaplan.gateway.traced_requests import TracedRequest
from dynaplan.graph.lifecycle import Role
from dynaplan.simulation.router import SimulatedRouting
from dynaplan.simulation.run import StaticPolicy, simulate
from dynaplan.simulation.service import SimulatedService
from tests.unit.simulation.services import ENGINE, at_once, every, service, workers

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


def waiting(wait_s: float, prompts: int, decode: int = 1) -> SimulatedService:
    """One prefill worker that gets so many prompts of 100 ms at once: it takes four, and begins with one."""
    settings = replace(service(is_disaggregated=True), prefill_wait_s=wait_s)
    simulated = SimulatedService(settings, workers(1, decode))
    for _ in range(prompts):
        simulated.arrive(TracedRequest(0.0, 100, 2))
    return simulated


def test_a_prompt_that_waits_too_long_for_a_prefill_worker_is_computed_by_its_decode_worker():
    simulated = waiting(0.3, 6)
    assert simulated.queue_depth == 6
    simulated.run_until(0.35)
    assert (simulated.outcome.given_up_prefills, simulated.queue_depth) == (5, 4)
    simulated.run_out()
    outcome = simulated.outcome
    assert (outcome.requests, outcome.lost, outcome.remote_prefills) == (6, 0, 6)


def test_a_prompt_that_a_worker_computes_too_slowly_is_computed_twice_and_answered_once():
    simulated = waiting(0.05, 1)
    simulated.run_until(0.06)
    [prefill] = simulated.pools.all(Role.PREFILL)
    assert (simulated.outcome.given_up_prefills, prefill.book.in_flight, simulated.queue_depth) == (1, 1, 1)
    simulated.run_out()
    assert (simulated.outcome.requests, simulated.queue_depth, prefill.book.in_flight) == (1, 0, 0)
    assert in_flight(simulated) == [0]


def test_where_the_decode_worker_is_leaving_another_one_computes_the_prompt():
    simulated = waiting(0.05, 2, decode=2)
    simulated.want(workers(1, 1))
    simulated.run_out()
    assert (simulated.outcome.requests, simulated.outcome.given_up_prefills) == (2, 2)
    assert list(simulated.outcome.by_worker.values()) == [2]


def test_in_time_nobody_gives_up():
    simulated = waiting(0.8, 6)
    simulated.run_out()
    assert (simulated.outcome.requests, simulated.outcome.given_up_prefills) == (6, 0)


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
