"""The runtime under the original's names: what it renames, and how its programs see answers and errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

import dynaplan.runtime
from dynaplan.util.errors import ConfigError, PermanentError
from dynaplan.worker.membership.distributed import DistributedRuntime, dynamo_endpoint
from tests.fakes.polling import eventually


class Model:
    """A request model as pydantic's are: made from a mapping or from JSON, or ValueError."""

    def __init__(self, text: str) -> None:
        self.text = text

    @classmethod
    def model_validate(cls, given: Any) -> Model:
        if not isinstance(given, dict) or "text" not in given:
            raise ValueError("text: field required")
        return cls(given["text"])

    @classmethod
    def model_validate_json(cls, given: str) -> Model:
        return cls(given.removeprefix('{"text": "').removesuffix('"}'))


@dynamo_endpoint(Model, Any)
async def generate(request: Model) -> AsyncIterator[str]:
    yield request.text
    if request.text == "broken":
        raise RuntimeError("on purpose")


@pytest.fixture
async def runtime() -> AsyncIterator[DistributedRuntime]:
    async with dynaplan.runtime.connect("original", store="mem") as joined:
        yield DistributedRuntime(joined)


async def data(answer: AsyncIterator[Any]) -> list[Any]:
    return [item.data() async for item in answer]


async def test_a_program_of_the_originals_kind_serves_and_asks(runtime: DistributedRuntime) -> None:
    component = runtime.namespace("original").component("backend")
    await component.create_service()
    endpoint = component.endpoint("generate")
    with pytest.raises(PermanentError, match="not registered yet"):
        endpoint.lease_id()
    serving = asyncio.create_task(endpoint.serve_endpoint(generate, graceful_shutdown=True))
    client = await endpoint.client()
    (only,) = await client.wait_for_instances()
    await eventually(lambda: client.instance_ids() == [endpoint.lease_id()])
    assert await data(await client.round_robin({"text": "a"})) == ["a"]
    assert await data(await client.random('{"text": "b"}')) == ["b"]
    assert await data(await client.generate({"text": "c"})) == ["c"]
    assert await data(await client.direct({"text": "d"}, only)) == ["d"]
    (item,) = [item async for item in await client.round_robin({"text": "e"})]
    assert (item.id(), item.event(), item.comments(), item.is_error()) == (None, None, [], False)
    with pytest.raises(ValueError, match="RuntimeError: on purpose"):
        await data(await client.round_robin({"text": "broken"}))
    with pytest.raises(ValueError, match="Invalid request: text: field required"):
        await data(await client.round_robin({"txt": "a"}))
    runtime.shutdown()
    await asyncio.wait_for(serving, 20)
    assert client.instance_ids() == []


async def test_a_worker_program_gets_the_runtime_before_its_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DYN_DISCOVERY_BACKEND", "mem")
    seen: list[Any] = []

    @dynaplan.runtime.dynamo_worker()
    async def program(runtime: DistributedRuntime, word: str, *, number: int) -> None:
        seen.extend([type(runtime), word, number])

    await program("a", number=2)
    assert seen == [DistributedRuntime, "a", 2]
    with pytest.raises(ConfigError, match="static"):
        dynaplan.runtime.dynamo_worker(static=True)
