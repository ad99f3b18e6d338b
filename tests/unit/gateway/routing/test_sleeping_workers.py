"""Waiting for an engine that falls asleep."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from dynaplan.gateway.routing.sleeping_workers import EngineAsleep, SleepingWorkers
from dynaplan.store.instances import ASLEEP, Instance


def sleeping() -> SleepingWorkers:
    none = cast(Any, None)
    return SleepingWorkers(none, "ns", none, lambda: 0.0)


def instance(number: int) -> Instance:
    return Instance("ns", "VllmWorker", "generate", number, "http://127.0.0.1:9")


async def test_what_waits_for_a_sleeping_instance_is_broken_off_and_nothing_else() -> None:
    here = sleeping()
    asleep, awake = instance(1), instance(2)

    async def wait(at: Instance) -> None:
        with here.while_awake(at):
            await asyncio.Event().wait()

    waiting = [asyncio.create_task(wait(each)) for each in (asleep, asleep, awake)]
    await asyncio.sleep(0)
    here.follow({ASLEEP.key("ns", 1): ""})
    for each in waiting[:2]:
        with pytest.raises(EngineAsleep, match="fell asleep"):
            await each
    assert not waiting[2].done()
    with pytest.raises(EngineAsleep, match="sleeps"):
        await wait(asleep)
    waiting[2].cancel()
    await asyncio.wait(waiting[2:])
    assert not here._waits


async def test_a_timeout_within_is_that_and_what_has_ended_is_not_broken_off() -> None:
    here = sleeping()
    with pytest.raises(TimeoutError), here.while_awake(instance(1)):
        raise TimeoutError
    with here.while_awake(instance(1)):
        pass
    here.follow({ASLEEP.key("ns", 1): ""})
