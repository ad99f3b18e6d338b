"""Backtests in a process of their own: their answers, and what is left when the process is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace

import psutil
import pytest

from dynaplan.contract.counts import PoolSizes
from dynaplan.planner.backtesting.backtester import NICENESS, LiveBacktester
from dynaplan.planner.backtesting.schedule import BacktestSchedule
from dynaplan.planner.model import BacktestResult, Observation, PlannerState
from tests.fakes.polling import eventually
from tests.unit.planner.rules.targets import SETTINGS, planned_interval

REQUESTS_PER_S = 0.2


def seen(number: int) -> Observation:
    at_s = number * SETTINGS.adjustment_interval_s
    return replace(planned_interval(2, 1, [REQUESTS_PER_S]), at_s=at_s)


@pytest.fixture
async def backtester() -> AsyncIterator[LiveBacktester]:
    """One that knows ten minutes of traffic but for the last interval."""
    schedule = BacktestSchedule(SETTINGS)
    for number in range(59):
        schedule.add(seen(number))
    live = LiveBacktester(SETTINGS, schedule)
    yield live
    await live.close()


class Answers:
    """The answers, one for each interval in which nothing comes."""

    def __init__(self, backtester: LiveBacktester) -> None:
        self._backtester, self._number = backtester, 59

    def next(self) -> BacktestResult:
        self._number += 1
        return self._backtester.observe(seen(self._number), PlannerState())


def helpers() -> list[psutil.Process]:
    return [each for each in psutil.Process().children() if "backtester" in " ".join(each.cmdline())]


async def test_an_answer_comes_while_planning_goes_on_from_a_process_that_gives_way(
    backtester: LiveBacktester,
) -> None:
    answers = Answers(backtester)
    assert answers.next().missing == "the first backtest is being computed"
    await eventually(lambda: helpers())
    found: list[BacktestResult] = []
    await eventually(lambda: found.append(answers.next()) or found[-1].workers)
    assert found[-1].workers == PoolSizes(1, 1)
    assert found[-1].is_new
    [helper] = helpers()
    assert helper.nice() == min(19, psutil.Process().nice() + NICENESS)
    assert not answers.next().is_new


async def test_a_process_that_is_killed_leaves_no_answer_and_says_so(
    backtester: LiveBacktester, caplog: pytest.LogCaptureFixture
) -> None:
    answers = Answers(backtester)
    answers.next()
    await eventually(lambda: helpers())
    os.kill(helpers()[0].pid, signal.SIGKILL)
    found: list[BacktestResult] = []
    await eventually(lambda: found.append(answers.next()) or "not computed" in found[-1].missing)
    assert found[-1].workers is None
    assert "no worker is removed" in caplog.text


async def test_its_process_ends_with_the_planner(backtester: LiveBacktester) -> None:
    Answers(backtester).next()
    await eventually(lambda: helpers())
    await backtester.close()
    assert not helpers()
