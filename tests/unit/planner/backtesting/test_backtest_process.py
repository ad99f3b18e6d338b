"""The backtests of several planners: one process, one after another, and each counts for all of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import pytest

from dynaplan.contract.counts import PoolSizes
from dynaplan.planner.backtesting.backtester import (
    BacktestAnswer,
    BacktestFailed,
    BacktestProcess,
    LiveBacktester,
)
from dynaplan.planner.backtesting.schedule import BacktestSchedule, Question
from dynaplan.planner.model import BacktestResult, Corrections, PlannerState, WorkerLimits
from dynaplan.process.helper import HelperFailed, HelperProcess
from tests.unit.planner.rules.targets import SETTINGS, planned_interval

QUESTION = Question((), PoolSizes(), PoolSizes(), WorkerLimits(), Corrections(), 0.05)


async def test_backtests_are_computed_one_after_another_and_their_time_counts_for_every_planner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[int] = []
    computed = asyncio.Event()

    async def ask(helper: object, options: object, payload: bytes) -> tuple[dict[str, object], bytes]:
        begun.append(len(begun))
        await computed.wait()
        return {}, msgspec.json.encode(BacktestAnswer(BacktestResult(requests=7), 2.0))

    monkeypatch.setattr(HelperProcess, "ask", ask)
    process = BacktestProcess(planners=3)
    both = [asyncio.create_task(process.ask(SETTINGS, QUESTION)) for _ in range(2)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert begun == [0]
    computed.set()
    assert [(each.backtest.requests, each.cpu_s) for each in await asyncio.gather(*both)] == [(7, 6.0)] * 2
    await process.close()


async def test_a_failed_backtest_says_why_and_leaves_the_process_to_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def ask(helper: object, options: object, payload: bytes) -> tuple[dict[str, object], bytes]:
        raise HelperFailed("it was killed")

    monkeypatch.setattr(HelperProcess, "ask", ask)
    process = BacktestProcess(planners=2)
    for _ in range(2):
        with pytest.raises(BacktestFailed, match="it was killed") as raised:
            await process.ask(SETTINGS, QUESTION)
        assert raised.value.took_s >= 0
    await process.close()


async def test_while_nothing_is_known_of_the_fleet_traffic_is_taken_up_and_no_answer_is_used_up() -> None:
    schedule = BacktestSchedule(SETTINGS)
    schedule.note(QUESTION, BacktestResult(PoolSizes(0, 1), requests=7), 0.0, 0.0)
    live = LiveBacktester(SETTINGS, schedule)
    unloaded = replace(planned_interval(1, 1, [1.0]), unknown="the model a is unloaded")
    assert live.observe(unloaded, PlannerState()) == BacktestResult(missing="the model a is unloaded")
    assert schedule.answer(planned_interval(1, 1, [1.0])).is_new
    await live.close()
