"""What a planner that starts remembers of the one before it."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

import pytest

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.fleet.counts import Targets
from dynaplan.planner.assembly import restore_state
from dynaplan.planner.bursts.memory import BurstMemory, ExpertTrial, Hedge, Missed, Standing, StandingTrial
from dynaplan.planner.model import DecisionRecord, ErrorBudget, PlannerState
from dynaplan.planner.rules.decision import decide
from tests.unit.planner.rules.situations import interval
from tests.unit.planner.rules.targets import SETTINGS

AT = datetime.fromisoformat("2026-01-01T12:00:00+00:00")
KNOWN = PlannerState(
    decode_grace_left=2,
    error_budget=ErrorBudget(-40.0, 30.0),
    bursts=BurstMemory(
        standing=Standing(100.0, (StandingTrial(5.0, 20.0),), (StandingTrial(3.0, 0.0),)),
        hedge=Hedge(
            (ExpertTrial(Targets(2, 1), False, queue=5.0, held_gpu_s=300.0, late=Missed(20.0)),),
            seconds=100.0,
            requests=100.0,
            trusted=(Targets(2, 1), False),
        ),
    ),
)


def record(settings: PlannerSettings = SETTINGS) -> dict[str, Any]:
    seen = replace(interval(1, 1), unknown="nothing")
    _, decision = decide(settings, PlannerState(), seen)
    return DecisionRecord(AT.isoformat(), settings, PlannerState(), seen, decision, KNOWN).to_json()


def test_the_error_budget_goes_on_and_has_faded_by_the_time_between():
    state = restore_state([record()], SETTINGS, AT + timedelta(hours=1))
    assert state.error_budget.ttft_requests == pytest.approx(-40 * 0.3679, rel=1e-3)
    assert state.error_budget.itl_requests == pytest.approx(30 * 0.3679, rel=1e-3)
    assert state.bursts.standing.prefill[0].late == pytest.approx(20 * 0.3679, rel=1e-3)


def test_the_hedge_goes_on_trusting_whom_it_trusted_and_has_forgotten_as_much():
    hedge = restore_state([record()], SETTINGS, AT + timedelta(hours=1)).bursts.hedge
    assert hedge.trusted == (Targets(2, 1), False)
    (trial,) = hedge.trials
    assert trial.queue == 0
    for after, before in (
        (hedge.seconds, 100.0),
        (hedge.requests, 100.0),
        (trial.held_gpu_s, 300.0),
        (trial.late.requests, 20.0),
    ):
        assert after == pytest.approx(before * 0.3679, rel=1e-3)


def test_queues_grace_and_corrections_begin_anew():
    state = restore_state([record()], SETTINGS, AT)
    assert state.bursts.standing.prefill[0].load == 0
    assert state.decode_grace_left == 0
    assert state.corrections == PlannerState().corrections


@pytest.mark.parametrize(
    ("before", "now"),
    [
        (replace(SETTINGS, ttft_ms=300.0), AT),
        (replace(SETTINGS, namespace="other"), AT),
        (PlannerSettings(), AT),
        (SETTINGS, AT - timedelta(seconds=1)),
    ],
    ids=["another promise", "another namespace", "no promise", "the future"],
)
def test_nothing_is_remembered_of(before, now):
    assert restore_state([record(before)], SETTINGS, now) == PlannerState()


@pytest.mark.parametrize("documents", [[], [{"some": "thing"}], [{**record(), "wall_time": "soon"}]])
def test_what_cannot_be_read_is_as_no_record(documents):
    assert restore_state(documents, SETTINGS, AT) == PlannerState()


def test_without_a_window_there_is_no_budget():
    settings = replace(SETTINGS, slo_window_s=0.0)
    assert restore_state([record(settings)], settings, AT) == PlannerState()
