"""The simulated service: what arrives is answered when the physics say, whatever happens to workers."""

import pytest

from dynaplan.engines.timing_model.timing import hand_off_s
from dynaplan.fleet.counts import Targets
from dynaplan.gateway.traced_requests import TracedRequest
from dynaplan.graph.lifecycle import Role
from dynaplan.simulation.run import StaticPolicy, simulate
from dynaplan.simulation.service import SimulatedService
from tests.unit.simulation.services import at_once, every, mean, service, workers

PRECISE = pytest.approx


def test_a_request_alone_takes_its_prefill_and_then_one_step_for_each_token():
    outcome = simulate(every(1.0, 1), service(), workers(), StaticPolicy()).outcome

    assert mean(outcome.ttft_ms) == PRECISE(100.0)
    assert mean(outcome.itl_ms) == PRECISE(10.0)
    assert mean(outcome.duration_s) == PRECISE(0.2)


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
    assert decode.engine.model.totals.external == 100
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
    simulated.want(workers(0, 1))
    simulated.run_out()

    assert simulated.outcome.requests == 1
    assert mean(simulated.outcome.ttft_ms) == PRECISE(30_100.0)


def test_a_new_worker_gets_requests_once_it_has_started_and_holds_its_gpu_from_the_beginning():
    simulated = SimulatedService(service(startup_s=30.0), workers(0, 1))
    simulated.run_until(10.0)
    simulated.want(workers(0, 2))

    simulated.run_until(39.9)
    assert len(simulated.pools.serving(Role.DECODE)) == 1
    simulated.run_until(40.1)
    assert len(simulated.pools.serving(Role.DECODE)) == 2
    assert simulated.pools.gpu_seconds(40.1) == PRECISE(40.1 + 30.1)


def test_a_leaving_worker_finishes_what_it_holds_and_only_then_frees_its_gpu():
    simulated = SimulatedService(service(), workers(0, 2))
    for _ in range(2):
        simulated.arrive(TracedRequest(0.0, 100, 101))
    simulated.want(workers(0, 1))

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
    simulated.want(workers(1, 1))
    simulated.run_out()

    assert simulated.outcome.requests == 2


def test_a_leaving_prefill_worker_finishes_what_it_has_taken():
    simulated = SimulatedService(service(is_disaggregated=True), workers(2, 1))
    for _ in range(8):
        simulated.arrive(TracedRequest(0.0, 100, 2))
    simulated.want(workers(1, 1))
    simulated.run_out()

    assert (simulated.outcome.requests, simulated.outcome.remote_prefills) == (8, 8)
    assert simulated.pools.counts().prefill.draining == 0


def test_no_more_workers_start_than_the_box_has_gpus():
    simulated = SimulatedService(service(gpus=2, startup_s=0.0), workers(0, 1))

    simulated.want(workers(0, 5))

    assert simulated.pools.counts().decode.holding == 2


def test_how_often_somebody_looks_changes_nothing():
    trace = every(0.013, 200, 130, 37)

    seldom = simulate(trace, service(), workers(0, 2), StaticPolicy(every_s=5.0)).outcome
    often = simulate(trace, service(), workers(0, 2), StaticPolicy(every_s=0.01)).outcome

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
        def look(self, simulated: SimulatedService) -> None:
            simulated.want(Targets(0, 2 if simulated.now_s == 5.0 else 1))

    result = simulate(every(1.0, 20), service(), workers(0, 1), UpAndDown())

    assert (result.scale_events, result.flaps) == (2, 1)
