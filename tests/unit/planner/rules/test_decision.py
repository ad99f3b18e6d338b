"""What a decision depends on: the original's rules (reference 5.4), and those beyond them.

The next decision on counts that somebody set by hand.

Holds in a decision: the last step, after every policy.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.counts import FleetCounts, PoolSizes, Sample, WorkerCounts
from dynaplan.contract.holds import Hold, RoleHolds
from dynaplan.contract.store_keys import DesiredCounts
from dynaplan.contract.traffic import Traffic
from dynaplan.engines.worker_load import WorkerLoad, kv_pressure
from dynaplan.planner.model import Decision, DecisionRecord, Observation, PlannerState
from dynaplan.planner.rules.decision import decide, has_data, preview_decision
from dynaplan.planner.rules.explain import explain
from dynaplan.planner.rules.load_policy import average_load
from tests.unit.planner.rules import targets
from tests.unit.planner.rules.situations import SEEDS, interval, outcome, story, with_fleet

GUARDED = replace(SEEDS, consolidation_guard=True)
PENDING = DesiredCounts(1, 1, 5, 4)
BUDGET_OF_3 = replace(SEEDS, max_gpu_budget=3)


def told(settings, observation, state=None):
    return story(decide(settings, state or PlannerState(), observation)[1])


ORIGINAL = {
    "a queue that shrinks fast enough adds none": (SEEDS, (1, 1), 0.7, (9, 7, 5), (1, 1)),
    "a queue at the upper threshold is not above it": (SEEDS, (1, 1), 0.7, (5, 5), (1, 1)),
    "a queue at the lower threshold is not below it": (SEEDS, (2, 1), 0.7, (0.4,), (2, 1)),
    "KV usage at the upper threshold is not above it": (SEEDS, (1, 1), 0.9, (1,), (1, 1)),
    "KV usage above the upper threshold adds a decode worker": (SEEDS, (1, 1), 0.91, (1,), (1, 2)),
    "KV usage at the lower threshold is not below it": (SEEDS, (1, 2), 0.5, (1,), (1, 2)),
    "KV usage below the lower threshold removes a decode worker": (SEEDS, (1, 2), 0.49, (1,), (1, 1)),
    "prefill gets the last GPU of the budget": (BUDGET_OF_3, (1, 1), 0.95, (9, 9), (2, 1)),
    "a prefill worker makes room for a decode worker": (BUDGET_OF_3, (2, 1), 0.95, (0, 0), (1, 2)),
    "a decode worker makes room for a prefill worker": (BUDGET_OF_3, (1, 2), 0.1, (9, 9), (2, 1)),
    "nothing goes below the minimum of each kind": (
        replace(SEEDS, min_endpoint=2),
        (2, 2),
        0.1,
        (0,),
        (2, 2),
    ),
}
"""Settings, workers, mean KV usage, the prefill queue at each pull, and what is desired then."""


@pytest.mark.parametrize(("settings", "current", "kv", "queue", "desired"), ORIGINAL.values(), ids=ORIGINAL)
def test_the_original_s_rule(settings, current, kv, queue, desired):
    assert outcome(settings, interval(*current, kv, queue)) == PoolSizes(*desired)


def played(usages: list[float]) -> list[int]:
    """The decode workers after each interval; the fleet follows every decision."""
    state, decode, seen = PlannerState(), 1, []
    for usage in usages:
        state, decision = decide(SEEDS, state, interval(1, decode, usage, (1,)))
        decode = decision.desired.decode
        seen.append(decode)
    return seen


def test_no_decode_worker_is_removed_in_the_three_intervals_after_one_was_added():
    assert played([0.95, 0.1, 0.1, 0.1, 0.1]) == [2, 2, 2, 2, 1]


def test_every_added_decode_worker_starts_the_grace_anew():
    assert played([0.95, 0.95, 0.1, 0.1, 0.1, 0.1]) == [2, 3, 3, 3, 3, 2]


def test_the_queue_threshold_is_per_prefill_worker():
    assert outcome(SEEDS, interval(2, 1, 0.7, (9, 9))) == PoolSizes(2, 1)
    assert outcome(SEEDS, interval(2, 1, 0.7, (11, 11))) == PoolSizes(3, 1)


def test_the_defaults_are_those_of_the_documentation():
    assert outcome(PlannerSettings(), interval(1, 1, 0.7, (1, 1))) == PoolSizes(2, 1)


def test_every_stage_says_why_it_changed_nothing():
    _, decision = decide(SEEDS, PlannerState(), interval(1, 1, 0.7, (1,)))
    assert [step.stage for step in decision.steps] == [
        "known",
        "pending",
        "steady",
        "prefill scale down",
        "decode scale down",
        "prefill scale up",
        "decode scale up",
    ]
    assert all(step.why for step in decision.steps)
    assert not decision.is_change


def test_aggregated_has_no_prefill_stages():
    _, decision = decide(SEEDS, PlannerState(), interval(0, 1, 0.7))
    assert not [step for step in decision.steps if "prefill" in step.stage]


def test_aggregated_scales_by_kv_usage():
    assert outcome(SEEDS, interval(0, 1, 0.95)) == PoolSizes(0, 2)


def test_no_data_is_a_reason_to_change_nothing():
    observation = interval(1, 2, None)
    assert outcome(SEEDS, observation) == PoolSizes(1, 2)
    assert "no data: change nothing, because no decode worker answered" in told(SEEDS, observation)
    assert "no data: change nothing, because the prefill queue did not answer" in told(SEEDS, observation)


def test_an_unknown_fleet_is_a_reason_to_change_nothing():
    observation = replace(interval(1, 1, 0.95), unknown="the key-value store did not answer")
    assert outcome(SEEDS, observation) == PoolSizes(1, 1)
    assert "because the key-value store did not answer" in told(SEEDS, observation)


def test_no_worker_is_removed_when_the_rest_would_be_over_the_scale_up_threshold():
    assert outcome(GUARDED, interval(1, 2, 0.49, (1,))) == PoolSizes(1, 2)
    assert "the other 1 would then be at 0.98" in told(GUARDED, interval(1, 2, 0.49, (1,)))
    assert outcome(GUARDED, interval(1, 2, 0.44, (1,))) == PoolSizes(1, 1)


def test_the_same_holds_for_prefill_workers():
    settings = replace(GUARDED, prefill_queue_scale_down_threshold=4.0)
    assert outcome(settings, interval(2, 1, 0.7, (6, 6))) == PoolSizes(2, 1)
    assert outcome(settings, interval(2, 1, 0.7, (4, 4))) == PoolSizes(1, 1)


def test_a_decision_that_is_being_carried_out_blocks_the_next():
    observation = replace(interval(1, 1, 0.95), desired=PENDING)
    assert outcome(SEEDS, observation) == PoolSizes(1, 1)
    assert "decision 5 is still being carried out" in told(SEEDS, observation)


def test_a_decision_that_nobody_acknowledges_blocks_until_the_scaling_timeout():
    first = replace(interval(1, 1, 0.95), desired=PENDING, at_s=100.0)
    state, _ = decide(SEEDS, PlannerState(), first)
    before = replace(first, at_s=100.0 + SEEDS.scaling_timeout_s - 1)
    assert outcome(SEEDS, before, state) == PoolSizes(1, 1)
    after = replace(first, at_s=100.0 + SEEDS.scaling_timeout_s)
    assert outcome(SEEDS, after, state) == PoolSizes(1, 2)


def test_an_interval_in_which_workers_changed_changes_nothing_and_counts_for_the_grace():
    samples = [Sample(0, 0.1, decode_workers=count) for count in (1, 2)]
    observation = replace(interval(0, 2), load=average_load(samples))
    state, decision = decide(SEEDS, PlannerState(decode_grace_left=2), observation)
    assert not decision.is_change
    assert "prefill 0, decode 1 -> prefill 0, decode 2" in story(decision)
    assert state.decode_grace_left == 1


def test_an_interval_of_scaling_does_not_count_for_the_grace():
    state, _ = decide(SEEDS, PlannerState(decode_grace_left=2), replace(interval(1, 1), desired=PENDING))
    assert state.decode_grace_left == 2


def test_counts_set_by_hand_are_the_new_base():
    by_hand = replace(interval(1, 3, 0.95), desired=DesiredCounts(1, 3, 9, 9))
    assert outcome(SEEDS, by_hand) == PoolSizes(1, 4)


def test_without_desired_counts_the_base_are_the_workers_there_are():
    observation = replace(interval(1, 2, 0.95), desired=DesiredCounts())
    assert outcome(SEEDS, observation) == PoolSizes(1, 3)


def test_a_failed_worker_counts_as_present():
    fleet = FleetCounts(decode=WorkerCounts(ready=1, failed=1))
    observation = replace(with_fleet(interval(0, 1, 0.95), fleet), desired=DesiredCounts())
    assert outcome(SEEDS, observation) == PoolSizes(0, 3)


def test_draining_workers_hold_their_gpus():
    settings = replace(SEEDS, max_gpu_budget=3)
    fleet = FleetCounts(WorkerCounts(ready=1), WorkerCounts(ready=1, draining=1))
    observation = with_fleet(interval(1, 1, 0.95, (1,)), fleet)
    assert outcome(settings, observation) == PoolSizes(1, 1)
    assert "4 GPUs would be over the budget of 3" in told(settings, observation)


def test_a_worker_that_is_needed_and_not_allowed_is_a_step_forth_and_one_back():
    full = interval(1, 2, kv=0.95)
    for settings, observation, stage in (
        (replace(SEEDS, max_gpu_budget=3), full, "budget"),
        (SEEDS, replace(full, fleet=replace(full.fleet, decode=WorkerCounts(2, failed=2))), "failures"),
    ):
        _, decision = decide(settings, PlannerState(), observation)
        more, back = decision.steps[-2:]
        assert (more.stage, more.after) == ("decode scale up", PoolSizes(1, 3))
        assert (back.stage, back.before, back.after) == (stage, PoolSizes(1, 3), PoolSizes(1, 2))
        assert decision.is_withheld
    _, enough = decide(SEEDS, PlannerState(), interval(1, 2, kv=0.7))
    assert not enough.is_withheld


def test_a_fleet_over_the_budget_does_not_grow_and_the_story_says_so():
    settings = replace(SEEDS, max_gpu_budget=2)
    observation = interval(1, 2, 0.95, (1,))
    assert outcome(settings, observation) == PoolSizes(1, 2)
    assert "3 GPUs are in use already, over the budget of 2" in told(settings, observation)


def test_the_budget_counts_the_gpus_that_the_supervisor_names():
    settings = replace(SEEDS, max_gpu_budget=4)
    fleet = FleetCounts(decode=WorkerCounts(ready=2, gpus=2))
    assert outcome(settings, with_fleet(interval(0, 2, 0.95), fleet)) == PoolSizes(0, 2)


def test_the_box_bounds_the_budget():
    fleet = FleetCounts(decode=WorkerCounts(ready=2, gpus=1), gpus_total=2)
    observation = with_fleet(interval(0, 2, 0.95), fleet)
    assert outcome(SEEDS, observation) == PoolSizes(0, 2)
    assert "the box has 2 GPUs" in told(SEEDS, observation)


def test_the_minimum_in_gpus_is_rounded_up_to_workers():
    settings = replace(SEEDS, min_gpu_budget=3, decode_engine_num_gpu=2)
    assert outcome(settings, interval(0, 2, 0.1)) == PoolSizes(0, 2)
    assert outcome(settings, interval(0, 3, 0.1)) == PoolSizes(0, 2)


def test_the_last_worker_that_serves_is_not_removed():
    observation = replace(interval(0, 1, 0.1), desired=DesiredCounts(0, 2, 4, 4))
    assert "no other worker serves now" in told(GUARDED, observation)


def test_kv_usage_is_averaged_over_workers_before_pulls():
    samples = [Sample(0, 1.0, decode_workers=3), Sample(1, 0.0, decode_workers=3)]
    assert average_load(samples).kv_usage == 0.5


def test_a_pull_without_data_does_not_weigh():
    samples = [Sample(0, 0.8, decode_workers=1), Sample(1, None, decode_workers=1), Sample(2, math.nan)]
    assert average_load(samples).kv_usage == 0.8


def test_waiting_requests_add_to_the_kv_usage_of_a_worker_that_runs_some():
    assert kv_pressure(WorkerLoad(running_requests=1, waiting_requests=10, kv_usage=0.9)) == 0.9 + 0.2
    assert kv_pressure(WorkerLoad(running_requests=0, waiting_requests=10, kv_usage=0.9)) == 0.9


@pytest.mark.parametrize(("running", "waiting", "pressure"), [(4, 2, 1.04), (4, 0, 0.1), (3, 2, 0.14)])
def test_a_worker_whose_slots_all_run_while_others_wait_is_full(running, waiting, pressure):
    load = WorkerLoad(running, request_slots=4, waiting_requests=waiting, kv_usage=0.1)
    assert kv_pressure(load) == pytest.approx(pressure)


def test_an_observation_reads_back_as_it_was_written():
    observation = replace(interval(2, 1, 0.3, (1.5, 2)), failure="somebody else scaled")
    assert Observation.from_json(observation.to_json()) == observation


def test_no_worker_is_added_to_a_role_of_which_several_have_failed():
    for failed, desired in ((1, PoolSizes(0, 4)), (2, PoolSizes(0, 3))):
        fleet = FleetCounts(decode=WorkerCounts(ready=3 - failed, failed=failed, gpus=1), gpus_total=8)
        observation = with_fleet(interval(0, 3, 0.95), fleet)
        assert outcome(SEEDS, observation) == desired
        assert ("workers failed" in told(SEEDS, observation)) == (failed > 1)


def test_planning_for_targets_without_a_model_of_the_engines_is_an_error():
    with pytest.raises(ValueError, match="policy sla without a model"):
        decide(PlannerSettings(policy="sla", profile_results_dir="p"), PlannerState(), interval(1, 1))


SETTINGS = PlannerSettings()


def recorded(observation: Observation, state: PlannerState | None = None) -> DecisionRecord:
    before = state or PlannerState()
    after, decision = decide(SETTINGS, before, observation)
    return DecisionRecord("2026-01-01T00:00:00+00:00", SETTINGS, before, observation, decision, after)


def test_an_idle_worker_that_was_added_by_hand_would_be_removed() -> None:
    decision = preview_decision(recorded(interval(1, 1, kv=0.0)), PoolSizes(1, 2), RoleHolds(), None)
    assert (decision.current, decision.desired) == (PoolSizes(1, 2), PoolSizes(1, 1))


def test_the_load_that_was_seen_is_spread_over_the_new_number() -> None:
    busy = recorded(interval(1, 1, kv=0.8))
    assert preview_decision(busy, PoolSizes(1, 1), RoleHolds(), None).desired == PoolSizes(1, 1)
    many = preview_decision(busy, PoolSizes(1, 4), RoleHolds(), None)
    assert many.desired == PoolSizes(1, 3)
    assert "0.2 is below 0.5" in many.reason
    fewer = preview_decision(recorded(interval(1, 4, kv=0.6)), PoolSizes(1, 2), RoleHolds(), None)
    assert fewer.desired == PoolSizes(1, 3)


def test_a_decision_that_was_still_carried_out_and_changes_in_the_interval_do_not_count() -> None:
    seen = interval(1, 1, kv=0.0)
    seen = replace(seen, desired=replace(seen.desired, decision_id=9), load=replace(seen.load, changed="yes"))
    assert preview_decision(recorded(seen), PoolSizes(1, 2), RoleHolds(), None).desired == PoolSizes(1, 1)


def test_what_is_held_stays() -> None:
    holds = RoleHolds(decode=Hold(2, 2))
    assert not preview_decision(recorded(interval(1, 1, kv=0.0)), PoolSizes(1, 2), holds, None).is_change


def test_without_data_or_workers_nothing_is_foretold() -> None:
    last = recorded(interval(1, 1, kv=None))
    assert not preview_decision(last, PoolSizes(1, 2), RoleHolds(), None).is_change
    assert preview_decision(
        recorded(interval(1, 1)), PoolSizes(1, 0), RoleHolds(), None
    ).current == PoolSizes(1, 0)
    assert has_data(last.observation)
    assert not has_data(replace(last.observation, unknown="the store is away"))
    assert not has_data(replace(last.observation, traffic=Traffic(30.0, missing="no frontend answered")))


QUIET, BUSY = 0.0, 1.5
BY_ALICE = Hold(2, 2, by="alice", until_s=1795356000.0, until="2026-11-22 14:00 UTC")


def decided(
    observation: Observation, holds: RoleHolds, settings: PlannerSettings = SETTINGS
) -> tuple[PoolSizes, Decision]:
    model = targets.model() if settings.is_by_targets else None
    _, decision = decide(settings, PlannerState(), replace(observation, holds=holds), model)
    return decision.desired, decision


def test_without_a_hold_the_trail_has_no_step_of_it() -> None:
    _, decision = decided(interval(1, 2, kv=QUIET), RoleHolds())
    assert "held" not in [step.stage for step in decision.steps]
    assert decision.desired == PoolSizes(1, 1)


def test_a_held_number_is_kept_and_the_trail_says_by_whom_and_until_when() -> None:
    desired, decision = decided(interval(1, 2, kv=QUIET), RoleHolds(decode=BY_ALICE))
    assert desired == PoolSizes(1, 2)
    assert not decision.is_change
    why = "decode is held at 2 by alice until 2026-11-22 14:00 UTC, instead of 1"
    assert decision.steps[-1].why == why
    assert why in decision.reason


def test_a_hold_that_changes_nothing_is_said_too() -> None:
    desired, decision = decided(interval(1, 2), RoleHolds(decode=BY_ALICE))
    assert desired == PoolSizes(1, 2)
    assert decision.steps[-1].why == "decode is held at 2 by alice until 2026-11-22 14:00 UTC"


def test_a_worker_beyond_an_upper_bound_is_not_added() -> None:
    desired, decision = decided(interval(1, 2, kv=BUSY), RoleHolds(decode=Hold(at_most=2)))
    assert desired == PoolSizes(1, 2)
    assert "held at 2 or fewer until `dynaplan release`, instead of 3" in story(decision)


def test_within_the_bounds_the_planner_scales() -> None:
    holds = RoleHolds(decode=Hold(1, 4))
    assert decided(interval(1, 2, kv=BUSY), holds)[0] == PoolSizes(1, 3)
    assert decided(interval(1, 2, kv=QUIET), holds)[0] == PoolSizes(1, 1)


def test_numbers_that_somebody_else_moved_outside_come_back_at_once() -> None:
    assert decided(interval(1, 1), RoleHolds(decode=Hold(4)))[0] == PoolSizes(1, 4)
    assert decided(interval(1, 6), RoleHolds(decode=Hold(2, 3)))[0] == PoolSizes(1, 3)


def test_a_hold_takes_room_in_the_budget_from_the_other_role() -> None:
    settings = replace(SETTINGS, max_gpu_budget=3)
    busy_queue = interval(1, 2, kv=QUIET, queue=(9.0, 9.0))
    assert decided(busy_queue, RoleHolds(), settings)[0] == PoolSizes(2, 1)
    desired, decision = decided(busy_queue, RoleHolds(decode=Hold(2)), settings)
    assert desired == PoolSizes(1, 2)
    assert "the GPU budget then has room for prefill 1, instead of 2" in story(decision)


def test_a_hold_above_the_budget_is_kept() -> None:
    settings = replace(SETTINGS, max_gpu_budget=3)
    assert decided(interval(2, 3), RoleHolds(decode=Hold(5, 5)), settings)[0] == PoolSizes(1, 5)


def test_minimums_give_way_to_a_hold() -> None:
    settings = replace(SETTINGS, min_endpoint=2)
    assert decided(interval(2, 2), RoleHolds(decode=Hold(at_most=1)), settings)[0] == PoolSizes(2, 1)
    assert decided(interval(2, 2), RoleHolds(decode=Hold(at_most=0)), settings)[0] == PoolSizes(2, 0)


def test_an_aggregated_deployment_is_not_asked_for_prefill_workers_by_a_hold() -> None:
    _, decision = decided(interval(0, 2), RoleHolds(prefill=Hold(2)))
    assert decision.desired == PoolSizes(0, 2)
    assert "held" not in [step.stage for step in decision.steps]


@pytest.mark.parametrize("policy", ["sla", "both"])
def test_targets_are_held_too(policy: str) -> None:
    settings = replace(targets.SETTINGS, policy=policy, max_gpu_budget=16)
    rising = targets.planned_interval(1, 1, [40.0])
    free = decided(rising, RoleHolds(), settings)[0]
    held, decision = decided(rising, RoleHolds(prefill=Hold(free.prefill + 2)), settings)
    assert free.prefill > 1
    assert held == PoolSizes(free.prefill + 2, free.decode)
    assert decision.prediction is None
    assert decided(rising, RoleHolds(prefill=Hold(1, 1)), settings)[0] == PoolSizes(1, free.decode)


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
    assert held == PoolSizes(7, 1)


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


def test_no_more_is_asked_for_while_workers_that_were_asked_for_have_no_memory():
    observation = replace(interval(0, 1, kv=1.2), desired=DesiredCounts(-1, 2, 4, 4))
    decision = decide(SEEDS, PlannerState(), observation)[1]
    assert decision.desired == PoolSizes(0, 2)
    assert "of the 2 decode workers asked for there are 1" in story(decision)
    idle = replace(interval(0, 1, kv=0.1), desired=DesiredCounts(-1, 2, 4, 4))
    assert outcome(SEEDS, idle) == PoolSizes(0, 1)
