"""The simulated router asks the same index as the live one, and hears of blocks when a live one would.

Where prompts are expected to be cached: by the engines' events, or by prediction.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from dynaplan.config.settings.frontend import FrontendSettings
from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.engines.timing_model.engine_model import EngineSettings
from dynaplan.graph.lifecycle import Role
from dynaplan.lab.simulate.options import SimulateOptions
from dynaplan.routing.kv_index import PrefixIndex
from dynaplan.simulation.router import PredictedCaches, ReportedCaches, SimulatedRouting
from dynaplan.simulation.run import StaticPolicy, simulate
from dynaplan.simulation.simulated_service import SimulatedService
from tests.unit.simulation.services import TIMING, service, workers

TOLD, PREDICTED = SimulatedRouting("kv"), SimulatedRouting("kv", is_kv_events=False)


def prompt(at_s: float, first: int, tokens: int = 320, answer: int = 2) -> TracedRequest:
    """A prompt whose blocks have ids from ``first`` on."""
    return TracedRequest(at_s, tokens, answer, tuple(range(first, first + tokens // 16)), 16)


def hits(
    routing: SimulatedRouting, trace: Sequence[TracedRequest], decode: int = 2, blocks: int = 1000
) -> int:
    """The prompt tokens that came out of a cache."""
    engine = EngineSettings(blocks, block_tokens=16, batched_tokens=1024)
    settings = replace(service(), routing=routing, engines={Role.DECODE: (engine, TIMING)})
    return simulate(trace, settings, workers(0, decode), StaticPolicy()).outcome.cached_tokens


def test_without_options_the_router_is_the_live_ones():
    assert SimulatedRouting() == SimulatedRouting.of(FrontendSettings.from_options({}))
    assert SimulateOptions("").routing == SimulatedRouting()


@pytest.mark.parametrize("routing", [TOLD, PREDICTED])
def test_a_prompt_that_comes_again_is_a_hit_but_for_its_last_block(routing):
    assert hits(routing, [prompt(0.0, 0), prompt(5.0, 0)]) == 304


def test_what_engines_tell_does_not_expire_as_a_prediction_does():
    trace = [prompt(0.0, 0), prompt(500.0, 100), prompt(501.0, 0), prompt(502.0, 200), prompt(503.0, 0)]

    assert hits(TOLD, trace, decode=3) > hits(PREDICTED, trace, decode=3)


def test_blocks_are_heard_of_when_their_step_is_over():
    """The prompt takes 0.32 s: at 0.3 s the router does not know of it yet, and takes the idle worker."""
    assert hits(TOLD, [prompt(0.0, 0), prompt(0.3, 0)]) == 0
    assert hits(TOLD, [prompt(0.0, 0), prompt(0.4, 0)]) == 304


def test_a_block_that_lost_its_place_is_not_expected_any_more():
    """One worker holds 30 blocks: the second prompt takes the first one's place."""
    simulated = SimulatedService(
        replace(service(), routing=TOLD, engines={Role.DECODE: (EngineSettings(30, 16), TIMING)}),
        workers(0, 1),
    )
    for at_s, first in ((0.0, 0), (1.0, 100)):
        simulated.run_until(at_s)
        simulated.arrive(prompt(at_s, first))
    simulated.run_until(5.0)
    simulated.arrive(prompt(5.0, 0))

    [worker] = simulated.pools.all(Role.DECODE)
    assert worker.book.prefill_blocks > 20 - 10


def test_a_worker_that_left_is_not_expected_to_hold_anything():
    simulated = SimulatedService(replace(service(startup_s=0.0), routing=TOLD), workers(0, 2))
    simulated.arrive(prompt(0.0, 0))
    simulated.arrive(prompt(0.0, 100))
    simulated.run_until(2.0)
    simulated.advance_decoders(2.0)
    simulated.scale(PoolSizes(0, 1))
    simulated.run_until(3.0)
    for first in (0, 100):
        simulated.arrive(prompt(3.0, first))

    [worker] = simulated.pools.all(Role.DECODE)
    assert worker.book.prefill_blocks == 20, "one of the two is expected to be there, but for nothing of it"


def test_what_a_worker_told_that_gets_no_requests_any_more_is_forgotten():
    simulated = SimulatedService(replace(service(startup_s=0.0), routing=TOLD), workers(0, 2))
    for first in (0, 100):
        simulated.arrive(prompt(0.0, first))
    simulated.run_until(2.0)
    simulated.advance_decoders(2.0)
    both, caches, hashes = (
        list(simulated.pools.all(Role.DECODE)),
        ReportedCaches(),
        prompt(0.0, 0).block_hashes,
    )
    [holder] = caches.overlaps(hashes, both, 2.0)

    assert caches.overlaps(hashes, [each for each in both if each.number != holder], 2.0) == {}


def test_the_hit_rate_is_of_the_prompts_that_tell_their_prefixes():
    trace = [prompt(0.0, 0), TracedRequest(1.0, 1000, 2), prompt(5.0, 0)]
    outcome = simulate(trace, replace(service(), routing=TOLD), workers(0, 2), StaticPolicy()).outcome

    assert outcome.hit_rate == 304 / 640
    assert outcome.by_worker.total() == 3


def test_of_remote_prompts_the_prefill_workers_cache_counts():
    settings = replace(service(is_disaggregated=True), routing=TOLD)
    trace = [prompt(0.0, 0), prompt(5.0, 0)]

    assert simulate(trace, settings, workers(1, 1), StaticPolicy()).outcome.cached_tokens == 304


def test_a_trace_without_prefixes_has_no_hit_rate():
    outcome = simulate([TracedRequest(0.0, 100, 2)], service(), workers(0, 1), StaticPolicy()).outcome

    assert outcome.hit_rate is None
    assert outcome.imbalance == 1.0


def test_a_temperature_lets_the_router_draw():
    trace = [prompt(0.5 * index, 0) for index in range(40)]
    hot = replace(TOLD, temperature=100.0)

    def spread(routing: SimulatedRouting) -> list[int]:
        outcome = simulate(trace, replace(service(), routing=routing), workers(0, 2), StaticPolicy()).outcome
        return sorted(outcome.by_worker.values())

    assert spread(TOLD) == [40]
    assert len(spread(hot)) == 2


def test_the_options_are_told_in_words():
    assert SimulatedRouting().in_words == "round-robin"
    assert replace(TOLD, overlap_weight=2.0).in_words == "kv by engines' KV events, overlap weight 2"
    assert "prediction" in PREDICTED.in_words
    assert "temperature 0.5" in replace(TOLD, temperature=0.5).in_words


def test_the_meter_tells_the_planner_the_hit_rate_of_an_interval():
    simulated = SimulatedService(replace(service(), routing=TOLD), workers(0, 1))
    meter = simulated.start_meter()
    assert meter.traffic(10.0).prefix_hit_rate is None
    for at_s in (10.0, 15.0):
        simulated.run_until(at_s)
        simulated.arrive(prompt(at_s, 0))
    simulated.run_out()

    assert meter.traffic(10.0).prefix_hit_rate == 304 / 640


@pytest.mark.parametrize("weight", [1.0, 4.0, 16.0])
def test_a_worker_that_holds_everything_popular_gets_at_most_as_many_more_as_the_weight(weight):
    """As long as no prompt is left to compute: one that is counts for as many as the weight too."""
    routing, large = replace(TOLD, overlap_weight=weight), EngineSettings(100_000, 16)
    settings = replace(service(), routing=routing, engines={Role.DECODE: (large, TIMING)})
    simulated = SimulatedService(settings, workers(0, 4))
    simulated.arrive(prompt(0.0, 0))
    apart = []
    for index in range(1, 101):
        simulated.run_until(0.5 * index)
        simulated.arrive(prompt(0.5 * index, 0, answer=10_000))
        in_flight = [each.book.in_flight for each in simulated.pools.all(Role.DECODE)]
        apart.append(max(in_flight) - min(in_flight))

    assert weight <= max(apart) <= weight + 1


def test_what_was_sent_is_expected_by_prediction_alone():
    reported, predicted = ReportedCaches(), PredictedCaches(PrefixIndex(time_to_live_s=120.0))
    for caches in (reported, predicted):
        caches.sent((1, 2), 7, 0.0)

    assert reported.overlaps((1, 2, 3), [], 1.0) == {}
    assert predicted.overlaps((1, 2, 3), [], 1.0) == {7: 2}
    assert predicted.overlaps((1, 2, 3), [], 121.0) == {}
