"""What every engine must do, as a worker serves it; run over each engine that runs here.

One more engine is one more entry of ``KINDS``. What only one engine does is in tests of its own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dynaplan.engines import registry
from dynaplan.engines.port import EngineContext
from dynaplan.events.prefill_requests import RemotePrefillRequest
from dynaplan.util.errors import PermanentError
from tests.contract.engine_workers import KINDS, Kind, Worker, raw_post, starting
from tests.fakes.polling import eventually

CHAT = "/v1/chat/completions"
HELLO = {"messages": [{"role": "user", "content": "hello"}]}
WHOLE = {"temperature": 0, "ignore_eos": True}
"""An answer as long as it may be, and always the same."""

StartWorker = Callable[..., Awaitable[Worker]]


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    made: Kind = KINDS[request.param]
    pytest.importorskip(made.module)
    return made


@pytest.fixture
async def start_worker(
    kind: Kind, request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[StartWorker]:
    async with starting(tmp_path) as start_any:

        async def start(*, slow: bool = False, **keywords: Any) -> Worker:
            options = {**kind.options(request), **(kind.slow if slow else {})}
            return await start_any(kind.name, options, **keywords)

        yield start


async def is_idle(worker: Worker) -> bool:
    return await worker.requests() == 0


def is_without_load(worker: Worker) -> bool:
    load = worker.engine.load()
    return not (load.running_requests or load.waiting_requests or load.kv_usage)


async def test_a_chat_streams_its_finish_reason_its_usage_and_an_end(start_worker: StartWorker) -> None:
    worker = await start_worker()
    body = {**HELLO, **WHOLE, "max_tokens": 9, "stream_options": {"include_usage": True}}
    *tokens, usage = await worker.stream(body, CHAT)
    reasons = [token["choices"][0]["finish_reason"] for token in tokens]
    assert reasons == [None] * (len(tokens) - 1) + ["length"]
    assert {token["object"] for token in tokens} == {"chat.completion.chunk"}
    assert len({token["id"] for token in tokens}) == 1
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 9


async def test_an_answer_is_the_same_text_streamed_or_not(start_worker: StartWorker) -> None:
    worker = await start_worker()
    body = {"prompt": "hello there", **WHOLE, "max_tokens": 50}
    status, answer = await worker.ask(body)
    streamed = "".join(event["choices"][0]["text"] for event in await worker.stream(body))
    assert status == 200
    assert answer["object"] == "text_completion"
    assert answer["choices"][0]["text"] == streamed
    assert answer["usage"]["completion_tokens"] == 50


@pytest.mark.parametrize("body", [b"{not json", {"messages": "none"}, {**HELLO, "max_tokens": "many"}])
async def test_a_wrong_request_is_an_error_in_openais_shape(start_worker: StartWorker, body: Any) -> None:
    worker = await start_worker()
    status, answer = await worker.ask(body, CHAT)
    assert 400 <= status < 600
    assert answer["error"]["type"]
    assert answer["error"]["message"]
    assert await is_idle(worker)


async def test_nobody_without_the_token_gets_work_done(start_worker: StartWorker) -> None:
    worker = await start_worker()
    async with aiohttp.ClientSession() as stranger, stranger.post(worker.url + CHAT, json=HELLO) as response:
        assert response.status == 401


async def test_the_card_says_what_a_frontend_must_know(start_worker: StartWorker, kind: Kind) -> None:
    worker = await start_worker(role="prefill")
    card = worker.engine.card()
    assert (card["engine"], card["role"]) == (kind.name, "prefill")
    assert card["model"]
    assert card["context_tokens"] > 0
    assert json.loads(json.dumps(dict(card))) == card
    async with worker.session.get(worker.url + "/v1/models") as response:
        (model,) = (await response.json())["data"]
    assert model["id"] == card["model"]


@pytest.mark.parametrize("is_stream", [True, False])
async def test_a_client_that_leaves_cancels_its_request(start_worker: StartWorker, is_stream: bool) -> None:
    worker = await start_worker(slow=True)
    body = {"prompt": "hi", **WHOLE, "max_tokens": 8000, "stream": is_stream}
    async with raw_post(worker, body) as reader:
        if is_stream:
            assert await reader.readuntil(b"data: ")
        await eventually(lambda: worker.requests())
    await eventually(lambda: is_without_load(worker))


async def test_many_requests_at_once_are_each_answered_in_full_and_leave_no_load(
    start_worker: StartWorker,
) -> None:
    worker = await start_worker()
    bodies = [{"prompt": "p" * (5 * n), **WHOLE, "max_tokens": 10 + n} for n in range(1, 21)]
    answers = await asyncio.gather(*(worker.ask(body) for body in bodies))
    told = [answer["usage"]["completion_tokens"] for _, answer in answers]
    assert told == [body["max_tokens"] for body in bodies]
    await eventually(lambda: is_without_load(worker))
    assert worker.engine.load().request_slots > 0


async def test_its_metrics_are_numbers_and_grow_with_its_tokens(start_worker: StartWorker) -> None:
    worker = await start_worker()

    def told() -> float:
        return sum(value for name, value in worker.engine.metrics().items() if name.endswith("_total"))

    before = told()
    await worker.ask({"prompt": "hi", **WHOLE, "max_tokens": 10})
    await eventually(lambda: told() >= before + 10)


async def test_a_remote_prefill_is_handed_over_once_and_in_fields_that_json_can_carry(
    start_worker: StartWorker,
) -> None:
    worker = await start_worker(role="prefill")
    for number, (path, body) in enumerate([(CHAT, HELLO), ("/v1/completions", {"prompt": "x" * 40})]):
        request = RemotePrefillRequest(f"r{number}", path=path, body={**body, "max_tokens": 5})
        fields = await worker.prefill(request)
        assert len(fields) > 0
        assert json.loads(json.dumps(dict(fields))) == fields
    await eventually(lambda: is_idle(worker))


async def test_a_request_that_no_engine_takes_is_handed_over_to_nobody(start_worker: StartWorker) -> None:
    worker = await start_worker(role="prefill")

    async def hand_off_ready(_: Any, cached_tokens: int | None = None, /) -> None:
        pytest.fail("it was handed over")

    with pytest.raises(PermanentError):
        await worker.engine.prefill(
            RemotePrefillRequest("r1", path=CHAT, body={"messages": 5}), hand_off_ready
        )
    assert await is_idle(worker)


async def test_stopping_twice_or_before_it_has_started_does_not_raise(
    start_worker: StartWorker, kind: Kind, request: pytest.FixtureRequest
) -> None:
    await registry.make_engine(kind.name, kind.options(request), EngineContext("w")).stop()
    worker = await start_worker()
    await worker.engine.stop()
    await worker.engine.stop()


async def test_an_engine_is_not_dead_as_long_as_it_answers(start_worker: StartWorker) -> None:
    worker = await start_worker()
    dying = asyncio.create_task(worker.engine.wait_for_failure())
    await worker.ask({"prompt": "hi", **WHOLE, "max_tokens": 3})
    assert not dying.done()
    await worker.engine.stop()
    assert not dying.done()
    dying.cancel()
    await asyncio.gather(dying, return_exceptions=True)
