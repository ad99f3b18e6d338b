"""What holds for every decision, whatever is seen."""

from __future__ import annotations

import json
import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.counts import FleetCounts, PoolSizes, WorkerCounts
from dynaplan.contract.store_keys import SCALED_ROLES, DesiredCounts
from dynaplan.planner.model import AverageLoad, Decision, DecisionRecord, Observation, PlannerState
from dynaplan.planner.rules import guards
from dynaplan.planner.rules.decision import decide
from tests.unit.planner.rules.situations import interval

counts = st.integers(min_value=0, max_value=6)
amounts = st.one_of(st.none(), st.floats())
pools = st.builds(
    WorkerCounts, counts, counts, counts, counts, counts, gpus=st.sampled_from([0.0, 0.5, 1.0, 2.0, 4.0])
)
fleets = st.builds(FleetCounts, pools, pools, st.sampled_from([0, 1, 4, 8, 16]))
ids = st.integers(min_value=-1, max_value=3)
desired_counts = st.builds(DesiredCounts, st.integers(-1, 6), st.integers(-1, 6), ids, ids)
loads = st.builds(
    AverageLoad,
    pulls=counts,
    kv_usage=amounts,
    prefill_queue=amounts,
    prefill_queue_first=amounts,
    prefill_queue_last=amounts,
    prefill_workers=counts,
    decode_workers=counts,
    changed=st.sampled_from(["", "", "", "prefill 1, decode 1 -> prefill 1, decode 2"]),
)
observations = st.builds(
    Observation,
    at_s=st.floats(0, 1e6),
    fleet=fleets,
    desired=desired_counts,
    load=loads,
    unknown=st.sampled_from(["", "", "", "the store is away"]),
)


def holds_nan(load: AverageLoad) -> bool:
    """Whether a number is none: decisions bear it, records refuse it, as no planner writes one."""
    return any(isinstance(value, float) and math.isnan(value) for value in vars(load).values())


states = st.builds(PlannerState, st.integers(0, 3), ids, st.floats(0, 1e6))
settings_of_all_kinds = st.builds(
    PlannerSettings,
    max_gpu_budget=st.integers(1, 16),
    min_gpu_budget=st.integers(1, 4),
    decode_engine_num_gpu=st.sampled_from([1, 2, 4]),
    prefill_engine_num_gpu=st.sampled_from([1, 2, 4]),
    consolidation_guard=st.booleans(),
)


@given(settings_of_all_kinds, states, observations)
def test_the_budget_and_the_minimum_hold_after_any_decision(settings, state, observation):
    _, decision = decide(settings, state, observation)
    fleet, current, desired = observation.fleet, decision.current, decision.desired
    held = guards.gpus_in_use(settings, fleet, current, current)
    will_hold = guards.gpus_in_use(settings, fleet, current, desired)
    assert will_hold <= max(settings.max_gpu_budget, held)
    if desired.prefill > current.prefill or desired.decode > current.decode:
        assert will_hold <= settings.max_gpu_budget
    for role in SCALED_ROLES:
        if desired.of(role) < current.of(role):
            gpus = guards.gpus_of(settings, fleet, role)
            assert desired.of(role) >= 1
            assert desired.of(role) * gpus >= settings.min_gpu_budget


@given(settings_of_all_kinds, states, observations)
def test_no_more_than_one_worker_of_each_kind_changes(settings, state, observation):
    _, decision = decide(settings, state, observation)
    assert abs(decision.desired.prefill - decision.current.prefill) <= 1
    assert abs(decision.desired.decode - decision.current.decode) <= 1
    assert decision.desired == (decision.steps[-1].after)


@given(settings_of_all_kinds, states, observations)
def test_a_decision_is_total_and_depends_on_nothing_else(settings, state, observation):
    next_state, decision = decide(settings, state, observation)
    assert (next_state, decision) == decide(settings, state, observation)
    assert math.isfinite(next_state.pending_since_s)
    assert all(step.why and "nan" not in step.why for step in decision.steps)


@given(settings_of_all_kinds, states, observations.filter(lambda each: not holds_nan(each.load)))
def test_a_record_reads_back_and_decides_the_same(settings, state, observation):
    settings = replace(settings, max_gpu_budget=16)
    next_state, decision = decide(settings, state, observation)
    record = DecisionRecord("2026-01-01T00:00:00+00:00", settings, state, observation, decision, next_state)
    read = DecisionRecord.from_json(json.loads(json.dumps(record.to_json())))
    assert read.decision == decision
    assert decide(read.settings, read.state, read.observation) == (next_state, decision)


def changes_under(
    settings: PlannerSettings, total_kv: float, total_queue: float, start: PoolSizes
) -> list[Decision]:
    """Fifty intervals of constant load, spread evenly over the workers; the fleet follows every decision."""
    state, now, changes = PlannerState(), start, []
    for number in range(50):
        observation = interval(
            now.prefill,
            now.decode,
            total_kv / now.decode,
            (total_queue, total_queue) if now.prefill else (),
            at_s=number * 30.0,
        )
        state, decision = decide(settings, state, observation)
        if decision.is_change:
            changes.append(decision)
        now = decision.desired
    return changes


@given(st.floats(0, 12), st.floats(0, 8), st.integers(0, 6), st.integers(1, 6))
def test_constant_load_never_makes_it_turn_back(total_kv, total_queue, prefill, decode):
    settings = PlannerSettings(max_gpu_budget=32)
    changes = changes_under(settings, total_kv, total_queue, PoolSizes(prefill, decode))
    for role in SCALED_ROLES:
        directions = {
            change.desired.of(role) > change.current.of(role)
            for change in changes
            if change.desired.of(role) != change.current.of(role)
        }
        assert len(directions) <= 1


def test_without_the_guard_a_constant_load_makes_it_turn_back():
    settings = PlannerSettings(consolidation_guard=False)
    assert len(changes_under(settings, 0.98, 0.0, PoolSizes(0, 2))) > 3
