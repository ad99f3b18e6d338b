"""Who leaves by a backtest, and who stays whatever it says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynaplan.contract.counts import FleetCounts, PoolSizes, WorkerCounts
from dynaplan.planner.model import (
    LOAD_ABOVE,
    LOAD_BELOW,
    BacktestResult,
    DecisionStep,
    Observation,
    Sizing,
    SplitTrial,
    WorkerLimits,
)
from dynaplan.planner.rules.backtest_rules import apply_backtest, describe_backtest

LIMITS = WorkerLimits(8)
CURRENT = PoolSizes(3, 2)
FEW = PoolSizes(1, 1)
HEALTHY = FleetCounts()
NEEDED = PoolSizes(2, 1)
ANSWER = BacktestResult(NEEDED, requests=900, window_s=3600.0, is_new=True)


def after(
    answer: BacktestResult | None,
    wanted: PoolSizes = FEW,
    current: PoolSizes = CURRENT,
    limits: WorkerLimits = LIMITS,
    fleet: FleetCounts = HEALTHY,
) -> Sizing:
    sizing = Sizing(wanted, (DecisionStep("demand", current, wanted, "because"),))
    return apply_backtest(sizing, Observation(0.0, fleet, backtest=answer), limits, current)


def test_who_was_not_needed_leaves_in_the_interval_of_the_answer() -> None:
    assert after(ANSWER).workers == NEEDED


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (None, "no backtest was made"),
        (BacktestResult(missing="590 s of traffic are known"), "590 s of traffic are known"),
        (replace(ANSWER, is_new=False), "until the next backtest"),
        (replace(ANSWER, missing="it was killed"), "because it was killed"),
        (replace(ANSWER, change=LOAD_ABOVE), "nothing is removed"),
        (
            replace(ANSWER, change=LOAD_BELOW, missing="it was killed"),
            "nothing is removed because it was killed",
        ),
    ],
    ids=["none", "no evidence", "an old answer", "killed", "outgrown", "ended, and killed"],
)
def test_nothing_is_removed_without_an_answer_that_counts(answer: BacktestResult | None, why: str) -> None:
    sizing = after(answer)
    assert sizing.workers == CURRENT
    assert why in sizing.steps[-1].why


@pytest.mark.parametrize("state", ["failed", "backoff"])
def test_nothing_is_removed_while_workers_fail(state: str) -> None:
    fleet = FleetCounts(decode=WorkerCounts(**{state: 1}))  # type: ignore[arg-type]
    sizing = after(ANSWER, fleet=fleet)
    assert sizing.workers == CURRENT
    assert "while workers fail (1)" in sizing.steps[-1].why


def test_a_load_that_was_backtested_gets_the_answer_whatever_the_forecast_needs() -> None:
    assert after(ANSWER, wanted=PoolSizes(6, 2)).workers == NEEDED
    assert after(replace(ANSWER, is_new=False), PoolSizes(6, 2), current=PoolSizes(1, 1)).workers == NEEDED


def test_a_load_that_has_outgrown_the_window_gets_what_the_forecast_needs_and_no_less_than_there_is() -> None:
    above = replace(ANSWER, change=LOAD_ABOVE)
    assert after(above, wanted=PoolSizes(5, 1)).workers == PoolSizes(5, 2)
    assert after(above, wanted=PoolSizes(1, 1), current=PoolSizes(1, 1)).workers == NEEDED


def test_of_a_load_whose_peak_cannot_come_in_time_that_part_of_the_answer_is_needed() -> None:
    slow = replace(ANSWER, workers=PoolSizes(4, 2), peak_part=0.6, is_new=False)
    sizing = after(slow, current=PoolSizes(4, 2))
    assert sizing.workers == PoolSizes(3, 2)
    assert "at most 60% of its peak can come now" in sizing.steps[-1].why
    assert after(slow, current=PoolSizes(2, 1)).workers == PoolSizes(3, 2)


@pytest.mark.parametrize(
    "objection",
    [{"missing": "it was killed"}, {"change": LOAD_ABOVE}],
    ids=["killed", "outgrown"],
)
def test_whose_peak_cannot_come_stays_while_something_objects(objection: dict[str, str]) -> None:
    slow = replace(ANSWER, workers=PoolSizes(4, 2), peak_part=0.6, **objection)  # type: ignore[arg-type]
    assert after(slow, current=PoolSizes(4, 2)).workers == PoolSizes(4, 2)


def test_a_load_that_has_ended_gets_what_the_forecast_needs() -> None:
    assert after(replace(ANSWER, change=LOAD_BELOW)).workers == PoolSizes(1, 1)


def test_before_the_first_answer_the_forecast_adds() -> None:
    assert after(BacktestResult(missing="first start"), wanted=PoolSizes(4, 1)).workers == PoolSizes(4, 2)


def test_minimums_and_maximums_of_holds_go_before() -> None:
    held = replace(LIMITS, least=PoolSizes(1, 2), most=PoolSizes(1, 9))
    assert after(ANSWER, limits=held).workers == PoolSizes(1, 2)


def test_where_gpus_are_not_there_the_answer_goes_before_who_is_there() -> None:
    scarce = replace(LIMITS, max_gpus=5)
    assert after(BacktestResult(PoolSizes(4, 1)), limits=scarce).workers == PoolSizes(4, 1)
    outgrown = BacktestResult(NEEDED, change=LOAD_ABOVE)
    assert after(outgrown, wanted=PoolSizes(1, 4), limits=scarce).workers == PoolSizes(1, 4)
    with_all_gpus = replace(outgrown, workers=PoolSizes(4, 1))
    assert after(with_all_gpus, wanted=PoolSizes(1, 4), limits=scarce).workers == PoolSizes(4, 1)


def test_the_trail_goes_on_from_step_to_step() -> None:
    for answer in (None, ANSWER, replace(ANSWER, change=LOAD_ABOVE)):
        steps = after(answer, wanted=PoolSizes(1, 1)).steps
        assert [each.before for each in steps[1:]] == [each.after for each in steps[:-1]]


def test_the_words_can_be_checked() -> None:
    tried = (
        SplitTrial(PoolSizes(3, 1), 4, 0.971),
        SplitTrial(PoolSizes(2, 2), 4, 0.99),
        SplitTrial(PoolSizes(1, 1), 2, 0.5, is_at_most=True),
        SplitTrial(PoolSizes(2, 1), 3, 0.916, is_at_most=True),
    )
    answer = BacktestResult(PoolSizes(3, 1), requests=900, window_s=3600.0, tried=tried)
    assert describe_backtest(answer) == (
        "3 + 1 would have kept 97.1% of the 900 requests of the last 60 min in time with 4 GPUs, "
        "2 + 1 at most 91.6% with 3"
    )
    alone = BacktestResult(
        PoolSizes(0, 2), requests=900, window_s=600.0, tried=(SplitTrial(PoolSizes(0, 2), 2, 1.0),)
    )
    assert describe_backtest(alone) == (
        "2 would have kept 100.0% of the 900 requests of the last 10 min in time with 2 GPUs"
    )
