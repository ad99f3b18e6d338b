"""The simulated service: what arrives is answered when the physics say, whatever happens to workers.

A simulated fleet keeps the caches that serve most, as a live one does.

What the frontends of the simulated service decide, as the live ones do: where, and whether at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from dynaplan.config.settings.frontend import DisaggregationSettings
from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.engines.timing_model.step_timing import hand_off_s
from dynaplan.graph.lifecycle import Role
from dynaplan.simulation.router import SimulatedRouting
from dynaplan.simulation.run import StaticPolicy, simulate
from dynaplan.simulation.simulated_service import SimulatedService
from tests.unit.simulation.services import ENGINE, at_once, every, mean, service, workers

PRECISE = pytest.approx


def test_a_request_alone_takes_its_prefill_and_then_one_step_for_each_token():
    outcome = simulate(every(1.0, 1), service(), workers(), StaticPolicy()).outcome

    assert mean(outcome.ttft_ms) == PRECISE(100.0)
    assert mean(outcome.itl_ms) == PRECISE(10.0)
    assert outcome.total_duration_s == PRECISE(0.2)


def test_a_remote_prefill_costs_the_transfer_and_one_decode_step_more():
    result = simulate(every(1.0, 1), service(is_disaggregated=True), workers(1, 1), StaticPolicy())

    transfer_ms = hand_off_s(100) * 1000
    assert result.outcome.remote_prefills == 1
    assert mean(result.outcome.ttft_ms) == PRECISE(100.0 + transfer_ms + 10.0)
    assert mean(result.outcome.itl_ms) == PRECISE(10.0)


def test_the_decode_worker_computes_nothing_of_a_remotely_computed_prompt():
    simulated = SimulatedService(service(is_disaggregated=True), workers(1, 1))
    simulated.arrive(TracedRequest(0.0, 100, 5))
    simulated.run_out()

    [decode] = simulated.pools.all(Role.DECODE)
    assert decode.engine.model.totals.external_tokens == 100
    assert decode.engine.model.blocks.used == 0


def test_without_a_prefill_worker_the_decode_worker_computes_the_prompt():
    result = simulate(every(1.0, 3), service(is_disaggregated=True), workers(0, 1), StaticPolicy())

    assert (result.outcome.requests, result.outcome.remote_prefills) == (3, 0)


def test_every_request_is_answered_and_its_tokens_counted():
    result = simulate(every(0.02, 500), service(), workers(0, 3), StaticPolicy())

    assert (result.outcome.requests, result.outcome.lost) == (500, 0)
    assert result.outcome.output_tokens == 500 * 11


def test_what_no_engine_can_ever_serve_is_lost_and_counted():
    trace = at_once([(100, 5), (1_000_000, 5), (0, 5)])

    result = simulate(trace, service(), workers(), StaticPolicy())

    assert (result.outcome.requests, result.outcome.lost) == (1, 2)
    assert result.outcome.attainment(result.outcome.both_met) == PRECISE(1 / 3)


def test_requests_wait_for_the_first_worker_and_are_then_answered():
    simulated = SimulatedService(service(startup_s=30.0), workers(0, 0))
    simulated.arrive(TracedRequest(0.0, 100, 11))
    simulated.scale(workers(0, 1))
    simulated.run_out()

    assert simulated.outcome.requests == 1
    assert mean(simulated.outcome.ttft_ms) == PRECISE(30_100.0)


def test_a_new_worker_gets_requests_once_it_has_started_and_holds_its_gpu_from_the_beginning():
    simulated = SimulatedService(service(startup_s=30.0), workers(0, 1))
    simulated.run_until(10.0)
    simulated.scale(workers(0, 2))

    simulated.run_until(39.9)
    assert len(simulated.pools.serving(Role.DECODE)) == 1
    simulated.run_until(40.1)
    assert len(simulated.pools.serving(Role.DECODE)) == 2
    assert simulated.pools.gpu_seconds(40.1) == PRECISE(40.1 + 30.1)


def test_a_leaving_worker_finishes_what_it_holds_and_only_then_frees_its_gpu():
    simulated = SimulatedService(service(), workers(0, 2))
    for _ in range(2):
        simulated.arrive(TracedRequest(0.0, 100, 101))
    simulated.scale(workers(0, 1))

    simulated.run_until(0.5)
    simulated.advance_decoders(0.5)
    assert simulated.pools.counts().decode.draining == 1
    simulated.run_out()
    simulated.advance_decoders(2.0)

    assert simulated.outcome.requests == 2
    assert simulated.pools.counts().decode.draining == 0


def test_a_hand_off_for_a_worker_that_leaves_goes_to_another_one():
    simulated = SimulatedService(service(is_disaggregated=True), workers(1, 2))
    simulated.arrive(TracedRequest(0.0, 100, 11))
    simulated.arrive(TracedRequest(0.0, 100, 11))
    simulated.run_until(0.05)
    simulated.scale(workers(1, 1))
    simulated.run_out()

    assert simulated.outcome.requests == 2


def test_a_leaving_prefill_worker_finishes_what_it_has_taken():
    simulated = SimulatedService(service(is_disaggregated=True), workers(2, 1))
    for _ in range(8):
        simulated.arrive(TracedRequest(0.0, 100, 2))
    simulated.scale(workers(1, 1))
    simulated.run_out()

    assert (simulated.outcome.requests, simulated.outcome.remote_prefills) == (8, 8)
    assert simulated.pools.counts().prefill.draining == 0


def test_no_more_workers_start_than_the_box_has_gpus():
    simulated = SimulatedService(service(gpus=2, startup_s=0.0), workers(0, 1))

    simulated.scale(workers(0, 5))

    assert simulated.pools.counts().decode.holding == 2


def test_how_often_somebody_looks_changes_nothing():
    trace = every(0.013, 200, 130, 37)

    seldom = simulate(trace, service(), workers(0, 2), StaticPolicy(interval_s=5.0)).outcome
    often = simulate(trace, service(), workers(0, 2), StaticPolicy(interval_s=0.01)).outcome

    assert mean(often.ttft_ms) == PRECISE(mean(seldom.ttft_ms), rel=0.02)
    assert mean(often.itl_ms) == PRECISE(mean(seldom.itl_ms), rel=0.02)
    assert often.output_tokens == seldom.output_tokens


@pytest.mark.parametrize("router", ["round-robin", "least-loaded", "random", "kv"])
def test_the_same_simulation_twice_gives_the_same(router):
    results = [
        simulate(every(0.01, 300), service(router=router), workers(0, 3), StaticPolicy()) for _ in range(2)
    ]

    assert results[0].outcome.ttft_ms.total == results[1].outcome.ttft_ms.total
    assert results[0].gpu_hours == results[1].gpu_hours


def answered_by(router: str, trace: list[TracedRequest], count: int) -> list[int]:
    """The requests that each of ``count`` decode workers answered."""
    simulated = SimulatedService(service(router=router), workers(0, count))
    for request in trace:
        simulated.run_until(request.arrival_s)
        simulated.arrive(request)
    simulated.run_out()
    return [each.engine.model.totals.finished_requests for each in simulated.pools.all(Role.DECODE)]


def test_round_robin_gives_every_worker_the_same_number_of_requests():
    assert answered_by("round-robin", every(0.05, 300), 3) == [100, 100, 100]


def test_random_spreads_the_requests_over_all_workers():
    assert answered_by("random", every(0.05, 300), 3) == [PRECISE(100, abs=25)] * 3


@pytest.mark.parametrize("router", ["least-loaded", "kv-load"])
def test_routers_by_load_give_a_request_to_a_worker_without_one(router):
    trace = [
        TracedRequest(0.0, 900, 500),
        TracedRequest(0.1, 100, 11),
        TracedRequest(1.5, 100, 11),
    ]

    assert sorted(answered_by(router, trace, 2)) == [1, 2]


def test_the_kv_router_gives_a_prompt_to_the_worker_that_had_its_beginning():
    blocks = tuple(range(1, 60))
    trace = [TracedRequest(float(second), 960, 5, blocks, 16) for second in range(6)]

    assert sorted(answered_by("kv", trace, 3)) == [0, 0, 6]


def test_gpu_hours_count_until_the_last_arrival():
    result = simulate(every(36.0, 101), service(), workers(0, 2), StaticPolicy())

    assert result.gpu_hours == PRECISE(2.0)


def test_a_change_that_is_soon_taken_back_is_a_flap():
    class UpAndDown(StaticPolicy):
        def evaluate(self, simulated: SimulatedService) -> None:
            simulated.scale(PoolSizes(0, 2 if simulated.now_s == 5.0 else 1))

    result = simulate(every(1.0, 20), service(), workers(0, 1), UpAndDown())

    assert (result.scale_events, result.flaps) == (2, 1)


@pytest.mark.parametrize("router", ["round-robin", "kv"])
def test_of_ready_workers_the_one_with_the_highest_number_leaves(router: str) -> None:
    simulated = SimulatedService(service(router=router), workers(0, 2))
    simulated.run_until(60.0)
    simulated.scale(workers(0, 1))
    [stays] = simulated.pools.serving(Role.DECODE)
    assert stays.number == 1


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
    simulated.scale(workers(1, 1))
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
