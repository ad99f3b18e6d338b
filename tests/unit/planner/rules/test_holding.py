"""Holds in a decision: the last step, after every policy."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.fleet.counts import Targets
from dynaplan.fleet.holds import Hold, RoleHolds
from dynaplan.planner.model import Decision, DecisionRecord, Observation, PlannerState
from dynaplan.planner.rules.decision import decide
from dynaplan.planner.rules.explain import explain
from tests.unit.planner.rules import targets
from tests.unit.planner.rules.situations import interval, story

SETTINGS = PlannerSettings()
QUIET, BUSY = 0.0, 1.5
BY_ALICE = Hold(2, 2, by="alice", until_s=1795356000.0, until="2026-11-22 14:00 UTC")


def decided(
    observation: Observation, holds: RoleHolds, settings: PlannerSettings = SETTINGS
) -> tuple[Targets, Decision]:
    model = targets.model() if settings.is_by_targets else None
    _, decision = decide(settings, PlannerState(), replace(observation, holds=holds), model)
    return decision.desired, decision


def test_without_a_hold_the_trail_has_no_step_of_it() -> None:
    _, decision = decided(interval(1, 2, kv=QUIET), RoleHolds())
    assert "held" not in [step.stage for step in decision.steps]
    assert decision.desired == Targets(1, 1)


def test_a_held_number_is_kept_and_the_trail_says_by_whom_and_until_when() -> None:
    desired, decision = decided(interval(1, 2, kv=QUIET), RoleHolds(decode=BY_ALICE))
    assert desired == Targets(1, 2)
    assert not decision.is_change
    why = "decode is held at 2 by alice until 2026-11-22 14:00 UTC, instead of 1"
    assert decision.steps[-1].why == why
    assert why in decision.reason


def test_a_hold_that_changes_nothing_is_said_too() -> None:
    desired, decision = decided(interval(1, 2), RoleHolds(decode=BY_ALICE))
    assert desired == Targets(1, 2)
    assert decision.steps[-1].why == "decode is held at 2 by alice until 2026-11-22 14:00 UTC"


def test_a_worker_beyond_an_upper_bound_is_not_added() -> None:
    desired, decision = decided(interval(1, 2, kv=BUSY), RoleHolds(decode=Hold(at_most=2)))
    assert desired == Targets(1, 2)
    assert "held at 2 or fewer until `dynaplan release`, instead of 3" in story(decision)


def test_within_the_bounds_the_planner_scales() -> None:
    holds = RoleHolds(decode=Hold(1, 4))
    assert decided(interval(1, 2, kv=BUSY), holds)[0] == Targets(1, 3)
    assert decided(interval(1, 2, kv=QUIET), holds)[0] == Targets(1, 1)


def test_numbers_that_somebody_else_moved_outside_come_back_at_once() -> None:
    assert decided(interval(1, 1), RoleHolds(decode=Hold(4)))[0] == Targets(1, 4)
    assert decided(interval(1, 6), RoleHolds(decode=Hold(2, 3)))[0] == Targets(1, 3)


def test_a_hold_takes_room_in_the_budget_from_the_other_role() -> None:
    settings = replace(SETTINGS, max_gpu_budget=3)
    busy_queue = interval(1, 2, kv=QUIET, queue=(9.0, 9.0))
    assert decided(busy_queue, RoleHolds(), settings)[0] == Targets(2, 1)
    desired, decision = decided(busy_queue, RoleHolds(decode=Hold(2)), settings)
    assert desired == Targets(1, 2)
    assert "the GPU budget then has room for prefill 1, instead of 2" in story(decision)


def test_a_hold_above_the_budget_is_kept() -> None:
    settings = replace(SETTINGS, max_gpu_budget=3)
    assert decided(interval(2, 3), RoleHolds(decode=Hold(5, 5)), settings)[0] == Targets(1, 5)


def test_minimums_give_way_to_a_hold() -> None:
    settings = replace(SETTINGS, min_endpoint=2)
    assert decided(interval(2, 2), RoleHolds(decode=Hold(at_most=1)), settings)[0] == Targets(2, 1)
    assert decided(interval(2, 2), RoleHolds(decode=Hold(at_most=0)), settings)[0] == Targets(2, 0)


def test_an_aggregated_deployment_is_not_asked_for_prefill_workers_by_a_hold() -> None:
    _, decision = decided(interval(0, 2), RoleHolds(prefill=Hold(2)))
    assert decision.desired == Targets(0, 2)
    assert "held" not in [step.stage for step in decision.steps]


@pytest.mark.parametrize("policy", ["sla", "both"])
def test_targets_are_held_too(policy: str) -> None:
    settings = replace(targets.SETTINGS, policy=policy, max_gpu_budget=16)
    rising = targets.planned_interval(1, 1, [40.0])
    free = decided(rising, RoleHolds(), settings)[0]
    held, decision = decided(rising, RoleHolds(prefill=Hold(free.prefill + 2)), settings)
    assert free.prefill > 1
    assert held == Targets(free.prefill + 2, free.decode)
    assert decision.prediction is None
    assert decided(rising, RoleHolds(prefill=Hold(1, 1)), settings)[0] == Targets(1, free.decode)


@pytest.mark.parametrize("policy", ["sla", "both"])
def test_the_gpus_that_a_bounded_role_may_not_use_are_the_other_roles(policy: str) -> None:
    """More is wanted of both than the budget has; with fewer decode workers all prefill workers fit."""
    settings = replace(targets.SETTINGS, policy=policy, max_gpu_budget=8)
    rising = targets.planned_interval(1, 1, [200.0])
    free = decided(rising, RoleHolds(), settings)[0]
    assert free.prefill + free.decode == 8
    held, decision = decided(rising, RoleHolds(decode=Hold(at_most=1)), settings)
    assert held.decode == 1
    assert held.prefill > free.prefill
    assert "held to" in story(decision)


def test_workers_beyond_an_upper_bound_do_not_stay_for_the_time_of_a_scale_down() -> None:
    settings = replace(targets.SETTINGS, max_gpu_budget=8)
    now = targets.planned_interval(2, 4, [200.0])
    held, _ = decided(now, RoleHolds(decode=Hold(at_most=1)), settings)
    assert held == Targets(7, 1)


def test_while_the_fleet_is_not_known_nothing_is_held() -> None:
    desired, decision = decided(
        replace(interval(1, 1), unknown="the store is away"), RoleHolds(decode=Hold(4))
    )
    assert desired == decision.current


def test_a_record_with_holds_reads_back_and_one_without_has_no_key_for_them() -> None:
    observation = replace(interval(1, 2, kv=QUIET), holds=RoleHolds(decode=BY_ALICE))
    state, decision = decide(SETTINGS, PlannerState(), observation)
    record = DecisionRecord(
        "2026-01-01T00:00:00+00:00", SETTINGS, PlannerState(), observation, decision, state
    )
    document = record.to_json()
    assert DecisionRecord.from_json(document) == record
    assert "held: decode is held at 2 by alice" in explain(document)
    assert "holds" not in interval(1, 2).to_json()
