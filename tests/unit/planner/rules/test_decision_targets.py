"""The policies ``sla`` and ``both`` inside ``decide``."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from dynaplan.contract.counts import PoolSizes, WorkerCounts
from dynaplan.contract.holds import Hold, RoleHolds
from dynaplan.contract.store_keys import DesiredCounts
from dynaplan.planner.model import LOAD_BELOW, BacktestResult, DecisionRecord, Observation, PlannerState
from dynaplan.planner.recorders.gauges import values_of
from dynaplan.planner.rules.decision import decide
from dynaplan.planner.rules.explain import explain
from tests.unit.planner.rules.situations import interval
from tests.unit.planner.rules.targets import SETTINGS, foreseen, model, planned_interval, traffic

BOTH = replace(SETTINGS, policy="both")
MODEL = model()


def desired(observation, settings=SETTINGS, state=None) -> PoolSizes:
    return decide(settings, state or PlannerState(), observation, MODEL)[1].desired


def test_more_traffic_gets_more_workers_in_one_jump():
    few = desired(planned_interval(1, 1, [2.0]))
    many = desired(planned_interval(1, 1, [40.0]))
    assert few == PoolSizes(1, 1)
    assert many.prefill > few.prefill + 1


def test_the_coming_traffic_counts_not_only_that_of_now():
    assert desired(planned_interval(1, 1, [2.0, 20.0, 40.0])) == desired(planned_interval(1, 1, [40.0]))


def test_while_a_decision_is_carried_out_targets_are_planned_for_all_the_same():
    seen = replace(planned_interval(1, 1, [40.0]), desired=DesiredCounts(2, 1, 5, 4))
    assert desired(seen).prefill > 2


def test_with_environment_virtual_targets_wait_for_the_acknowledgement_or_its_timeout():
    virtual = replace(SETTINGS, environment="virtual")
    seen = replace(planned_interval(1, 1, [40.0]), desired=DesiredCounts(2, 1, 5, 4))
    state, decision = decide(virtual, PlannerState(), seen, MODEL)
    assert decision.desired == PoolSizes(2, 1)
    assert "decision 5 is still being carried out" in decision.reason
    late = replace(seen, at_s=seen.at_s + virtual.scaling_timeout_s)
    assert decide(virtual, state, late, MODEL)[1].desired.prefill > 2
    acknowledged = replace(seen, desired=DesiredCounts(2, 1, 5, 5))
    assert decide(virtual, state, acknowledged, MODEL)[1].desired.prefill > 2


def test_what_starts_already_is_not_asked_for_again():
    wanted = desired(planned_interval(1, 1, [40.0]))
    seen = planned_interval(1, 1, [40.0])
    starting = replace(
        seen,
        desired=DesiredCounts(wanted.prefill, wanted.decode, 5, 4),
        fleet=replace(seen.fleet, prefill=WorkerCounts(ready=1, starting=wanted.prefill - 1, gpus=1)),
    )
    assert desired(starting) == wanted


def asleep(observation, prefill: int, decode: int):
    """The interval with that many of its workers asleep."""
    fleet = observation.fleet
    return replace(
        observation,
        fleet=replace(
            fleet,
            prefill=replace(fleet.prefill, ready=fleet.prefill.ready - prefill, asleep=prefill),
            decode=replace(fleet.decode, ready=fleet.decode.ready - decode, asleep=decode),
        ),
    )


def test_sleeping_workers_are_no_capacity_and_stay_beside_the_needed_ones():
    wanted = desired(planned_interval(1, 1, [40.0]))
    seen = asleep(planned_interval(wanted.prefill, wanted.decode + 1, [40.0]), 1, 1)
    seen = replace(seen, backtest=BacktestResult(wanted, is_new=True))
    _, decision = decide(SETTINGS, PlannerState(), seen, MODEL)
    assert decision.desired == PoolSizes(wanted.prefill + 1, wanted.decode + 1)
    first, last = decision.steps[1], next(step for step in decision.steps if step.stage == "asleep")
    assert first.after == PoolSizes(wanted.prefill - 1, wanted.decode)
    assert last.before == wanted
    assert "`dynaplan wake`" in last.why
    assert [step.before for step in decision.steps[1:]] == [step.after for step in decision.steps[:-1]]


def test_an_interval_that_needs_few_removes_nobody_who_sleeps():
    seen = asleep(planned_interval(2, 3, [2.0]), 1, 2)
    assert desired(seen) == PoolSizes(2, 3)


def test_where_all_of_a_role_sleep_one_of_them_counts_for_the_next_request_wakes_it():
    assert desired(asleep(planned_interval(1, 1, [2.0]), 1, 1)) == PoolSizes(1, 1)


@pytest.mark.parametrize("rate", [None])
def test_no_data_changes_nothing(rate):
    seen = replace(planned_interval(3, 2, [5.0]), traffic=traffic(rate), foresight=foreseen([]))
    _, decision = decide(SETTINGS, PlannerState(), seen, MODEL)
    assert decision.desired == PoolSizes(3, 2)
    assert "no frontend answered" in decision.reason


def test_an_interval_without_data_changes_nothing_although_a_forecast_goes_on():
    seen = replace(planned_interval(1, 1, [40.0]), traffic=traffic(None))
    _, decision = decide(SETTINGS, PlannerState(), seen, MODEL)
    assert decision.desired == PoolSizes(1, 1)
    assert "no frontend answered" in decision.reason


def test_no_requests_need_the_minimums_only():
    ended = BacktestResult(PoolSizes(3, 2), change=LOAD_BELOW)
    assert desired(replace(planned_interval(3, 2, [0.0]), backtest=ended)) == PoolSizes(1, 1)


@pytest.mark.parametrize("policy", ["load", "sla", "both"])
def test_without_a_decode_worker_there_is_the_minimum_as_far_as_gpus_and_holds_go(policy: str):
    """After ``scale decode=0`` and ``release`` nobody answers, and nothing is ever measured."""
    settings = replace(SETTINGS, policy=policy)
    seen = replace(planned_interval(1, 0, [0.0]), traffic=traffic(None), foresight=foreseen([]))
    seen = replace(seen, load=interval(1, 0, kv=None).load)

    def asked(observation: Observation, **options: Any) -> PoolSizes:
        return decide(replace(settings, **options), PlannerState(), observation, MODEL)[1].desired

    assert asked(seen) == PoolSizes(1, 1)
    assert asked(seen, max_gpu_budget=1) == PoolSizes(1, 0)
    assert asked(replace(seen, holds=RoleHolds(decode=Hold(0, 0)))) == PoolSizes(1, 0)
    served = replace(seen.fleet, decode=WorkerCounts(unmanaged=1, gpus=1))
    assert asked(replace(seen, fleet=served)) == PoolSizes(1, 0)


def test_an_unknown_fleet_changes_nothing():
    seen = replace(planned_interval(3, 2, [40.0]), unknown="the store is away")
    _, decision = decide(SETTINGS, PlannerState(), seen, MODEL)
    assert not decision.is_change
    assert "the store is away" in decision.reason


def test_the_budget_holds_whatever_the_traffic():
    wanted = desired(planned_interval(1, 1, [1000.0]))
    assert wanted.prefill + wanted.decode == SETTINGS.max_gpu_budget


def test_gpus_of_workers_that_leave_are_not_to_be_had():
    seen = planned_interval(1, 1, [1000.0])
    leaving = replace(seen, fleet=replace(seen.fleet, decode=WorkerCounts(ready=1, draining=2, gpus=1)))
    wanted = desired(leaving)
    assert wanted.prefill + wanted.decode == SETTINGS.max_gpu_budget - 2


def test_a_role_of_which_several_failed_gets_no_more_workers():
    seen = planned_interval(1, 1, [40.0])
    failing = replace(seen, fleet=replace(seen.fleet, prefill=WorkerCounts(ready=1, failed=2, gpus=1)))
    _, decision = decide(SETTINGS, PlannerState(), failing, MODEL)
    assert decision.desired.prefill == 1
    assert "failed" in decision.reason or any("failed" in step.why for step in decision.steps)


def test_an_aggregated_deployment_stays_one():
    seen = planned_interval(0, 1, [30.0])
    wanted = desired(seen)
    assert wanted.prefill == 0
    assert wanted.decode > 1


def test_both_keeps_what_thresholds_added_above_the_floor():
    wanted = desired(planned_interval(2, 3, [2.0], kv=0.7, queue=(0.6,)), BOTH)
    assert wanted == PoolSizes(2, 3)


def test_both_goes_no_lower_than_the_targets_need():
    floor = desired(planned_interval(1, 1, [40.0]))
    idle_looking = planned_interval(floor.prefill, floor.decode, [40.0], kv=0.0, queue=(0.0,))
    _, decision = decide(BOTH, PlannerState(), idle_looking, MODEL)
    assert decision.desired.prefill == floor.prefill
    assert any("the targets need" in step.why for step in decision.steps)


def test_both_adds_a_worker_when_a_threshold_is_passed():
    assert desired(planned_interval(1, 1, [2.0], kv=0.95, queue=(0.0,)), BOTH).decode == 2


def test_the_record_reads_back_and_is_told_in_words():
    seen = planned_interval(1, 1, [40.0])
    state, decision = decide(SETTINGS, PlannerState(), seen, MODEL)
    record = DecisionRecord("2026-01-01T12:00:00+00:00", SETTINGS, PlannerState(), seen, decision, state)
    document = json.loads(json.dumps(record.to_json()))
    assert DecisionRecord.from_json(document) == record
    told = explain(document)
    assert "40 requests/s, ISL 3000, OSL 150" in told
    assert "40 requests/s expected in 10 s (told by the test)" in told


def test_the_curves_have_the_names_of_dynamos_planner():
    seen = planned_interval(1, 1, [2.0])
    state, decision = decide(SETTINGS, PlannerState(), seen, MODEL)
    curves = values_of(DecisionRecord("", SETTINGS, PlannerState(), seen, decision, state))
    assert curves["observed_requests_per_second"] == 2.0
    assert curves["observed_request_duration_seconds"] == 1.6
    assert curves["predicted_requests_per_second"] == 2.0
    assert curves["predicted_num_prefill_replicas"] == 1
    assert 0 < curves["estimated_ttft_ms"] < SETTINGS.ttft_ms
