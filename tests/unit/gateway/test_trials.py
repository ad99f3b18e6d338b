from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack

import pytest

from dynaplan.gateway.openai_api import CHAT_COMPLETIONS, ApiError, Call
from dynaplan.gateway.trials import Trial, Trials
from dynaplan.store.instances import Instance


def call(number: int) -> Call:
    document = {"model": "a/model", "messages": [{"role": "user", "content": f"{number}"}]}
    return Call(CHAT_COMPLETIONS, json.dumps(document).encode(), document, "a/model", True, f"{number}", 1)


def instance(number: int, pid: int = 7) -> Instance:
    return Instance("ns", "VllmWorker", "generate", number, f"http://127.0.0.1:{8000 + pid}", pid=pid)


async def in_flight(stack: AsyncExitStack, trials: Trials, number: int, at: Instance) -> Trial:
    trial = await stack.enter_async_context(trials.trial(call(number)))
    trial.at(at)
    return trial


async def test_a_worker_that_has_registered_again_dies_once_and_with_all_its_requests() -> None:
    forgiven: list[frozenset[int]] = []
    trials = Trials(lambda: 1000.0, forgiven.append)
    async with AsyncExitStack() as stack:
        before = await in_flight(stack, trials, 22, instance(1))
        after = await in_flight(stack, trials, 23, instance(2))
        for each in (before, after):
            each.died()
    assert forgiven == [frozenset()]
    async with trials.trial(call(22)), trials.trial(call(23)):
        pass  # neither was alone, so neither is suspected: they need not take turns


async def test_the_deaths_of_two_processes_are_two() -> None:
    trials = Trials(lambda: 1000.0)
    for pid in (7, 8):
        async with trials.trial(call(22)) as trial:
            trial.at(instance(pid, pid))
            trial.died()
    with pytest.raises(ApiError, match="Workers have died over this request"):
        async with trials.trial(call(22)):
            pass


async def test_the_attempts_at_a_sleeping_instance_are_given_up_and_no_others() -> None:
    trials = Trials(lambda: 1000.0)
    async with AsyncExitStack() as stack:
        asleep = await in_flight(stack, trials, 1, instance(1))
        awake = await in_flight(stack, trials, 2, instance(2, 8))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30.0) as asleep.patience, asyncio.timeout(30.0) as awake.patience:
                trials.fell_asleep([1])
                assert asleep.patience is None
                assert awake.patience is not None
                await asyncio.Event().wait()
