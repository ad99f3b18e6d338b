"""A policy beside the live one, with workers that exist in the model only."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from dynaplan.core.planning.deciding import decide
from dynaplan.core.shadowing.shadow import Models, ShadowPlanner
from dynaplan.domain.planning.decisions import DecisionRecord, PlannerState, ShadowRecord
from dynaplan.domain.planning.observation import Observation
from dynaplan.domain.planning.targets import Targets
from dynaplan.domain.settings.planner import PlannerSettings
from tests.unit.core.planning.situations import interval
from tests.unit.core.planning.targets import SETTINGS, model, planned_interval

BY_LOAD = replace(SETTINGS, policy="load")


def beside(
    live: PlannerSettings, shadow: PlannerSettings, observations: list[Observation]
) -> list[ShadowRecord]:
    """What the shadow decides beside a live planner whose workers stay as observed."""
    deciding = model(shadow)
    judging = model(live) if live.is_by_targets else deciding
    planner = ShadowPlanner(live, shadow, Models(judging, deciding))
    state, records = PlannerState(), []
    for number, observation in enumerate(observations):
        state, decision = decide(live, state, observation, judging)
        records.append(planner.follow(observation, decision, state, f"2026-01-01T12:{number:02}:00+00:00"))
    return records


def rising(prefill: int, decode: int, rates: list[float], **more: object) -> list[Observation]:
    return [
        planned_interval(prefill, decode, [rate], at_s=10.0 * number, **more)  # type: ignore[arg-type]
        for number, rate in enumerate(rates)
    ]


def test_a_shadow_that_adds_workers_has_fewer_late_and_pays_for_them():
    records = beside(BY_LOAD, SETTINGS, rising(1, 1, [60.0] * 12, startup_s=20.0))
    last = records[-1]
    assert last.options == {"policy": "sla"}
    assert last.since == "2026-01-01T12:00:00+00:00"
    assert last.decision.current.prefill > 1
    assert last.shadow_score.late < last.live_score.late
    assert last.shadow_score.gpu_s > last.live_score.gpu_s
    assert last.live_score.requests == last.shadow_score.requests == 11 * 600


def test_its_decisions_start_from_its_own_workers():
    records = beside(BY_LOAD, SETTINGS, rising(1, 1, [60.0] * 6))
    for before, after in pairwise(records):
        assert after.decision.current == before.decision.desired


def test_the_same_settings_on_steady_load_have_the_same_score():
    (*_, last) = beside(SETTINGS, SETTINGS, rising(4, 2, [20.0] * 6))
    assert last.options == {}
    assert last.shadow_score.requests == last.live_score.requests
    assert last.live_score.changes == 5


def test_workers_that_start_are_pending_and_the_change_is_told_to_thresholds():
    shadow = replace(BY_LOAD, prefill_queue_scale_up_threshold=0.4)
    seen = rising(1, 1, [60.0] * 5, queue=(3.0,), startup_s=15.0)
    records = beside(SETTINGS, shadow, seen)
    told = [step.why for record in records for step in record.decision.steps]
    assert any("is still being carried out" in why for why in told)
    assert any("the workers changed in this interval" in why for why in told)
    assert any(record.decision.desired.prefill > 1 for record in records)


def test_without_traffic_or_fleet_nothing_is_scored_and_nothing_changes():
    seen = [replace(interval(1, 1, None), at_s=10.0 * number) for number in range(2)]
    records = beside(BY_LOAD, replace(BY_LOAD, max_gpu_budget=4), seen)
    assert records[-1].live_score.requests == 0
    assert records[-1].decision.desired == Targets(1, 1)


def test_the_formula_sizes_beside_without_the_corrections_of_steps():
    formula = replace(SETTINGS, sizing="formula")
    (*_, last) = beside(formula, replace(formula, ttft_ms=300.0), rising(1, 1, [20.0] * 3))
    assert last.live_score.requests > 0


def test_a_queue_that_is_not_known_stays_unknown():
    seen = [
        replace(each, load=replace(each.load, prefill_queue=None, prefill_queue_last=None))
        for each in rising(1, 1, [5.0] * 2)
    ]
    (*_, last) = beside(SETTINGS, replace(SETTINGS, ttft_ms=300.0), seen)
    assert last.live_score.requests == 50


def test_its_record_is_written_beside_the_live_decision_and_read_again():
    seen = rising(1, 1, [60.0])[0]
    state, decision = decide(BY_LOAD, PlannerState(), seen, None)
    (record,) = beside(BY_LOAD, SETTINGS, [seen])
    written = DecisionRecord("now", BY_LOAD, PlannerState(), seen, decision, state, record).to_json()
    assert DecisionRecord.from_json(written).shadow == record
    without = DecisionRecord("now", BY_LOAD, PlannerState(), seen, decision, state).to_json()
    assert "shadow" not in without
