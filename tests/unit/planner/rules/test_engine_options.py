"""What a decision says of the engines' options."""

from __future__ import annotations

from dataclasses import replace

from dynaplan.contract.counts import PoolSizes
from dynaplan.planner.model import BacktestResult, DecisionStep, Observation, OptionTrial, PlannerState
from dynaplan.planner.rules.decision import decide
from dynaplan.planner.rules.engine_options import ENGINE_OPTION
from tests.unit.planner.rules.targets import SETTINGS, model, planned_interval

MORE_SLOTS = OptionTrial("VllmWorker", "max-num-seqs", 8, 16, 0.672, 0.998, is_certain=True)


def observed(trial: OptionTrial | None) -> Observation:
    answer = BacktestResult(PoolSizes(1, 1), requests=900, window_s=900.0, best_option=trial)
    return replace(planned_interval(1, 1, [1.0]), backtest=answer)


def said(observation: Observation) -> list[str]:
    _, decision = decide(SETTINGS, PlannerState(), observation, model())
    return [step.why for step in decision.steps if step.stage == ENGINE_OPTION]


def test_a_gain_beyond_chance_is_said_with_both_parts() -> None:
    assert said(observed(MORE_SLOTS)) == [
        "VllmWorker.max-num-seqs 8 -> 16 would have kept 99.8% of the last 15 min, 67.2% as it is"
    ]


def test_a_gain_within_chance_leaves_the_options_as_they_are() -> None:
    [why] = said(observed(replace(MORE_SLOTS, is_certain=False)))
    assert why.startswith("nothing that was tried keeps more beyond chance: at best VllmWorker.max-num-seqs")


def test_nothing_is_said_where_nothing_was_tried() -> None:
    assert said(observed(None)) == []
    assert said(planned_interval(1, 1, [1.0])) == []


def test_what_was_found_changes_no_number_of_workers_and_survives_its_record() -> None:
    observation = observed(MORE_SLOTS)
    _, decision = decide(SETTINGS, PlannerState(), observation, model())
    step = next(each for each in decision.steps if each.stage == ENGINE_OPTION)
    assert step == DecisionStep(ENGINE_OPTION, decision.current, decision.current, step.why)
    assert Observation.from_json(observation.to_json()) == observation
