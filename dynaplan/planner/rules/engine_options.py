"""What the last trial of the engines' options found, in words."""

from __future__ import annotations

from dynaplan.planner.model import BacktestResult, DecisionStep, OptionTrial
from dynaplan.planner.rules.load_policy import Situation

ENGINE_OPTION = "engine option"
"""The stage of a decision's trail that is about options of the engines."""


def engine_option_steps(situation: Situation) -> list[DecisionStep]:
    """Return the step that says what was found; none where nothing was tried yet."""
    answer, current = situation.observation.backtest, situation.current
    if answer is None or answer.best_option is None:
        return []
    return [DecisionStep(ENGINE_OPTION, current, current, describe_option(answer.best_option, answer))]


def describe_option(trial: OptionTrial, answer: BacktestResult) -> str:
    """Say what would have been in time with the option's other value, and as it is."""
    window = f"of the last {answer.window_s / 60:.0f} min"
    if trial.is_certain:
        return f"{trial} would have kept {trial.in_time:.1%} {window}, {trial.in_time_before:.1%} as it is"
    return (
        f"nothing that was tried keeps more beyond chance: at best {trial}, {trial.in_time:.1%} {window}, "
        f"{trial.in_time_before:.1%} as it is"
    )
