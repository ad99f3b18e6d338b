"""From what is forecast to the workers that are asked for: bounds, corrections, unmanaged workers.

Workers that nobody manages take their part: a planner for targets asks for so many fewer of its own.


"""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynaplan.contract.counts import FleetCounts, PoolSizes, WorkerCounts
from dynaplan.contract.traffic import Lengths, Traffic
from dynaplan.planner.model import (
    BacktestResult,
    Corrections,
    Expected,
    Observation,
    PlannerState,
    Sizing,
    TrafficForecast,
    WorkerLimits,
)
from dynaplan.planner.rules.sla_policy import (
    limits_of,
    limits_with_unmanaged,
    size_for_slo,
    subtract_unmanaged,
    unmanaged_workers,
)
from dynaplan.planner.sizing.demand_forecast import demand_of
from tests.unit.planner.rules.targets import SETTINGS, model, planned_interval, traffic
from tests.unit.planner.sizing.decisions import (
    MANY,
    MODEL,
    ONE_EACH,
    decided,
    seen,
    why,
)


@pytest.mark.parametrize(("came", "sized_for"), [(19.0, 20.0), (20.5, 20.5)])
def test_a_load_above_its_forecast_is_a_demand_before_forecasts_follow(came: float, sized_for: float) -> None:
    forecast = seen(ONE_EACH, [20.0])
    surprised = decided(replace(forecast, traffic=traffic(came)), ONE_EACH)[1]
    assert surprised.prediction == decided(seen(ONE_EACH, [sized_for]), ONE_EACH)[1].prediction


# -- what bounds it ------------------------------------------------------------------------------------------


def test_a_role_of_which_several_failed_gets_nobody_more_and_the_other_one_does() -> None:
    observation = seen(ONE_EACH, [60.0])
    failing = WorkerCounts(ready=1, failed=2, gpus=1)
    sizing = decided(replace(observation, fleet=replace(observation.fleet, prefill=failing)), ONE_EACH)[1]
    assert sizing.workers.prefill == 1
    assert sizing.workers.decode > 1
    assert sizing.prediction is None
    assert why(sizing, "failures")


@pytest.mark.parametrize(
    ("fleet", "current", "most"),
    [
        (FleetCounts(), ONE_EACH, 8),
        (FleetCounts(gpus_total=4), ONE_EACH, 4),
        (FleetCounts(gpus_total=100), ONE_EACH, 8),
        (FleetCounts(decode=WorkerCounts(ready=1, draining=2, gpus=1)), ONE_EACH, 6),
        (FleetCounts(decode=WorkerCounts(ready=4, gpus=1)), ONE_EACH, 5),
        (FleetCounts(decode=WorkerCounts(ready=3, draining=7, gpus=1)), PoolSizes(1, 3), 4),
        (FleetCounts(gpus_total=2), PoolSizes(3, 3), 2),
    ],
    ids=["budget", "box", "large box", "leaving", "nobody asked for", "asked for already", "small box"],
)
def test_gpus_that_others_hold_are_not_to_be_had_and_those_that_were_asked_for_are(
    fleet: FleetCounts, current: PoolSizes, most: int
) -> None:
    assert limits_of(SETTINGS, Observation(0.0, fleet), current).max_gpus == most


def test_an_aggregated_deployment_has_no_minimum_of_prefill_workers() -> None:
    settings = replace(SETTINGS, min_gpu_budget=2)
    observation = Observation(0.0, FleetCounts(decode=WorkerCounts(ready=1, gpus=1)))
    assert limits_of(settings, observation, PoolSizes(0, 1)).least == PoolSizes(0, 2)
    assert limits_of(settings, observation, ONE_EACH).least == PoolSizes(2, 2)


# -- what is believed ----------------------------------------------------------------------------------------


def test_slow_engines_get_more_workers() -> None:
    slow = PlannerState(corrections=Corrections(2.0, 1.0))
    observation = seen(ONE_EACH, [14.0])
    assert decided(observation, ONE_EACH)[1].workers == ONE_EACH
    assert decided(observation, ONE_EACH, slow)[1].workers.prefill > 1


def test_the_factors_are_those_of_the_last_backtest_and_stay_until_there_is_one() -> None:
    state = PlannerState(corrections=Corrections(1.3, 0.9))
    before = seen(ONE_EACH, [10.0])
    refitted = replace(before, backtest=BacktestResult(ONE_EACH, corrections=Corrections(1.5, 1.2)))
    assert decided(before, ONE_EACH, state)[0].corrections == state.corrections
    assert decided(refitted, ONE_EACH, state)[0].corrections == Corrections(1.5, 1.2)


def test_requests_are_as_long_as_recent_ones_but_for_the_mean_that_is_expected() -> None:
    recent = Lengths((100.0, 200.0), (1.0, 1.0, 0.0), 100.0)
    foresight = TrafficForecast(10.0, isl=recent, osl=recent, dispersion=2.5)
    demand = demand_of(SETTINGS, foresight, Expected(50.0, isl_tokens=150.0, osl_tokens=None))
    assert (demand.requests_per_s, demand.burstiness) == (5.0, 2.5)
    assert demand.isl == Lengths((150.0, 300.0), (1.0, 1.0, 0.0), 150.0)
    assert demand.osl == recent


def test_no_mean_is_expected_to_be_more_than_twice_or_less_than_half_the_recent_one() -> None:
    recent = Lengths.fixed(100.0)
    foresight = TrafficForecast(10.0, isl=recent, osl=recent)
    demand = demand_of(SETTINGS, foresight, Expected(50.0, isl_tokens=1000.0, osl_tokens=1.0))
    assert (demand.isl.mean_tokens, demand.osl.mean_tokens) == (200.0, 50.0)


def test_until_requests_were_seen_they_are_as_long_as_the_options_say() -> None:
    demand = demand_of(SETTINGS, TrafficForecast(10.0), Expected(50.0))
    assert demand.isl == Lengths.fixed(SETTINGS.isl_tokens)
    assert demand.osl == Lengths.fixed(SETTINGS.osl_tokens)
    assert demand_of(SETTINGS, TrafficForecast(10.0), Expected(50.0, 700.0, 70.0)).isl == Lengths.fixed(700.0)
    assert demand.burstiness == 1.0


def test_arrivals_are_never_more_even_than_those_of_independent_clients() -> None:
    assert demand_of(SETTINGS, TrafficForecast(10.0, dispersion=0.2), Expected(50.0)).burstiness == 1.0


def test_an_interval_that_was_not_foretold_needs_nobody_to_be_removed() -> None:
    unknown = TrafficForecast(10.0, (Expected(None, 100.0, 100.0),))
    observation = replace(seen(MANY, [2.0]), foresight=unknown, traffic=Traffic(10.0))
    assert decided(observation, MANY)[1].workers == MANY


# -- what is left to compute ----------------------------------------------------------------------------


def test_prefill_workers_are_sized_for_what_caches_leave_to_compute() -> None:
    observation = seen(ONE_EACH, [20.0], startup_s=0.0)
    assert observation.foresight is not None
    cached = replace(observation, foresight=replace(observation.foresight, prefix_hit_rate=0.8))
    needed = decided(observation, ONE_EACH)[1].workers.prefill
    assert decided(cached, ONE_EACH)[1].workers.prefill < needed


def test_no_measured_hits_leave_everything_to_compute() -> None:
    unknown = TrafficForecast(10.0, (Expected(20.0),))
    assert demand_of(SETTINGS, unknown, Expected(20.0)).prefix_hit_rate == 0.0
    known = replace(unknown, prefix_hit_rate=0.7)
    assert demand_of(SETTINGS, known, Expected(20.0)).prefix_hit_rate == 0.7


def test_every_decision_by_an_estimated_profile_says_that_it_is_one() -> None:
    words = "estimated, not measured: by aiconfigurator"
    model = replace(MODEL, profile_note=words)
    sizing = size_for_slo(model, SETTINGS, PlannerState(), seen(ONE_EACH, [2.0]), ONE_EACH)[1]
    assert why(sizing, "profile") == words
    assert why(decided(seen(ONE_EACH, [2.0]), ONE_EACH)[1], "profile") == ""


def beside(observation: Observation, prefill: int = 0, decode: int = 0) -> Observation:
    fleet = observation.fleet
    return replace(
        observation,
        fleet=replace(
            fleet,
            prefill=replace(fleet.prefill, unmanaged=prefill),
            decode=replace(fleet.decode, unmanaged=decode),
        ),
    )


@pytest.mark.parametrize("requests_per_s", [20.0, 60.0])
def test_what_unmanaged_workers_do_nobody_else_is_asked_for(requests_per_s: float) -> None:
    """The same workers in all, whether one of each is managed or not."""
    alone = decided(seen(PoolSizes(3, 3), [requests_per_s]), PoolSizes(3, 3))[1]
    shared = decided(beside(seen(PoolSizes(2, 2), [requests_per_s]), 1, 1), PoolSizes(2, 2))[1]
    assert shared.workers == PoolSizes(max(1, alone.workers.prefill - 1), max(1, alone.workers.decode - 1))
    assert shared.steps[-1].stage == "unmanaged"
    assert why(shared, "unmanaged").startswith("unmanaged workers serve too (prefill 1, decode 1): ")
    assert shared.steps[-1].after == shared.workers


def test_one_of_ones_own_stays_whatever_others_do() -> None:
    assert decided(beside(seen(ONE_EACH, [0.1]), 9, 9), ONE_EACH)[1].workers == ONE_EACH


def test_without_data_the_counts_stay_those_of_the_managed_ones() -> None:
    unknown = replace(beside(seen(MANY, [2.0]), 1, 1), foresight=None)
    assert decided(unknown, MANY)[1].workers == MANY


def test_an_unmanaged_prefill_worker_makes_no_pool() -> None:
    fleet = FleetCounts(WorkerCounts(unmanaged=2), WorkerCounts(unmanaged=1))
    assert unmanaged_workers(fleet, PoolSizes(0, 3)) == PoolSizes(0, 1)
    assert unmanaged_workers(fleet, PoolSizes(1, 3)) == PoolSizes(2, 1)


def test_limits_are_of_the_managed_ones_alone() -> None:
    limits = WorkerLimits(8, 1, 2, PoolSizes(1, 1), PoolSizes(4, 4))
    assert limits_with_unmanaged(limits, PoolSizes()) is limits
    expected = WorkerLimits(13, 1, 2, PoolSizes(2, 3), PoolSizes(5, 6))
    assert limits_with_unmanaged(limits, PoolSizes(1, 2)) == expected
    sizing = Sizing(PoolSizes(1, 1))
    assert subtract_unmanaged(sizing, PoolSizes()) is sizing
    assert subtract_unmanaged(sizing, PoolSizes(3, 0)).workers == PoolSizes(0, 1)


BY_FORMULA = replace(SETTINGS, sizing="formula", no_correction=False)


def plan(observation: Observation) -> tuple[PlannerState, str]:
    """The next state, and the trail as text."""
    sla_model = model(BY_FORMULA)
    state, sizing = size_for_slo(sla_model, BY_FORMULA, PlannerState(), observation, PoolSizes(1, 1))
    return state, "\n".join(f"{step.stage}: {step.why}" for step in sizing.steps)


def test_the_formulas_size_and_correct_where_they_are_chosen() -> None:
    state, story = plan(planned_interval(1, 1, [5.0]))
    assert "prompt tokens/s" in story
    assert "measured over expected" in story
    assert state.corrections != PlannerState().corrections


def test_a_forecast_of_unknown_traffic_sizes_for_what_there_is() -> None:
    observation = planned_interval(1, 1, [5.0])
    foresight = replace(observation.foresight, expected=(Expected(None, why="no data"),))
    observation = replace(observation, foresight=foresight)
    _, sizing = size_for_slo(model(), SETTINGS, PlannerState(), observation, PoolSizes(1, 1))
    assert sizing.workers == PoolSizes(1, 1)
