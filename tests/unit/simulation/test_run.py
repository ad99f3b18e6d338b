"""Clients in virtual time: each waits for its answer before it asks again.

What a simulation holds in memory does not depend on the number of requests that have gone through it.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import pytest

from dynaplan.config.planner import settings_of
from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.lab.simulate.options import SimulateOptions
from dynaplan.lab.simulate.planner_policy import PlannerPolicy
from dynaplan.lab.simulate.policy_runs import run_load, service_settings
from dynaplan.planner.sla_model import build_sla_model
from dynaplan.simulation.meter import TrafficMeter
from dynaplan.simulation.run import ClosedLoop, Policy, StaticPolicy, simulate
from dynaplan.simulation.traces.reading import read_requests
from tests.unit.simulation.services import workers

OPTIONS = SimulateOptions("", policies=("static:1",), is_disaggregated=False, startup_time_s=0.0)


def test_as_many_requests_are_open_as_there_are_clients() -> None:
    result = ClosedLoop(3, 1000, 50, 20.0).run(service_settings(OPTIONS), PoolSizes(0, 1), StaticPolicy())
    assert {moment.in_service for moment in result.moments if 0 < moment.at_s < 20} == {3}
    assert result.outcome.lost == 0


def test_one_client_meets_what_single_requests_of_a_trace_meet() -> None:
    settings = service_settings(OPTIONS)
    alone = simulate([TracedRequest(0.0, 1000, 50)], settings, PoolSizes(0, 1), StaticPolicy()).outcome
    (result,) = run_load(OPTIONS, ClosedLoop(1, 1000, 50, 10.0))
    both = [result.outcome, alone]
    assert len({round(each.ttft_ms.percentile(50), 3) for each in both}) == 1
    lasts_s = alone.total_duration_s
    assert 10 / (lasts_s + 0.02) - 1 <= result.outcome.requests <= 10 / lasts_s + 1


def test_requests_that_no_engine_can_serve_are_lost_and_asked_again() -> None:
    (result,) = run_load(OPTIONS, ClosedLoop(1, 10_000_000, 50, 0.1))
    assert (result.outcome.requests, result.outcome.lost) == (0, 10)


SECONDS = 60
RUNS = 3
FEW, MANY = 300, 3000
BYTES_PER_REQUEST = 16
"""Less than one number costs that is remembered of a request."""


def planned(policy: str) -> PlannerPolicy:
    planner = settings_of(
        {"policy": policy, "adjustment-interval": 20, "profile-results-dir": "h200-fp8-fit"}
    )
    model = build_sla_model(planner, {}, "round-robin") if planner.is_by_targets else None
    return PlannerPolicy(policy, planner, model)


def peak_bytes(policy: Callable[[], Policy], requests: int) -> int:
    """The most that a simulation of so many requests, within the same time, has held at once.

    The least of several runs: other threads, as that of pytest-xdist, allocate when they like.
    """
    return min(one_peak_bytes(policy(), requests) for _ in range(RUNS))


def one_peak_bytes(policy: Policy, requests: int) -> int:
    settings = replace(service_settings(SimulateOptions("")), gpus=4)
    load = f"constant:rate={requests / SECONDS},duration={SECONDS},isl=20,osl=2,noise=0"
    trace = read_requests(load, 1.0, 1)
    tracemalloc.start()
    try:
        result = simulate(trace, settings, workers(1, 1), policy)
        assert result.outcome.requests == requests
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(StaticPolicy, marks=pytest.mark.slow),
        pytest.param(lambda: planned("load"), marks=pytest.mark.slow),
        lambda: planned("sla"),
    ],
    ids=["static", "load", "sla"],
)
def test_ten_times_the_requests_need_no_more_memory(policy: Callable[[], Policy]) -> None:
    few, many = peak_bytes(policy, FEW), peak_bytes(policy, MANY)

    assert many - few < BYTES_PER_REQUEST * (MANY - FEW)


def test_traffic_that_nobody_asks_for_is_not_piled_up() -> None:
    meter = TrafficMeter(500.0, 50.0)

    def live() -> None:
        for _ in range(5000):
            meter.arrived()
            meter.first_token(0.1)
            meter.pull()

    def held_bytes() -> int:
        tracemalloc.start()
        try:
            live()
            return tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()

    live()
    # As much as has just been let go; the least of several runs, as in `peak_bytes`.
    assert min(held_bytes() for _ in range(RUNS)) < 50_000


def test_requests_over_the_targets_are_counted_as_frontends_count_them() -> None:
    meter = TrafficMeter(500.0, 20.0)
    for ttft_s, decoding_s, tokens in ((0.4, 0.5, 11), (0.6, 0.1, 11), (0.5, 0.2, 11), (0.4, 0.0, 1)):
        meter.first_token(ttft_s)
        meter.finished(TracedRequest(0.0, 100, tokens), decoding_s, 1.0)
    traffic = meter.traffic(30.0)
    assert traffic.over_ttft == ((500.0, 1.0),)
    assert traffic.over_itl == ((20.0, 1.0),)
