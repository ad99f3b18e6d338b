"""Processes that join without a graph: serving, calling, leaving. Over real sockets, a store in memory."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

import dynaplan.runtime
from dynaplan.util.errors import ConfigError, DeadlineExceeded, PermanentError, RequestRefused, TemporaryError
from dynaplan.worker.distributed_runtime import Runtime, RuntimeComponent
from tests.fakes.polling import eventually


@dataclass
class Question:
    text: str
    words: int = 1


class Backend:
    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.ended: list[str] = []

    async def generate(self, question: Question) -> AsyncIterator[str]:
        for number in range(question.words):
            yield f"{question.text}{number}"

    async def slow(self, _: Any) -> AsyncIterator[int]:
        try:
            yield 1
            await self.gate.wait()
            yield 2
        except BaseException as error:
            self.ended.append(type(error).__name__)
            raise

    async def broken(self, _: Any) -> AsyncIterator[int]:
        yield 1
        raise ValueError("broken on purpose")


@pytest.fixture
async def runtime() -> AsyncIterator[Runtime]:
    async with dynaplan.runtime.connect("joined", store="mem", drain_deadline_s=5) as joined:
        yield joined


Serve = Callable[..., Awaitable[asyncio.Task[None]]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Serve in the background; return when that many instances are known."""
    tasks: list[asyncio.Task[None]] = []

    async def begin(component: RuntimeComponent, handlers: Any, count: int = 1) -> asyncio.Task[None]:
        tasks.append(asyncio.create_task(component.serve(handlers)))
        client = await component.endpoint(next(iter(handlers))).client()
        await client.wait_for_instances(count, timeout_s=10)
        return tasks[-1]

    yield begin
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def collected(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


async def test_what_one_process_serves_another_calls(runtime: Runtime, serve: Serve) -> None:
    backend = Backend()
    component = runtime.namespace().component("answers")
    await serve(component, {"generate": backend.generate, "broken": backend.broken})
    async with dynaplan.runtime.connect("joined", store="mem") as other:
        found = other.namespace().component("answers")
        client = await found.endpoint("generate").client()
        (only,) = client.instance_ids()
        assert await collected(client.round_robin({"text": "a", "words": 2})) == ["a0", "a1"]
        assert await collected(client.random(Question("b"))) == ["b0"]
        assert await collected(client.direct(Question("c"), only)) == ["c0"]
        assert (await found.endpoint("broken").client()).instance_ids() == (only,)
        with pytest.raises(RequestRefused, match="does not fit generate"):
            await collected(client.round_robin({"txt": "a"}))
        with pytest.raises(PermanentError, match=r"answers.broken: ValueError: broken on purpose"):
            await collected((await found.endpoint("broken").client()).round_robin())


async def test_calls_take_turns_among_processes(runtime: Runtime, serve: Serve) -> None:
    component = runtime.namespace().component("turns")

    def named(name: str) -> Callable[[], Awaitable[str]]:
        async def handler() -> str:
            return name

        return handler

    for number, name in enumerate("abc", 1):
        await serve(component, {"name": named(name)}, number)
    client = await component.endpoint("name").client()
    assert len(set(client.instance_ids())) == 3
    answers = [(await collected(client.round_robin()))[0] for _ in range(6)]
    assert sorted(answers[:3]) == ["a", "b", "c"]
    assert answers[3:] == answers[:3]


async def test_a_client_that_leaves_or_has_no_time_left_cancels_the_handler(
    runtime: Runtime, serve: Serve
) -> None:
    backend = Backend()
    component = runtime.namespace().component("slow")
    await serve(component, {"slow": backend.slow})
    client = await component.endpoint("slow").client()
    answer = client.round_robin({})
    assert await anext(answer) == 1
    await answer.aclose()
    await eventually(lambda: backend.ended == ["CancelledError"])
    with pytest.raises(DeadlineExceeded):
        await collected(client.round_robin({}, timeout_s=0.2))
    await eventually(lambda: len(backend.ended) == 2)


async def test_the_endpoint_gives_up_at_the_deadline_also_when_its_client_cannot_say_so(
    runtime: Runtime, serve: Serve
) -> None:
    backend = Backend()
    component = runtime.namespace().component("frozen")
    await serve(component, {"slow": backend.slow})
    (instance,) = (await runtime.discovery("joined")).instances("frozen", "slow")
    headers = {"X-Dynaplan-Timeout-Ms": "200"}
    with await runtime.http.send("POST", f"{instance.url}/slow", headers=headers) as response:
        lines = (await response.read()).splitlines()
    assert lines[0] == b"1"
    assert b"DeadlineExceeded" in lines[1]
    assert backend.ended == ["CancelledError"]


async def test_a_call_that_a_handler_makes_ends_with_its_own_request(runtime: Runtime, serve: Serve) -> None:
    backend = Backend()
    component = runtime.namespace().component("nested")

    async def outer() -> AsyncIterator[Any]:
        client = await component.endpoint("slow").client()
        async for item in client.round_robin({}):
            yield item

    await serve(component, {"slow": backend.slow, "outer": outer})
    client = await component.endpoint("outer").client()
    with pytest.raises(DeadlineExceeded):
        await collected(client.round_robin(timeout_s=0.2))
    await eventually(lambda: backend.ended == ["CancelledError"])


async def test_sigterm_drains_and_then_serving_returns(runtime: Runtime, serve: Serve) -> None:
    backend = Backend()
    component = runtime.namespace().component("leaving")
    serving = await serve(component, {"slow": backend.slow})
    client = await component.endpoint("slow").client()
    held = client.round_robin({})
    assert await anext(held) == 1
    os.kill(os.getpid(), signal.SIGTERM)
    await eventually(lambda: client.instance_ids() == ())
    assert not serving.done()
    backend.gate.set()
    assert await collected(held) == [2]
    await asyncio.wait_for(serving, 10)
    assert backend.ended == []


async def test_whoever_revokes_the_lease_drains_it(runtime: Runtime, serve: Serve) -> None:
    component = runtime.namespace().component("revoked")
    serving = await serve(component, {"generate": Backend().generate})
    (instance_id,) = (await component.endpoint("generate").client()).instance_ids()
    await runtime.store.revoke(instance_id)
    await asyncio.wait_for(serving, 20)
    assert await runtime.store.list("/services/joined/revoked/") == ()


async def test_cancelling_the_task_withdraws_the_registration_at_once(runtime: Runtime, serve: Serve) -> None:
    backend = Backend()
    component = runtime.namespace().component("cancelled")
    serving = await serve(component, {"slow": backend.slow})
    client = await component.endpoint("slow").client()
    held = client.round_robin({})
    assert await anext(held) == 1
    serving.cancel()
    with pytest.raises(TemporaryError, match="broke off"):
        await anext(held)
    assert serving.cancelled() or await asyncio.wait([serving], timeout=5)
    assert client.instance_ids() == ()


async def test_the_end_of_the_block_drains_what_is_still_served() -> None:
    async with dynaplan.runtime.connect("joined", store="mem") as runtime:
        component = runtime.namespace().component("block")
        serving = asyncio.create_task(component.serve({"generate": Backend().generate}))
        await (await component.endpoint("generate").client()).wait_for_instances(timeout_s=10)
    assert serving.done() and serving.exception() is None
    assert await runtime.store.list("/services/joined/block/") == ()


async def test_without_the_token_nobody_is_answered(runtime: Runtime, serve: Serve) -> None:
    component = runtime.namespace().component("closed")
    await serve(component, {"generate": Backend().generate})
    (instance,) = (await runtime.discovery("joined")).instances("closed", "generate")
    async with aiohttp.ClientSession() as anybody:
        async with anybody.post(f"{instance.url}/generate", json={"text": "a"}) as response:
            assert response.status == 401
        async with anybody.get(f"{instance.url}/health") as response:
            assert response.status == 200


async def test_a_process_with_another_token_is_told_so(runtime: Runtime, serve: Serve) -> None:
    component = runtime.namespace().component("tokens")
    await serve(component, {"generate": Backend().generate})
    async with dynaplan.runtime.connect("joined", store="mem") as other:
        other.token = "another"
        client = await other.namespace().component("tokens").endpoint("generate").client()
        with pytest.raises(PermanentError, match="different tokens"):
            await collected(client.round_robin({"text": "a"}))


async def test_names_and_handlers_that_cannot_be_are_refused(runtime: Runtime) -> None:
    for name in ("", "a/b", "a b", "..%2f", "ä"):
        with pytest.raises(ConfigError, match="cannot be the name of a component"):
            runtime.namespace().component(name)
    component = runtime.namespace().component("names")
    assert component.endpoint("chat/completions").name == "chat/completions"
    with pytest.raises(ConfigError, match="cannot be the name of an endpoint"):
        component.endpoint("/etc")
    handler: Any = "not a function"
    with pytest.raises(ConfigError, match="the handler of endpoint generate is str"):
        await component.endpoint("generate").serve(handler)

    def plain(request: Any) -> Any:
        yield request

    with pytest.raises(ConfigError, match="a generator that is not async"):
        await component.endpoint("generate").serve(plain)
