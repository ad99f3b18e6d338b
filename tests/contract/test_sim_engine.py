"""What the simulated engine does beyond what every engine must do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dynaplan.engines import held_hand_offs, registry
from dynaplan.engines.port import EngineContext
from dynaplan.engines.sim.kv_transfer import HeldPrompts
from dynaplan.engines.timing_model.tokens import count_tokens
from dynaplan.events.prefill_requests import RemotePrefillRequest
from dynaplan.util.errors import ConfigError, PermanentError, RequestRefused
from tests.contract.engine_workers import Worker, raw_post, starting
from tests.fakes.polling import eventually

StartWorker = Callable[..., Awaitable[Worker]]


@pytest.fixture
async def start_worker(tmp_path: Path) -> AsyncIterator[StartWorker]:
    async with starting(tmp_path) as start_any:

        async def start(**options: Any) -> Worker:
            section = {key.replace("_", "-"): value for key, value in options.items()}
            return await start_any("sim", section)

        yield start


async def prefilled(worker: Worker, request: RemotePrefillRequest) -> Any:
    """The ``kv_transfer_params`` of one remote prefill."""
    return (await worker.prefill(request))["kv_transfer_params"]


def held_prompts(worker: Worker) -> float:
    """The computed prompts that wait to be taken."""
    return float(worker.engine.metrics()["dynaplan:kv_hand_offs_held"])


@pytest.mark.parametrize("speedup_ratio", [0, 50.0])
async def test_a_chat_streams_one_event_per_token_and_then_its_usage(
    start_worker: StartWorker, speedup_ratio: float
) -> None:
    worker = await start_worker(speedup_ratio=speedup_ratio)
    body = {
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 9,
        "model": "served-name",
        "stream_options": {"include_usage": True},
    }
    *tokens, usage = await worker.stream(body, "/v1/chat/completions")
    assert len(tokens) == 9
    assert tokens[0]["choices"][0]["delta"]["role"] == "assistant"
    assert [token["choices"][0]["finish_reason"] for token in tokens] == [None] * 8 + ["length"]
    assert {token["object"] for token in tokens} == {"chat.completion.chunk"}
    assert {token["model"] for token in tokens} == {"served-name"}
    assert len({token["id"] for token in tokens}) == 1
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 9
    text = "".join(token["choices"][0]["delta"]["content"] for token in tokens)
    assert text.startswith("This is dynaplan's simulated engine")
    assert count_tokens(text) == 9


async def test_without_a_limit_an_answer_ends_by_itself(start_worker: StartWorker) -> None:
    worker = await start_worker(speedup_ratio=0, max_model_len=1000)
    message = {"messages": [{"role": "user", "content": "hello"}]}
    _, answer = await worker.ask(message, "/v1/chat/completions")
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["message"]["role"] == "assistant"
    _, answer = await worker.ask({**message, "min_tokens": 300}, "/v1/chat/completions")
    assert answer["usage"]["completion_tokens"] == 300
    _, answer = await worker.ask({**message, "ignore_eos": True}, "/v1/chat/completions")
    assert answer["usage"]["total_tokens"] == 1000
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_a_repeated_prompt_tells_its_cached_tokens(start_worker: StartWorker) -> None:
    worker = await start_worker(speedup_ratio=0)
    body = {"prompt": list(range(100)), "max_tokens": 1}
    cached = [(await worker.ask(body))[1]["usage"]["prompt_tokens_details"]["cached_tokens"] for _ in "ab"]
    assert cached == [0, 96]


@pytest.mark.parametrize(
    "body",
    [
        b"{not json",
        b"[]",
        {"prompt": ""},
        {"prompt": "hi", "n": 2},
        {"prompt": "hi", "max_tokens": 0},
        {"prompt": "hi", "max_tokens": "many"},
        {"prompt": "hi", "max_tokens": 100},
        {"prompt": "a long prompt " * 100},
        {"prompt": "hi", "kv_transfer_params": {"do_remote_prefill": True, "remote_host": "example.com"}},
    ],
)
async def test_a_wrong_request_is_answered_400_in_openais_shape(start_worker: StartWorker, body: Any) -> None:
    worker = await start_worker(speedup_ratio=0, max_model_len=64)
    status, answer = await worker.ask(body)
    assert status == 400
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["message"]
    assert worker.engine.load().running_requests == 0


async def test_the_model_is_listed(start_worker: StartWorker) -> None:
    worker = await start_worker(model="me/mine", max_model_len=512)
    async with worker.session.get(worker.url + "/v1/models") as response:
        (model,) = (await response.json())["data"]
    assert (model["id"], model["max_model_len"]) == ("me/mine", 512)
    assert worker.engine.card()["context_tokens"] == 512


async def test_tokens_arrive_at_the_measured_pace(start_worker: StartWorker) -> None:
    worker = await start_worker()
    loop = asyncio.get_running_loop()
    begin_s = loop.time()
    await worker.stream({"prompt": "x" * 12_604, "max_tokens": 41})  # 3151 tokens: measured 63.2 ms
    elapsed_s = loop.time() - begin_s
    assert elapsed_s >= 0.0632 + 40 * 0.0043


async def test_a_hand_off_whose_client_has_left_is_let_go(start_worker: StartWorker) -> None:
    prefill = await start_worker(speedup_ratio=0)
    assert prefill.engine.waits_for_release
    for request_id in ("r1", "r2", "r1"):  # r1 was delivered twice
        await prefilled(prefill, RemotePrefillRequest(request_id, body={"prompt": "x" * 400}))
    assert held_prompts(prefill) == 3
    prefill.engine.release("r")
    assert held_prompts(prefill) == 3
    prefill.engine.release("r1")
    assert held_prompts(prefill) == 1
    prefill.engine.release("r2")
    prefill.engine.release("r2")
    assert held_prompts(prefill) == prefill.engine.load().kv_active_blocks == 0


async def test_a_client_that_leaves_the_queue_frees_its_place(start_worker: StartWorker) -> None:
    worker = await start_worker(max_num_seqs=1)
    body = {"prompt": "hi", "max_tokens": 10_000}
    async with raw_post(worker, body):
        await eventually(lambda: worker.engine.load().running_requests == 1)
        async with raw_post(worker, body):
            await eventually(lambda: worker.engine.load().waiting_requests == 1)
        await eventually(lambda: worker.engine.load().waiting_requests == 0)
        assert worker.engine.load().running_requests == 1


async def test_a_remote_prefill_is_taken_by_the_decode_worker(start_worker: StartWorker) -> None:
    prefill, decode = await start_worker(speedup_ratio=0), await start_worker(speedup_ratio=0)
    body = {"messages": [{"role": "user", "content": "x" * 400}], "max_tokens": 5}
    path = "/v1/chat/completions"
    params = await prefilled(prefill, RemotePrefillRequest("r1", path=path, body=body))
    assert params["remote_num_tokens"] > 100
    assert held_prompts(prefill) == 1
    assert prefill.engine.load().kv_active_blocks == len(params["remote_block_ids"][0])
    alone = await decode.stream(body, path)
    events = await decode.stream({**body, "kv_transfer_params": params}, path)
    assert [e["choices"] for e in events] == [e["choices"] for e in alone]
    assert held_prompts(prefill) == prefill.engine.load().kv_active_blocks == 0
    metrics = decode.engine.metrics()
    assert metrics["dynaplan:remote_prefills_taken_total"] == 1
    assert metrics["dynaplan:remote_prefill_fallbacks_total"] == 0


async def test_kv_that_comes_from_elsewhere_saves_the_prefill_time(start_worker: StartWorker) -> None:
    prefill, decode = await start_worker(speedup_ratio=0), await start_worker()
    body = {"prompt": "x" * 40_000, "max_tokens": 1}  # 10 000 tokens: 220 ms of prefill
    params = await prefilled(prefill, RemotePrefillRequest("r1", body=body))
    loop = asyncio.get_running_loop()
    begin_s = loop.time()
    await decode.ask({**body, "kv_transfer_params": params})
    remote_s = loop.time() - begin_s
    metrics = decode.engine.metrics()
    assert 0.021 < metrics["dynaplan:kv_transfer_seconds_total"] < remote_s
    assert metrics["vllm:external_prefix_cache_hits_total"] == 10_000
    assert metrics["vllm:prefix_cache_hits_total"] == 0


async def test_a_hand_off_can_be_taken_once_and_then_the_decode_worker_prefills_itself(
    start_worker: StartWorker,
) -> None:
    prefill, decode = await start_worker(speedup_ratio=0), await start_worker(speedup_ratio=0)
    body = {"prompt": "x" * 400, "max_tokens": 3}
    params = await prefilled(prefill, RemotePrefillRequest("r1", body=body))
    for _ in range(2):
        status, answer = await decode.ask({**body, "kv_transfer_params": params})
        assert (status, answer["usage"]["completion_tokens"]) == (200, 3)
    assert decode.engine.metrics()["dynaplan:remote_prefill_fallbacks_total"] == 1


async def test_without_the_prefill_worker_the_decode_worker_prefills_itself(
    start_worker: StartWorker,
) -> None:
    decode = await start_worker(speedup_ratio=0)
    params = {
        "do_remote_prefill": True,
        "remote_host": "127.0.0.1",
        "remote_port": 1,
        "remote_request_id": "gone",
        "remote_num_tokens": 100,
    }
    status, answer = await decode.ask({"prompt": "x" * 400, "max_tokens": 3, "kv_transfer_params": params})
    assert (status, answer["usage"]["completion_tokens"]) == (200, 3)
    assert decode.engine.load().waiting_requests == 0


async def test_taking_needs_the_worker_token(start_worker: StartWorker) -> None:
    prefill = await start_worker(speedup_ratio=0)
    params = await prefilled(prefill, RemotePrefillRequest("r1", prompt_token_ids=(1, 2, 3)))
    url = f"{prefill.url}/kv/{params['remote_request_id']}/take"
    async with aiohttp.ClientSession() as stranger, stranger.post(url) as response:
        assert response.status == 401
    assert held_prompts(prefill) == 1


async def test_stopping_waits_until_hand_offs_are_taken(start_worker: StartWorker) -> None:
    prefill = await start_worker(speedup_ratio=0)
    params = await prefilled(prefill, RemotePrefillRequest("r1", prompt_token_ids=(1, 2, 3)))
    stopping = asyncio.create_task(prefill.engine.stop())
    async with prefill.session.post(f"{prefill.url}/kv/{params['remote_request_id']}/take") as response:
        assert response.status == 200
    await stopping


def test_a_hand_off_is_held_as_long_as_any_engine_holds_one() -> None:
    assert HeldPrompts("w", "http://127.0.0.1:1", lambda _: None).holds._hold_s == held_hand_offs.HOLD_S == 60


async def test_a_hand_off_that_nobody_takes_expires(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = await start_worker(speedup_ratio=0)
    monkeypatch.setattr(prefill.engine._held.holds, "_hold_s", 0.02)
    await prefilled(prefill, RemotePrefillRequest("r1", prompt_token_ids=(1, 2, 3)))
    await prefill.engine.stop()
    assert prefill.engine.load().kv_active_blocks == 0
    assert prefill.engine.metrics()["dynaplan:kv_hand_offs_expired_total"] == 1


async def test_a_cancelled_prefill_leaves_nothing_behind(start_worker: StartWorker) -> None:
    prefill = await start_worker()
    task = asyncio.create_task(prefilled(prefill, RemotePrefillRequest("r1", prompt_token_ids=(7,) * 9000)))
    await eventually(lambda: prefill.engine.load().running_requests == 1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert prefill.engine.load().kv_active_blocks == 0
    assert held_prompts(prefill) == 0


async def test_a_prompt_that_cannot_be_prefilled_is_a_permanent_error(start_worker: StartWorker) -> None:
    prefill = await start_worker(max_model_len=64)
    with pytest.raises(PermanentError):
        await prefilled(prefill, RemotePrefillRequest("r1", prompt_token_ids=(1,) * 100))
    with pytest.raises(PermanentError):
        await prefilled(prefill, RemotePrefillRequest("r2", body={"prompt": 5}))


async def test_stopping_cuts_streams_so_that_nobody_takes_them_for_complete(
    start_worker: StartWorker,
) -> None:
    worker = await start_worker()
    async with raw_post(worker, {"prompt": "hi", "max_tokens": 10_000, "stream": True}) as reader:
        await reader.readuntil(b"data: ")
        await worker.engine.stop()
        rest = await asyncio.wait_for(reader.read(), 5)
    assert b"[DONE]" not in rest
    assert b"length" not in rest


async def test_a_failing_model_answers_500_instead_of_hanging(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await start_worker(speedup_ratio=0)

    def broken(_horizon_s: float) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(worker.engine._model, "step", broken)
    for _ in range(2):
        status, answer = await worker.ask({"prompt": "hi", "max_tokens": 3})
        assert (status, answer["error"]["type"]) == (500, "server_error")
    with pytest.raises(PermanentError, match="a bug"):
        await worker.engine.wait_for_failure()


async def test_an_idle_engine_has_no_timer(start_worker: StartWorker) -> None:
    worker = await start_worker()
    await worker.stream({"prompt": "hi", "max_tokens": 3})
    driver = worker.engine._driver
    assert driver is not None
    await eventually(lambda: driver._timer is None)


def test_the_registry_names_the_engines() -> None:
    engine = registry.make_engine("sim", {}, EngineContext("w"))
    assert engine.card()["model"] == "nvidia/Llama-3.1-8B-Instruct-FP8"
    with pytest.raises(ConfigError, match="sim"):
        registry.make_engine("vlmm", {}, EngineContext("w"))


@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ({"max_tokens": 0}, "expected a whole number, at least 1"),
        ({"max_tokens": 100_000_000}, "leaves room for"),
        ({"n": 2}, "one answer per request"),
    ],
)
async def test_a_prompt_that_no_worker_could_compute_is_the_clients_fault(
    start_worker: StartWorker, field: dict[str, int], reason: str
) -> None:
    prefill = await start_worker(speedup_ratio=0)
    with pytest.raises(RequestRefused, match=reason) as caught:
        await prefilled(prefill, RemotePrefillRequest("r1", body={"prompt": "hi", **field}))
    assert caught.value.status == 400
