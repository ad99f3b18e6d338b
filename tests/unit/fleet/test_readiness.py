"""What ``serve`` reports of workers that are not ready when the Frontend already answers."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dynaplan.fleet import readiness as module
from dynaplan.fleet.readiness import Readiness
from dynaplan.graph.lifecycle import Worker, WorkerState
from tests.fakes.polling import consistently, eventually
from tests.unit.fleet.rules.graphs import READY, worker
from tests.unit.fleet.test_launch import LAUNCH


def readiness(workers: list[Worker]) -> Readiness:
    return Readiness(LAUNCH, [], cast(Any, SimpleNamespace(read=lambda: tuple(workers))))


async def test_it_reports_how_many_of_how_many_are_ready_and_when_all_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "REST_S", 0.0)
    workers = [worker("V", state=READY), worker("V_1", state=WorkerState.STARTING)]
    lines: list[str] = []
    waiting = asyncio.create_task(readiness(workers).wait_for_rest(lines.append, time.monotonic()))
    await eventually(lambda: lines)
    assert "1 of 2 workers are ready; waiting for: dynamo_V_1 (starting)" in lines[0]
    workers[1] = replace(workers[1], state=READY)
    await waiting
    assert "All 2 workers are ready after" in lines[1]


@pytest.mark.parametrize("is_rest", [False, True])
async def test_a_worker_that_is_not_ready_for_long_is_looked_at_seldom(
    is_rest: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REST_S", 0.0)
    monkeypatch.setattr(module, "SLOW_S", 0.0)
    reads, lines = [0], list[str]()

    def read() -> tuple[Worker, ...]:
        reads[0] += 1
        return (worker("V", state=WorkerState.FAILED),)

    graph = replace(LAUNCH.graph, services=LAUNCH.graph.services[1:])
    looking = Readiness(replace(LAUNCH, graph=graph), [], cast(Any, SimpleNamespace(read=read)))
    waiting = looking.wait_for_rest(lines.append, 0.0) if is_rest else looking.wait(lines.append)
    task = asyncio.create_task(waiting)
    await eventually(lambda: lines)
    at_the_report = reads[0]
    await consistently(lambda: reads[0] <= at_the_report + 2, for_s=0.4)
    task.cancel()


async def test_it_reports_nothing_where_all_are_ready_soon() -> None:
    lines: list[str] = []
    leaving = worker("V_1", state=WorkerState.DRAINING)
    await readiness([worker("V", state=READY), leaving]).wait_for_rest(lines.append, time.monotonic())
    assert lines == []
