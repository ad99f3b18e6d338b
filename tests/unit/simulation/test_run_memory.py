"""What a simulation holds in memory does not depend on the number of requests that have gone through it."""

import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import pytest

from dynaplan.config.planner import settings_of
from dynaplan.gateway.traced_requests import TracedRequest
from dynaplan.lab.simulate.options import SimulateOptions
from dynaplan.lab.simulate.planner_policy import PlannerPolicy
from dynaplan.lab.simulate.simulation import service_settings
from dynaplan.planner.sla_model import build_sla_model
from dynaplan.simulation.meter import TrafficMeter
from dynaplan.simulation.run import Policy, StaticPolicy, simulate
from dynaplan.simulation.traces.reading import read_requests
from tests.unit.simulation.services import workers

SECONDS = 60
RUNS = 3
FEW, MANY = 150, 1500
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
    "policy", [StaticPolicy, lambda: planned("load"), lambda: planned("sla")], ids=["static", "load", "sla"]
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

    live()
    tracemalloc.start()
    try:
        live()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert held < 50_000  # as many as have just been let go


def test_requests_over_the_targets_are_counted_as_frontends_count_them() -> None:
    meter = TrafficMeter(500.0, 20.0)
    for ttft_s, decoding_s, tokens in ((0.4, 0.5, 11), (0.6, 0.1, 11), (0.5, 0.2, 11), (0.4, 0.0, 1)):
        meter.first_token(ttft_s)
        meter.finished(TracedRequest(0.0, 100, tokens), decoding_s, 1.0)
    traffic = meter.traffic(30.0)
    assert traffic.over_ttft == ((500.0, 1.0),)
    assert traffic.over_itl == ((20.0, 1.0),)
