"""The oracle finds schedules that meet the SLO, and none that a static deployment beats."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from dynaplan.gateway.traced_requests import TracedRequest
from dynaplan.lab.simulate.oracle.lower_bound import why_no_lower_bound
from dynaplan.lab.simulate.oracle.oracle import Oracle, OracleOptions, find_oracle
from dynaplan.lab.simulate.oracle.schedule import SchedulePolicy
from dynaplan.lab.simulate.run import StaticPolicy, simulate
from dynaplan.simulation.service import ServiceSettings
from tests.unit.simulation.services import at_once, every, service, workers

STARTUP_S = 10.0
QUICK = OracleOptions(effort=2)


def step() -> list[TracedRequest]:
    """A request a second for 40 s, then eight a second: of 200 ms prefill each, hardly any decoding."""
    quiet = [TracedRequest(float(second), 200, 2) for second in range(40)]
    return quiet + [TracedRequest(40 + index / 8, 200, 2) for index in range(320)]


def settings(gpus: int = 6, startup_s: float = STARTUP_S) -> ServiceSettings:
    return service(is_disaggregated=True, gpus=gpus, startup_s=startup_s)


@cache
def of_step() -> Oracle:
    return find_oracle(step, settings(), QUICK)


def met(oracle: Oracle) -> tuple[float, float]:
    outcome = oracle.result.outcome
    return outcome.attainment(outcome.ttft_met), outcome.attainment(outcome.itl_met)


def test_it_meets_both_targets_for_as_many_requests_as_asked() -> None:
    oracle = of_step()
    assert oracle.verdict.is_slo_met
    assert min(met(oracle)) >= 0.95
    assert oracle.result.policy == "oracle"


def test_workers_are_started_a_start_before_the_load_comes() -> None:
    entries = of_step().schedule
    assert entries[0] == (0.0, workers(1, 1))
    assert 40 - STARTUP_S <= entries[1][0] <= 40 - STARTUP_S + 3  # in 3 s come more than may miss
    assert entries[1][1].prefill >= 2


def test_no_static_schedule_that_meets_the_slo_is_cheaper() -> None:
    oracle = of_step()
    for prefill in (1, 2, 3):
        outcome = simulate(step(), settings(), workers(prefill, 1), StaticPolicy())
        attained = outcome.outcome.attainment(outcome.outcome.ttft_met)
        assert attained < 0.95 or outcome.gpu_hours >= oracle.result.gpu_hours


def test_it_is_not_below_its_lower_bound() -> None:
    oracle = of_step()
    bound = oracle.verdict.lower_bound_gpu_hours
    assert bound is not None
    assert 0 < bound <= oracle.result.gpu_hours


@pytest.mark.parametrize("change", [{"is_conditional": True}, {"max_prefill_queue_size": 2}])
def test_a_service_whose_decode_workers_compute_prompts_has_no_lower_bound(change: dict[str, Any]) -> None:
    here = settings()
    here = replace(here, disaggregation=replace(here.disaggregation, **change))
    verdict = find_oracle(step, here, OracleOptions(effort=1)).verdict
    assert verdict.lower_bound_gpu_hours is None
    assert "decode workers compute" in verdict.no_lower_bound


def test_prompts_that_give_up_before_they_are_late_have_no_lower_bound_either() -> None:
    promised_s = settings().slo.ttft_ms / 1000
    assert why_no_lower_bound(replace(settings(), prefill_wait_s=promised_s)) == ""
    assert "decode workers compute" in why_no_lower_bound(replace(settings(), prefill_wait_s=promised_s / 2))


def test_its_schedule_gives_its_result_again() -> None:
    oracle = of_step()
    policy = SchedulePolicy("again", oracle.schedule)
    again = simulate(step(), settings(), oracle.schedule[0][1], policy)
    assert again.gpu_hours == oracle.result.gpu_hours
    assert again.outcome.ttft_met == oracle.result.outcome.ttft_met


def test_the_same_trace_has_the_same_oracle() -> None:
    again = find_oracle(step, settings(), QUICK)
    assert again.schedule == of_step().schedule
    assert again.simulations == of_step().simulations


def test_a_lower_percentile_costs_no_more() -> None:
    lenient = find_oracle(step, settings(), OracleOptions(percentile=80, effort=2))
    assert lenient.verdict.is_slo_met
    assert lenient.result.gpu_hours <= of_step().result.gpu_hours


def test_aggregated_workers_are_scheduled_too() -> None:
    oracle = find_oracle(step, service(startup_s=STARTUP_S, gpus=6), QUICK)
    assert oracle.verdict.is_slo_met
    assert all(wanted.prefill == 0 for _, wanted in oracle.schedule)
    assert oracle.schedule[0][1].decode < oracle.schedule[-1][1].decode + 1


def test_what_no_number_of_workers_can_serve_is_told_and_as_little_missed_as_found() -> None:
    def flood() -> list[TracedRequest]:
        return every(0.02, 200, prompt_tokens=400, output_tokens=2)

    oracle = find_oracle(flood, settings(gpus=3), QUICK)
    assert not oracle.verdict.is_slo_met
    best = simulate(flood(), settings(gpus=3), workers(2, 1), StaticPolicy())
    assert oracle.result.outcome.ttft_met >= best.outcome.ttft_met


def test_it_simulates_no_more_than_its_effort_and_the_last_static_ones() -> None:
    assert of_step().simulations <= QUICK.effort + 4


@pytest.mark.parametrize("trace", [[], [TracedRequest(0.0, 100, 5)], at_once([(0, 5), (100, 11)])])
def test_next_to_nothing_needs_the_minimum(trace: list[TracedRequest]) -> None:
    oracle = find_oracle(lambda: trace, settings(), QUICK)
    assert [wanted for _, wanted in oracle.schedule] == [workers(1, 1)]


def test_the_gpu_budget_is_never_exceeded() -> None:
    oracle = find_oracle(step, settings(gpus=3), QUICK)
    assert all(wanted.prefill + wanted.decode <= 3 for _, wanted in oracle.schedule)
