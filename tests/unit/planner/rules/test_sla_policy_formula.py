from __future__ import annotations

from dataclasses import replace

from dynaplan.fleet.counts import Targets
from dynaplan.planner.model import Expected, Observation, PlannerState
from dynaplan.planner.rules.sla_policy import plan_for_targets
from tests.unit.planner.rules.targets import SETTINGS, model, planned_interval

BY_FORMULA = replace(SETTINGS, sizing="formula", no_correction=False)


def plan(observation: Observation) -> tuple[PlannerState, str]:
    """The next state, and the trail as text."""
    sla_model = model(BY_FORMULA)
    state, sizing = plan_for_targets(sla_model, BY_FORMULA, PlannerState(), observation, Targets(1, 1))
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
    _, sizing = plan_for_targets(model(), SETTINGS, PlannerState(), observation, Targets(1, 1))
    assert sizing.targets == Targets(1, 1)
