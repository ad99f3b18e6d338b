"""The hedge within a decision."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace

import pytest

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.fleet.counts import Targets
from dynaplan.gateway.traffic import Traffic
from dynaplan.planner.bursts.hedging import hedged, remembered_hedge
from dynaplan.planner.bursts.memory import BurstMemory, Decoding, Lived
from dynaplan.planner.model import DecisionRecord, PlannerState, Sizing, WorkerLimits
from dynaplan.planner.rules.decision import decide
from tests.unit.planner.rules import targets
from tests.unit.planner.rules.targets import planned_interval

ON = replace(targets.SETTINGS, hedge=True, prefill_deadline_ms=500.0)
SERVICE = targets.model().service
LIMITS = WorkerLimits()
ONE = Targets(1, 1)
CALM, BUSY, BURST = (1.0,) * 10, (30.0,) * 10, (60.0,) * 10


def seen(arrivals: Sequence[float]) -> Traffic:
    """An interval of 10 s with these arrivals, one number each second; of misses nothing is known."""
    return replace(targets.traffic(sum(arrivals) / 10.0), arrivals=tuple(arrivals), ttft_ms=None)


def after(
    traffics: Sequence[Traffic | None],
    wish: Targets = ONE,
    settings: PlannerSettings = ON,
    limits: WorkerLimits = LIMITS,
    current: Targets = ONE,
) -> tuple[PlannerState, Sizing]:
    """The state, and the size instead of the wish, after these intervals of a start-up time of 30 s."""
    state, sizing = PlannerState(), Sizing(wish)
    for traffic in traffics:
        observation = replace(planned_interval(1, 1, [1.0], startup_s=30.0), traffic=traffic)
        state, sizing = hedged(settings, state, observation, Sizing(wish), SERVICE, limits, current)
    return state, sizing


def test_bursts_that_are_over_before_help_comes_make_it_stand_still_above_the_forecast_and_say_the_gain() -> (
    None
):
    bursts = [seen(BURST), *[seen(CALM)] * 9] * 4
    _, sizing = after(bursts)

    assert sizing.targets.prefill >= 3
    step = sizing.steps[-1]
    assert step.stage == "hedge"
    assert "would have held" in step.why and "following the forecast alone" in step.why


def test_a_load_that_the_forecast_knows_is_followed() -> None:
    for came, wish in ((CALM, ONE), (BUSY, Targets(2, 1))):
        _, sizing = after([seen(came)] * 60, wish, current=wish)
        assert sizing.targets == wish
        assert sizing.steps[-1].why.startswith("following the forecast has kept the promise lately")


def test_more_that_the_forecast_needs_are_asked_for_at_once_where_following_is_trusted() -> None:
    assert after([seen(CALM)] * 3, Targets(3, 2))[1].targets == Targets(3, 2)


def test_it_is_off_where_it_is_switched_off_and_without_a_window_or_a_choice() -> None:
    bursts = [seen(BURST)] * 3
    for settings in (replace(ON, hedge=False), replace(ON, slo_window_s=0.0), replace(ON, max_gpu_budget=1)):
        assert after(bursts, settings=settings) == (PlannerState(), Sizing(ONE))


def test_the_first_interval_counts_too() -> None:
    """What a burst leaves to the first workers is not held against those that come then."""
    hedge = after([seen(BURST)])[0].bursts.hedge
    assert hedge.requests == 600
    assert hedge.lived.trial.workers == ONE
    assert hedge.lived.trial.queue > 100


def test_a_planner_that_starts_stands_still_where_the_one_before_it_did() -> None:
    bursts = [seen(BURST), *[seen(CALM)] * 9] * 4
    before, standing = after(bursts)
    begun = PlannerState(
        bursts=BurstMemory(hedge=remembered_hedge(before.bursts.hedge, math.exp(-60 / ON.slo_window_s)))
    )
    observation = replace(planned_interval(1, 1, [1.0], startup_s=30.0), traffic=seen(CALM))
    state, sizing = hedged(ON, begun, observation, Sizing(ONE), SERVICE, LIMITS, standing.targets)
    assert sizing.targets == standing.targets
    assert state.bursts.hedge.trusted == before.bursts.hedge.trusted
    assert state.bursts.hedge.most == before.bursts.hedge.most


def test_without_arrivals_by_pull_nothing_is_learnt_and_the_forecast_counts() -> None:
    no_pulls = replace(seen(BURST), arrivals=())
    for unknown in (None, Traffic(10.0, missing="no frontend answered"), no_pulls):
        state, sizing = after([unknown] * 3)
        assert sizing == Sizing(ONE)
        assert not state.bursts.hedge.trials
    learnt = after([seen(BURST)] * 2)[0].bursts.hedge
    assert after([seen(BURST)] * 2 + [None])[0].bursts.hedge.trials == learnt.trials


def test_a_silence_costs_the_workers_that_stand_still_their_gpus() -> None:
    before, silent = (
        after([seen(BURST)] * 2)[0].bursts.hedge,
        after([seen(BURST)] * 2 + [targets.traffic(0.0)])[0].bursts.hedge,
    )
    assert silent.seconds > before.seconds
    assert silent.trials[-1].held_gpu_s > before.trials[-1].held_gpu_s


def test_it_keeps_to_the_gpus_that_are_there_now() -> None:
    bursts = [seen(BURST), *[seen(CALM)] * 9] * 4
    _, sizing = after(bursts, limits=WorkerLimits(max_gpus=3))
    assert sizing.targets == Targets(2, 1)
    _, sizing = after(bursts, limits=WorkerLimits(max_gpus=1))
    assert sizing.targets == ONE


def test_a_decision_is_hedged_and_its_state_can_be_written_down() -> None:
    observation = replace(planned_interval(1, 1, [1.0, 1.0, 1.0]), traffic=seen(BURST))
    state, decision = decide(ON, PlannerState(), observation, targets.model())
    state, decision = decide(ON, state, observation, targets.model())

    assert any(step.stage == "hedge" for step in decision.steps)
    assert len(state.bursts.hedge.trials) == 56
    record = DecisionRecord("2026-01-01T00:00:00+00:00", ON, state, observation, decision, state)
    line = json.dumps(record.to_json())
    read = DecisionRecord.from_json(json.loads(line)).next_state.bursts.hedge
    assert (read.trusted, read.followed, len(read.trials)) == (
        state.bursts.hedge.trusted,
        state.bursts.hedge.followed,
        56,
    )
    for after, before in zip(read.trials, state.bursts.hedge.trials, strict=True):
        assert (after.workers, after.follows) == (before.workers, before.follows)
        assert (after.queue, after.held_gpu_s) == pytest.approx((before.queue, before.held_gpu_s), rel=1e-5)
        assert after.late.requests == pytest.approx(before.late.requests, rel=1e-5, abs=1e-6)
        assert after.decoding.requests == pytest.approx(before.decoding.requests, rel=1e-5, abs=1e-6)
    assert len(line) < 60_000, "two memories of 56 experts: the last lines of a file are read at each look"

    document = json.loads(json.dumps({**state.to_json(), **asdict(state.bursts)}))
    assert PlannerState.from_json(document) == state
    del document["hedge"]["lived"]
    document["hedge"]["trials"][0]["decoding"] = 3.0
    older = PlannerState.from_json(document).bursts.hedge
    assert (older.lived, older.trials[0].decoding) == (Lived(), Decoding())


def counting(late: float, long: float, came: Sequence[float] = BUSY) -> Traffic:
    """An interval in which frontends counted these misses of the targets."""
    return replace(seen(came), over_ttft=((500.0, late),), over_itl=((20.0, long), (99.0, 7.0)))


def test_misses_that_frontends_counted_are_evidence_and_else_those_that_the_error_budget_estimates() -> None:
    hedge = after([seen(CALM), counting(30.0, 10.0)])[0].bursts.hedge
    assert (hedge.lived.late, hedge.lived.long) == (30.0, 10.0 * (1 - 30 / 300))
    estimated = replace(seen(BUSY), ttft_ms=2000.0)
    assert after([seen(CALM), estimated])[0].bursts.hedge.lived.late > 100
    assert after([seen(CALM), seen(BUSY)])[0].bursts.hedge.lived.late == 0


def test_a_promise_that_is_counted_as_broken_is_not_waited_for() -> None:
    kept = after([seen(CALM), *[counting(0.0, 0.0)] * 60], Targets(2, 1), current=Targets(2, 1))[1]
    broken = after([seen(CALM), *[counting(0.0, 200.0)] * 60], Targets(2, 1), current=Targets(2, 1))[1]
    assert kept.targets.decode == 1
    assert broken.targets.decode > 1


def test_an_interval_in_which_nothing_was_answered_is_tried_with_the_recent_lengths() -> None:
    unanswered = replace(seen(BURST), isl=None, osl=None, isl_tokens=None, osl_tokens=None)
    hedge = after([seen(CALM), unanswered])[0].bursts.hedge
    assert hedge.requests == pytest.approx(600 + 10 * math.exp(-10 / ON.slo_window_s))
    assert hedge.trials[0].late.requests > 100


def test_an_interval_in_which_no_worker_served_is_no_evidence() -> None:
    observation = replace(planned_interval(1, 1, [1.0], startup_s=30.0), traffic=counting(0.0, 0.0))
    nobody = replace(observation, load=replace(observation.load, prefill_workers=0))
    state = after([seen(CALM)])[0]
    served, unserved = (
        hedged(ON, state, each, Sizing(ONE), SERVICE, LIMITS, ONE)[0].bursts.hedge
        for each in (observation, nobody)
    )
    assert unserved.lived == Lived() != served.lived
    assert unserved.trials[0].late.requests > served.trials[0].late.requests == pytest.approx(0)
