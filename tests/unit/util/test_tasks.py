"""Background tasks are held, their errors told, and they are ended."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from dynaplan.util.tasks import BackgroundTasks


async def test_a_task_is_counted_until_it_has_ended() -> None:
    tasks = BackgroundTasks()
    gate = asyncio.Event()
    task = tasks.spawn(gate.wait(), "gate")
    assert (len(tasks), task.get_name()) == (1, "gate")
    gate.set()
    await task
    assert len(tasks) == 0


async def test_an_error_is_told_to_the_owner_and_a_cancellation_is_none() -> None:
    told: list[tuple[str, str]] = []

    def failed(task: asyncio.Task[Any], error: BaseException) -> None:
        told.append((task.get_name(), str(error)))

    tasks = BackgroundTasks(failed)
    tasks.spawn(_fail("no"), "first")
    tasks.spawn(asyncio.Event().wait(), "second").cancel()
    await tasks.finish()
    assert told == [("first", "no")]


async def test_an_error_is_logged_by_default(caplog: pytest.LogCaptureFixture) -> None:
    tasks = BackgroundTasks()
    tasks.spawn(_fail("no"), "the search")
    await tasks.finish()
    assert "the search failed" in caplog.text


async def test_finishing_waits_also_for_tasks_that_tasks_start() -> None:
    tasks, done = BackgroundTasks(), []

    async def second() -> None:
        done.append("second")

    async def first() -> None:
        await asyncio.sleep(0)
        tasks.spawn(second())

    tasks.spawn(first())
    await tasks.finish()
    assert done == ["second"]


async def test_finishing_cancels_what_takes_longer() -> None:
    tasks = BackgroundTasks()
    slow = tasks.spawn(asyncio.Event().wait())
    await tasks.finish(within_s=0.01)
    assert slow.cancelled()
    assert len(tasks) == 0


async def test_cancelling_waits_until_the_tasks_have_ended() -> None:
    tasks, cleaned = BackgroundTasks(), []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    tasks.spawn(work())
    await asyncio.sleep(0)
    await tasks.cancel()
    assert cleaned == [True]


async def _fail(why: str) -> None:
    raise ValueError(why)
