"""Decisions without a profile, and with one that foretells worse than what was learnt."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.counts import FleetCounts, WorkerCounts
from dynaplan.contract.store_keys import DesiredCounts
from dynaplan.engines.timing_model.learnt_timing import LearntTiming, StepLine
from dynaplan.planner.learnt_timings import LearntTimings
from dynaplan.planner.model import AverageLoad, DecisionRecord, Observation, PlannerState
from dynaplan.planner.rules.decision import decide
from dynaplan.planner.rules.explain import explain
from tests.unit.planner.rules.targets import foreseen, model, traffic

WITHOUT = PlannerSettings(policy="sla", profile_results_dir="learnt", itl_ms=20.0, adjustment_interval_s=10.0)
LINE = StepLine(6.0, 0.05, 4e-5, 0.02, 5.0)
KNOWN = LearntTiming(LINE, LINE, 0.04, 0.5, 200, 40_000, 32.0, kv_tokens=400_000, request_slots=256)


def seen(learnt: LearntTimings, *, workers: int = 2, kv_usage: float = 0.1, rate: float = 1.0) -> Observation:
    return Observation(
        10.0,
        FleetCounts(WorkerCounts(), WorkerCounts(ready=workers, gpus=1), 8),
        DesiredCounts(0, workers, 0, 0),
        AverageLoad(10, kv_usage, decode_workers=workers),
        traffic=traffic(rate, isl=500),
        foresight=foreseen([rate], isl=500),
        learnt=learnt,
    )


def decision(learnt: LearntTimings, settings: PlannerSettings = WITHOUT, **load: float) -> tuple[int, str]:
    observation = seen(learnt, **load)  # type: ignore[arg-type]
    state, made = decide(settings, PlannerState(), observation, model(settings))
    record = DecisionRecord("2026-01-01T00:00:00+00:00", settings, PlannerState(), observation, made, state)
    again = DecisionRecord.from_json(record.to_json())
    assert decide(settings, again.state, again.observation, model(settings))[1] == made
    return made.desired.decode, explain(record.to_json())


@pytest.mark.parametrize(
    "learnt", [LearntTimings(is_needed=True), LearntTimings(replace(KNOWN, error=0.3), is_needed=True)]
)
def test_until_the_step_is_known_thresholds_add_and_nothing_leaves(learnt: LearntTimings) -> None:
    assert decision(learnt, kv_usage=0.01)[0] == 2
    assert decision(learnt, kv_usage=0.95)[0] == 3
    assert "learning" in decision(learnt)[1]


def test_then_workers_are_counted_by_what_was_learnt() -> None:
    workers, why = decision(LearntTimings(KNOWN, is_needed=True), rate=30.0)
    slow = replace(KNOWN, line=StepLine(12.0, 0.1, 8e-5, 0.04, 10.0))
    assert decision(LearntTimings(slow, is_needed=True), rate=30.0)[0] > workers
    assert "learnt from 40,000 steps" in why
    assert "error 4%" in why


def test_a_profile_counts_until_it_foretells_clearly_worse() -> None:
    settings = replace(WITHOUT, profile_results_dir="h200-bf16")
    slow = replace(KNOWN, line=StepLine(15.0, 0.1, 8e-5, 0.04, 10.0))
    believed = decision(LearntTimings(replace(slow, prior_error=0.04)), settings, rate=60.0)[0]
    assert believed == decision(LearntTimings(), settings, rate=60.0)[0]
    assert decision(LearntTimings(slow), settings, rate=60.0)[0] > believed
