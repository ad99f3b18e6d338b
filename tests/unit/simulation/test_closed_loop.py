"""Clients in virtual time: each waits for its answer before it asks again."""

from __future__ import annotations

from dynaplan.fleet.counts import Targets
from dynaplan.gateway.traced_requests import TracedRequest
from dynaplan.lab.simulate.options import SimulateOptions
from dynaplan.lab.simulate.simulation import run_load, service_settings
from dynaplan.simulation.run import ClosedLoop, StaticPolicy, simulate

OPTIONS = SimulateOptions("", policies=("static:1",), is_disaggregated=False, startup_time_s=0.0)


def test_as_many_requests_are_open_as_there_are_clients() -> None:
    result = ClosedLoop(3, 1000, 50, 20.0).run(service_settings(OPTIONS), Targets(0, 1), StaticPolicy())
    assert {moment.in_service for moment in result.moments if 0 < moment.at_s < 20} == {3}
    assert result.outcome.lost == 0


def test_one_client_meets_what_single_requests_of_a_trace_meet() -> None:
    settings = service_settings(OPTIONS)
    alone = simulate([TracedRequest(0.0, 1000, 50)], settings, Targets(0, 1), StaticPolicy()).outcome
    (result,) = run_load(OPTIONS, ClosedLoop(1, 1000, 50, 10.0))
    both = [result.outcome, alone]
    assert len({round(each.ttft_ms.percentile(50), 3) for each in both}) == 1
    lasts_s = alone.duration_s.highest
    assert 10 / (lasts_s + 0.02) - 1 <= result.outcome.requests <= 10 / lasts_s + 1


def test_requests_that_no_engine_can_serve_are_lost_and_asked_again() -> None:
    (result,) = run_load(OPTIONS, ClosedLoop(1, 10_000_000, 50, 0.1))
    assert (result.outcome.requests, result.outcome.lost) == (0, 10)
