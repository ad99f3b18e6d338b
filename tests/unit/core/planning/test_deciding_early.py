"""Decisions before the end of an interval: when one is made, what it may do, and what is remembered of it."""

from __future__ import annotations

from dataclasses import replace

from dynaplan.core.planning.cycle import PlanningCycle
from dynaplan.core.planning.deciding import decide
from dynaplan.core.sizing.early_signs import USUAL_COST_S, least_gap_s
from dynaplan.domain.planning.decisions import PlannerState
from dynaplan.domain.planning.observation import Observation, Sample
from dynaplan.domain.planning.targets import Targets
from dynaplan.domain.settings.planner import PlannerSettings
from tests.unit.core.planning.situations import story
from tests.unit.core.planning.targets import SETTINGS, model, planned_interval

ADAPTIVE = replace(SETTINGS, adaptive_interval=True, adjustment_interval_s=30.0)
EARLY = "a prompt that comes now waits for 3 s"


def cycle_of(settings: PlannerSettings = ADAPTIVE) -> PlanningCycle:
    cycle = PlanningCycle(settings, model(settings) if settings.is_by_targets else None)
    cycle.begin(0.0)
    return cycle


def test_only_targets_with_the_option_are_looked_at_early_and_never_faster_than_a_decision_costs() -> None:
    usual_s = least_gap_s(USUAL_COST_S)
    assert not cycle_of(replace(ADAPTIVE, policy="load")).may_be_early(29.0)
    assert not cycle_of(replace(ADAPTIVE, adaptive_interval=False)).may_be_early(29.0)
    cycle = cycle_of()
    assert [cycle.may_be_early(at_s) for at_s in (usual_s - 0.1, usual_s)] == [False, True]
    cycle.took(0.2, 10.0)
    assert [cycle.may_be_early(at_s) for at_s in (29.9, 30.0)] == [False, True]


def test_a_queue_is_answered_before_the_interval_is_over_and_then_left_to_its_end_while_it_stands() -> None:
    cycle = cycle_of()
    for at_s, depth in enumerate((0, 20)):
        cycle.add(Sample(at_s, prefill_queue=depth, prefill_workers=1))
    came = replace(planned_interval(1, 1, [30.0], at_s=6.0).traffic, interval_s=6.0, requests=60.0)
    why = cycle.early(came)
    assert why.startswith("a prompt that comes now waits for 2.78 s")
    assert not cycle.is_due(6.0)
    seen = replace(planned_interval(1, 1, [30.0], queue=(0, 20), at_s=6.0), traffic=came, early=why)
    assert cycle.decide(seen).desired.prefill > 1
    assert cycle.early(came) == ""
    assert not cycle.may_be_early(10.0)


def early(observation: Observation) -> Observation:
    return replace(observation, early=EARLY)


def test_an_early_decision_adds_what_the_interval_so_far_needs_and_says_that_it_is_early() -> None:
    state, decision = decide(ADAPTIVE, PlannerState(), early(planned_interval(1, 1, [20.0])), model())
    assert decision.desired.prefill > 1
    assert f"early: decided before the end of the interval, because {EARLY}" in story(decision)
    assert state == PlannerState(wanted=(decision.desired,))


def test_an_early_decision_removes_nobody_and_remembers_nothing() -> None:
    seen = early(planned_interval(4, 4, [0.1]))
    remembered = PlannerState(wanted=(Targets(1, 1),) * 3)
    state, decision = decide(ADAPTIVE, remembered, seen, model())
    assert decision.desired == Targets(4, 4)
    assert "fewer workers wait for its end" in story(decision)
    assert state == remembered


def test_an_early_decision_takes_no_gpu_from_the_other_role() -> None:
    tight = replace(ADAPTIVE, max_gpu_budget=5)
    seen = early(planned_interval(1, 4, [30.0]))
    remembered = PlannerState(wanted=(Targets(4, 1),) * 3)
    assert decide(tight, remembered, replace(seen, early=""), model())[1].desired.prefill > 1
    assert decide(tight, remembered, seen, model())[1].desired == Targets(1, 4)


def test_workers_that_were_asked_for_early_stay_as_if_the_last_interval_had_wanted_them() -> None:
    remembered = PlannerState(wanted=(Targets(1, 1), Targets(1, 2)))
    state, decision = decide(ADAPTIVE, remembered, early(planned_interval(1, 2, [20.0])), model())
    assert state.wanted == (Targets(1, 1), Targets(decision.desired.prefill, 2))
    assert state.decode_grace_left == 0


def test_with_both_the_thresholds_wait_for_the_end_and_a_new_decode_worker_has_its_grace() -> None:
    both = replace(ADAPTIVE, policy="both")
    seen = early(planned_interval(1, 1, [0.1], kv=0.99))
    assert decide(both, PlannerState(), replace(seen, early=""), model())[1].desired.decode == 2
    assert not decide(both, PlannerState(), seen, model())[1].is_change
    state, decision = decide(both, PlannerState(), early(planned_interval(1, 1, [60.0])), model())
    assert decision.desired.decode > 1
    assert state.decode_grace_left == 3


def test_while_the_fleet_is_unknown_an_early_decision_changes_nothing() -> None:
    unknown = replace(planned_interval(1, 1, [20.0]), unknown="the store is away", early=EARLY)
    state, decision = decide(ADAPTIVE, PlannerState(), unknown, model())
    assert not decision.is_change
    assert state == PlannerState()


def test_an_early_observation_is_written_down_as_one_and_others_as_before() -> None:
    seen = early(planned_interval(1, 1, [1.0]))
    assert Observation.from_json(seen.to_json()) == seen
    assert "early" not in replace(seen, early="").to_json()
