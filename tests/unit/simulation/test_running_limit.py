"""The simulated service keeps a limit of running requests as the live frontends do."""

from __future__ import annotations

from dataclasses import replace

from dynaplan.contract.running_limits import RunningLimit
from dynaplan.engines.timing_model.step_timing import StepTiming
from dynaplan.graph.lifecycle import Role
from dynaplan.simulation.outcome import Outcome
from dynaplan.simulation.simulated_service import SimulatedService
from tests.unit.simulation.services import ENGINE, at_once, mean, service, workers

TIMING = StepTiming(lambda tokens: 1.0, lambda decodes, kv_tokens: 10.0 * decodes)
"""Each request that decodes makes the step 10 ms longer."""


def outcome_of(limit: RunningLimit | None, *, is_disaggregated: bool = False, requests: int = 6) -> Outcome:
    settings = service(is_disaggregated=is_disaggregated)
    engines = dict.fromkeys(settings.engines, (ENGINE, TIMING))
    simulated = SimulatedService(replace(settings, engines=engines), workers(int(Role.PREFILL in engines), 1))
    simulated.running_limit = limit
    for request in at_once([(100, 11)] * requests):
        simulated.arrive(request)
    simulated.run_out()
    return simulated.outcome


def test_who_waits_for_a_place_leaves_the_others_their_itl() -> None:
    for is_disaggregated in (False, True):
        without = outcome_of(None, is_disaggregated=is_disaggregated)
        held = outcome_of(RunningLimit(2, 10.0, 5.0), is_disaggregated=is_disaggregated)
        assert mean(held.itl_ms) < 25.0 < mean(without.itl_ms)
        assert held.requests == without.requests == 6
        assert held.lost == 0


def test_a_wait_in_vain_is_no_wait() -> None:
    without, yielding = outcome_of(None), outcome_of(RunningLimit(2, 10.0, 0.01))
    assert mean(yielding.itl_ms) == mean(without.itl_ms)
    assert mean(yielding.ttft_ms) == mean(without.ttft_ms)


def test_with_its_time_over_a_request_is_sent_all_the_same() -> None:
    held = outcome_of(RunningLimit(1, 0.05, 1000.0))
    assert held.lost == 0
    assert held.requests == 6
    assert mean(held.ttft_ms) < 300.0
