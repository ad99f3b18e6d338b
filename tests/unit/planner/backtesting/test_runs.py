"""What one backtest has simulated the next one does not simulate again, and finds as if it had."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest

from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.contract.traffic import Traffic
from dynaplan.engines.timing_model.step_timing import StepTiming
from dynaplan.graph.lifecycle import Role
from dynaplan.planner.backtesting.drawn_requests import DrawnInterval
from dynaplan.planner.backtesting.runs import KeptRuns, is_same
from dynaplan.planner.backtesting.search import Search, Trial, run
from dynaplan.planner.model import WorkerLimits
from dynaplan.simulation.router import SimulatedRouting
from dynaplan.simulation.simulated_service import ServiceSettings
from tests.unit.planner.backtesting.windows import given_window
from tests.unit.simulation.services import service

LIMITS = WorkerLimits(4)
DRAWS = Random(1)
CROWD = [
    TracedRequest(number / 3 + DRAWS.random() / 3, DRAWS.randrange(50, 500), DRAWS.randrange(1, 80))
    for number in range(600)
]
"""200 s of requests, more than one worker bears in time."""

SERVICES = {
    "aggregated": (service(), PoolSizes(0, 1)),
    "disaggregated": (service(is_disaggregated=True), PoolSizes(1, 2)),
    "least-loaded": (service(router="least-loaded"), PoolSizes(0, 2)),
    "random": (replace(service(), routing=SimulatedRouting("random")), PoolSizes(0, 2)),
}


def tried(
    window: Sequence[DrawnInterval], runs: KeptRuns, given: ServiceSettings, workers: PoolSizes
) -> Trial:
    search = Search(given, window, 0.05, workers, LIMITS, runs)
    return run(search, workers, is_whole=True)


def drawn(window: Sequence[DrawnInterval]) -> int:
    """How many of the intervals somebody has drawn."""
    return sum("requests" in vars(each) for each in window)


@pytest.mark.parametrize("name", SERVICES)
def test_a_run_that_goes_on_finds_what_one_of_the_whole_window_finds(name: str) -> None:
    given, workers = SERVICES[name]
    runs = KeptRuns()
    for seen_s in range(20, 210, 10):
        known = [each for each in CROWD if each.arrival_s < seen_s]
        continued = tried(given_window(known, settled_s=seen_s - 20), runs, given, workers)
        assert continued == tried(given_window(known), KeptRuns(), given, workers)
    assert continued.in_time < 1


@pytest.mark.parametrize("name", SERVICES)
def test_what_stood_goes_on_as_if_the_whole_window_had_been_simulated(name: str) -> None:
    given, workers = SERVICES[name]
    more = workers.plus(Role.DECODE, 1)

    def stood(window: Sequence[DrawnInterval], runs: KeptRuns) -> list[Traffic]:
        runs.begin(given, window)
        return runs.simulate_served(
            window, [more if 50 <= each.begin_s < 120 else workers for each in window]
        )

    runs = KeptRuns()
    for seen_s in range(20, 210, 10):
        known = [each for each in CROWD if each.arrival_s < seen_s]
        continued = stood(given_window(known, settled_s=seen_s - 20), runs)
        assert continued == stood(given_window(known), KeptRuns())
    window = given_window(CROWD, settled_s=190.0)
    stood(window, runs)
    assert drawn(window) == 2


def test_only_what_has_come_since_is_simulated() -> None:
    given, workers = SERVICES["aggregated"]
    runs = KeptRuns()
    tried(given_window(CROWD[:300], settled_s=80.0), runs, given, workers)
    window = given_window(CROWD[:330], settled_s=90.0)
    tried(window, runs, given, workers)
    assert (drawn(window), len(window)) == (3, 11)


def test_what_was_missed_before_the_window_does_not_count() -> None:
    given, workers = SERVICES["aggregated"]
    surge = [TracedRequest(5.0, 1000, 2)] * 20
    calm = [TracedRequest(float(second), 100, 2) for second in range(50, 200, 10)]
    runs = KeptRuns()
    assert tried(given_window([*surge, *calm[:4]], settled_s=80.0), runs, given, workers).in_time < 0.5
    later = given_window(calm[:8], settled_s=100.0, begin_s=40.0)
    assert tried(later, runs, given, workers).in_time == 1
    assert drawn(later) < len(later)


def test_a_run_that_missed_too_much_stops_and_goes_on_as_the_window_moves() -> None:
    given, workers = SERVICES["aggregated"]
    runs = KeptRuns()
    surge = [TracedRequest(15.0, 1000, 2)] * 12
    calm = [TracedRequest(float(second), 100, 2) for second in range(20, 200)]
    window = given_window([*surge, *calm[:150]], settled_s=150.0)
    trial = run(Search(given, window, 0.05, workers, LIMITS, runs), workers)
    assert (trial.is_kept, drawn(window)) == (False, 3)
    window = given_window(calm, settled_s=180.0, begin_s=20.0)
    assert run(Search(given, window, 0.05, workers, LIMITS, runs), workers).is_kept
    assert drawn(window) == len(window) - 1


def test_an_overloaded_run_begins_again_with_the_window() -> None:
    given, workers = SERVICES["aggregated"]
    runs = KeptRuns()
    crowd = [TracedRequest(number / 9, 300, 50) for number in range(900)]
    tried(given_window(crowd, settled_s=100.0), runs, given, workers)
    window = given_window(crowd[90:], settled_s=100.0, begin_s=10.0)
    trial = tried(window, runs, given, workers)
    assert drawn(window) == len(window)
    assert trial == tried(window, KeptRuns(), given, workers)


def test_a_window_of_other_evidence_is_simulated_anew() -> None:
    given, workers = SERVICES["aggregated"]
    runs = KeptRuns()
    tried(given_window(CROWD[:300], settled_s=80.0), runs, given, workers)
    window = [replace(each, identity="other") for each in given_window(CROWD[:300], settled_s=80.0)]
    tried(window, runs, given, workers)
    assert drawn(window) == len(window)


GIVEN = SERVICES["disaggregated"][0]
REQUESTS = [TracedRequest(0.0, 100, 100)]


def timed(prefill_factor: float, decode_factor: float, slow_factor: float = 1.0) -> ServiceSettings:
    """The disaggregated service; of steps of 100 requests and more the time is ``slow_factor`` times that."""

    def prefill_ms(tokens: int) -> float:
        return prefill_factor * tokens

    def decode_ms(decodes: int, kv_tokens: float) -> float:
        return decode_factor * (10.0 if decodes < 100 else 90.0 * slow_factor)

    timing = StepTiming(prefill_ms, decode_ms)
    return replace(GIVEN, engines={role: (settings, timing) for role, (settings, _) in GIVEN.engines.items()})


@pytest.mark.parametrize(
    ("other", "is_alike"),
    [
        (timed(1.02, 1.02), True),
        (timed(1.05, 1.0), False),
        (timed(1.0, 1.05), False),
        (timed(1.0, 1.0, slow_factor=1.5), True),  # both over the ITL
        (timed(1.0, 1.0, slow_factor=0.4), False),
        (replace(timed(1.0, 1.0), gpus=3), False),
        (SERVICES["aggregated"][0], False),
    ],
)
def test_only_models_with_clearly_other_times_of_what_is_served_begin_anew(
    other: ServiceSettings, is_alike: bool
) -> None:
    assert is_same(timed(1.0, 1.0), other, REQUESTS) is is_alike


def test_how_fast_prefill_workers_would_decode_does_not_matter() -> None:
    given = timed(1.0, 1.0)
    settings, slower = timed(1.0, 2.0).engines[Role.PREFILL]
    assert is_same(
        given, replace(given, engines={**given.engines, Role.PREFILL: (settings, slower)}), REQUESTS
    )
