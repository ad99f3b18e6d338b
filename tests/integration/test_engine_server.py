"""The engine that is a child of ours, against a fake vLLM server (see ``tests.fakes.engine_server``)."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dynaplan.engines import held_hand_offs, sglang
from dynaplan.engines.port import EngineContext
from dynaplan.engines.server import child, engine_watchdog
from dynaplan.engines.server.engine import ServerEngine
from dynaplan.engines.vllm import KIND
from dynaplan.events.prefill_requests import RemotePrefillRequest
from dynaplan.process.process_table import group_members
from dynaplan.util.errors import (
    ConfigError,
    PermanentError,
    RequestRefused,
    TemporaryError,
    WorkerStartFailed,
)
from tests.fakes.engine_server import COMMAND
from tests.fakes.polling import eventually
from tests.fakes.processes import freeze

TOKEN = "the-worker-token"
Make = Callable[..., ServerEngine]
Start = Callable[..., Awaitable[ServerEngine]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DYNAPLAN_NODE_DIR", str(tmp_path / "node"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(engine_watchdog, "METRICS_POLL_S", 0.02)
    monkeypatch.setattr(child, "READY_POLL_S", 0.02)


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    engines: list[ServerEngine] = []

    def new(options: dict[str, Any] | None = None, *, role: str = "decode") -> ServerEngine:
        options = {"model": "/models/m", "served-model-name": "m", "vllm-command": COMMAND, **(options or {})}
        options = {"shutdown-timeout": 1, "max-num-seqs": 8, "fake-core-s": 30, **options}
        context = EngineContext("ns_w", role, token=TOKEN, scratch_dir=str(tmp_path))
        engines.append(ServerEngine(KIND, options, context))
        return engines[-1]

    yield new
    for engine in engines:
        await engine._end(0)


@pytest.fixture
def start(make: Make) -> Start:
    async def started(options: dict[str, Any] | None = None, *, role: str = "decode") -> ServerEngine:
        engine = make(options, role=role)
        await engine.start()
        return engine

    return started


async def fetch(engine: ServerEngine, path: str, body: Any = None, method: str = "POST") -> Any:
    """The JSON answer; None for an empty one."""
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.request(method, engine.url + path, json=body) as response,
    ):
        return json.loads(await response.read() or b"null")


async def look(engine: ServerEngine, path: str) -> Any:
    return await fetch(engine, path, method="GET")


def prompt(request_id: str = "r1", **body: Any) -> RemotePrefillRequest:
    return RemotePrefillRequest(request_id, body={"model": "m", "prompt": [1] * 40, **body})


class HandedOver:
    """Takes what is handed over."""

    def __init__(self) -> None:
        self.fields: list[Mapping[str, Any]] = []

    async def __call__(self, fields: Mapping[str, Any], cached_tokens: int | None = None, /) -> None:
        self.fields.append(fields)


async def no_hand_over(_: Mapping[str, Any], cached_tokens: int | None = None, /) -> None:
    raise AssertionError("nothing may be handed over")


# -- start ---------------------------------------------------------------------------------------------


async def test_before_its_start_it_has_no_routes_and_no_load(make: Make) -> None:
    engine = make()
    assert engine.waits_for_release
    assert engine.routes() == ()
    assert engine.load().running_requests == 0


async def test_started_it_answers_at_its_address_and_tells_its_model(start: Start) -> None:
    engine = await start()
    card = {"model": "m", "context_tokens": 2048, "tokenizer": "/models/m", "kv_block_tokens": 16}
    assert engine.card() == card | {"engine": "vllm", "role": "decode"}
    answer = await fetch(engine, "/v1/completions", {"model": "m", "prompt": "hi", "max_tokens": 3})
    assert answer["usage"]["completion_tokens"] == 3


async def test_the_token_opens_the_engine_and_is_on_no_command_line(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DYNAPLAN_WORKER_TOKEN", TOKEN)
    engine = await start()
    async with aiohttp.ClientSession() as stranger, stranger.get(engine.url + "/v1/models") as response:
        assert response.status == 401
    seen = await look(engine, "/fake/environment")
    assert TOKEN not in " ".join(seen["argv"])
    assert [name for name, value in seen["env"].items() if value == TOKEN] == ["VLLM_API_KEY"]


async def test_two_engines_get_different_ports(start: Start) -> None:
    first, second = await asyncio.gather(start(), start())
    assert first.url != second.url


async def test_an_engine_that_ends_at_its_start_is_told_with_its_last_lines(make: Make) -> None:
    engine = make({"fake-dies-at-start": "CUDA out of memory"})
    with pytest.raises(TemporaryError, match=r"(?s)exited with 1 while starting.*CUDA out of memory"):
        await engine.start()


async def test_a_flag_that_the_engine_does_not_know_is_never_tried_again(make: Make) -> None:
    engine = make({"no-such-flag": True})
    with pytest.raises(WorkerStartFailed, match="unrecognized arguments: --no-such-flag"):
        await engine.start()


async def test_a_wrong_option_is_found_before_anything_starts(make: Make) -> None:
    with pytest.raises(ConfigError, match="hang-timeout is 'long'"):
        make({"hang-timeout": "long"})


async def test_a_program_that_is_not_there_is_told(make: Make) -> None:
    with pytest.raises(TemporaryError, match="cannot run no-such-vllm"):
        await make({"vllm-command": "no-such-vllm serve"}).start()


async def test_a_port_that_was_taken_meanwhile_is_tried_once_more(start: Start, tmp_path: Path) -> None:
    engine = await start({"fake-kept-port": 1, "fake-counter": str(tmp_path / "starts")})
    assert (tmp_path / "starts").read_text() == ".."
    assert engine.card()["model"] == "m"


async def test_a_port_that_is_taken_again_and_again_is_given_up(make: Make, tmp_path: Path) -> None:
    with pytest.raises(TemporaryError, match="port taken"):
        await make({"fake-kept-port": 9, "fake-counter": str(tmp_path / "starts")}).start()


async def test_an_engine_that_takes_too_long_to_start_is_killed(make: Make) -> None:
    engine = make({"fake-start-s": 60, "start-timeout": 0.3})
    with pytest.raises(TemporaryError, match=r"not ready within 0.3 s \(start-timeout\)"):
        await engine.start()
    assert engine._child is None


async def test_a_cancelled_start_leaves_no_process_and_no_lease(make: Make, tmp_path: Path) -> None:
    engine = make({"fake-start-s": 60})
    starting = asyncio.create_task(engine.start())
    await eventually(lambda: engine._child)
    assert engine._child is not None
    pid = engine._child.pid
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert group_members(pid) == ()
    assert list((tmp_path / "node").glob("port-*")) == []


async def test_a_stop_that_is_cancelled_at_any_moment_leaves_no_process_no_lease_and_no_connection(
    start: Start, tmp_path: Path
) -> None:
    for steps in range(1, 8):
        engine = await start()
        assert engine._child is not None
        pid = engine._child.pid
        stopping = asyncio.create_task(engine.stop())
        for _ in range(steps):
            await asyncio.sleep(0)
        stopping.cancel()
        await asyncio.gather(stopping, return_exceptions=True)
        assert group_members(pid) == ()
        assert list((tmp_path / "node").glob("port-*")) == []
        assert engine._client._http._pool is None


# -- load ----------------------------------------------------------------------------------------------


async def test_its_load_follows_what_it_says(start: Start) -> None:
    engine = await start({"fake-slots": 2})
    await fetch(engine, "/fake/hang")
    bodies = [{"model": "m", "prompt": "hi", "max_tokens": 1}] * 3
    asking = [asyncio.create_task(fetch(engine, "/v1/completions", body)) for body in bodies]
    await eventually(lambda: engine.load().waiting_requests == 1)
    load = engine.load()
    assert (load.running_requests, load.request_slots) == (2, 8)
    assert (load.kv_usage, load.kv_active_blocks, load.kv_total_blocks) == (1.0, 400, 400)
    assert await engine.count_requests() == 3
    await fetch(engine, "/fake/go-on")
    await asyncio.gather(*asking)
    assert await engine.count_requests() == 0
    assert engine.metrics()["vllm:prompt_tokens_total"] > 0


async def test_without_an_answer_its_requests_are_unknown(start: Start) -> None:
    engine = await start()
    assert engine._child is not None
    os.kill(engine._child.engine_pid, signal.SIGKILL)
    await engine._child.wait()
    with pytest.raises(TemporaryError):
        await engine.count_requests()


# -- failure -------------------------------------------------------------------------------------------


async def test_a_killed_engine_has_died_and_its_core_with_it(start: Start) -> None:
    engine = await start()
    assert engine._child is not None
    pid = engine._child.pid
    assert len(group_members(pid)) == 3  # the shim, the server, its core
    os.kill(engine._child.engine_pid, signal.SIGKILL)
    with pytest.raises(PermanentError, match="vllm was killed by SIGKILL"):
        await asyncio.wait_for(engine.wait_for_failure(), 10)
    await eventually(lambda: group_members(pid) == ())


async def test_an_engine_that_ends_by_itself_has_died_and_says_its_last_words(start: Start) -> None:
    engine = await start()
    dying = asyncio.create_task(engine.wait_for_failure())
    with pytest.raises(aiohttp.ClientError):
        await fetch(engine, "/fake/die")
    with pytest.raises(PermanentError, match=r"(?s)exited with 3.*startup complete"):
        await asyncio.wait_for(dying, 10)


async def test_running_requests_without_progress_are_a_death(start: Start) -> None:
    engine = await start({"hang-timeout": 0.2})
    await fetch(engine, "/fake/hang")
    body = {"model": "m", "prompt": "hi"}
    asking = asyncio.create_task(fetch(engine, "/v1/completions", body))
    with pytest.raises(PermanentError, match="vllm hangs"):
        await asyncio.wait_for(engine.wait_for_failure(), 10)
    await asyncio.gather(asking, return_exceptions=True)


async def test_a_stopped_process_hangs(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_watchdog, "METRICS_TIMEOUT_S", 0.1)
    engine = await start({"hang-timeout": 0.3})
    assert engine._child is not None
    freeze(engine._child.engine_pid)
    with pytest.raises(PermanentError, match="vllm hangs"):
        await asyncio.wait_for(engine.wait_for_failure(), 10)


async def test_being_told_to_stop_is_no_death(start: Start) -> None:
    engine = await start()
    dying = asyncio.create_task(engine.wait_for_failure())
    await asyncio.sleep(0)
    await engine.stop()
    assert not dying.done()
    dying.cancel()


# -- prefill -------------------------------------------------------------------------------------------


async def test_a_prompt_is_computed_and_handed_over_in_vllms_words(start: Start) -> None:
    engine = await start(role="prefill")
    handed = HandedOver()
    unwanted = {
        "min_tokens": 5,
        "max_completion_tokens": 50,
        "n": 3,
        "stream_options": {"include_usage": True},
    }
    request = prompt("r7", stream=True, model="alias", temperature=0.5, **unwanted)
    trace = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"}
    await engine.prefill(replace(request, trace=trace), handed)
    (fields,) = handed.fields
    assert fields["kv_transfer_params"]["do_remote_prefill"] is True
    assert fields["kv_transfer_params"]["remote_num_tokens"] == 40
    environment = (await look(engine, "/fake/environment"))["env"]
    assert fields["kv_transfer_params"]["remote_port"] == int(environment["VLLM_NIXL_SIDE_CHANNEL_PORT"])
    (body,) = await look(engine, "/fake/requests")
    assert body["headers"] == {"x-request-id": "r7", **trace}
    assert (body["model"], body["temperature"], body["prompt"]) == ("m", 0.5, [1] * 40)
    assert (body["stream"], body["max_tokens"], body["max_completion_tokens"], body["n"]) == (False, 1, 1, 1)
    assert "min_tokens" not in body and "stream_options" not in body


async def test_a_chat_is_prefilled_as_a_chat(start: Start) -> None:
    engine = await start(role="prefill")
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    await engine.prefill(RemotePrefillRequest("r1", path="/v1/chat/completions", body=body), HandedOver())
    assert (await look(engine, "/fake/requests"))[0]["path"] == "/v1/chat/completions"


async def test_a_prompt_that_the_engine_refuses_is_never_computed(start: Start) -> None:
    engine = await start(role="prefill")
    await fetch(engine, "/fake/refuse")
    with pytest.raises(RequestRefused, match="not to its taste"):
        await engine.prefill(prompt(), no_hand_over)


async def test_a_prompt_that_the_engine_fails_at_may_be_computed_elsewhere(start: Start) -> None:
    engine = await start(role="prefill")
    await fetch(engine, "/fake/fail")
    with pytest.raises(TemporaryError, match="500"):
        await engine.prefill(prompt(), no_hand_over)
    assert engine._child is not None
    os.kill(engine._child.engine_pid, signal.SIGKILL)
    await engine._child.wait()
    with pytest.raises(TemporaryError, match="did not answer"):
        await engine.prefill(prompt(), no_hand_over)


async def test_stopping_waits_until_the_kv_entries_have_been_read(start: Start) -> None:
    engine = await start(role="prefill")
    await engine.prefill(prompt("r1"), HandedOver())
    await engine.prefill(prompt("r2"), HandedOver())
    assert engine.metrics()["dynaplan:kv_hand_offs_held"] == 2
    stopping = asyncio.create_task(engine.stop())
    engine.release("r1")
    engine.release("somebody else's")
    await look(engine, "/health")
    assert not stopping.done()
    engine.release("r2")
    await asyncio.wait_for(stopping, 10)


async def test_a_release_before_the_prefill_has_returned_counts(start: Start) -> None:
    engine = await start(role="prefill")

    async def release_at_once(_: Mapping[str, Any], cached_tokens: int | None = None, /) -> None:
        engine.release("r1")

    await engine.prefill(prompt("r1"), release_at_once)
    assert engine.metrics()["dynaplan:kv_hand_offs_held"] == 0


async def test_a_hand_off_that_nobody_was_told_of_is_not_held(start: Start) -> None:
    engine = await start(role="prefill")

    async def fail(_: Mapping[str, Any], cached_tokens: int | None = None, /) -> None:
        raise TemporaryError("the queue is away")

    with pytest.raises(TemporaryError):
        await engine.prefill(prompt(), fail)
    assert engine.metrics()["dynaplan:kv_hand_offs_held"] == 0


async def test_a_hand_off_that_nobody_releases_expires(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make(role="prefill")
    engine._holds = held_hand_offs.HeldHandOffs(hold_s=0.05)
    await engine.start()
    await engine.prefill(prompt(), HandedOver())
    await asyncio.wait_for(engine.stop(), 10)
    assert engine.metrics()["dynaplan:kv_hand_offs_expired_total"] == 1


async def test_stopping_does_not_wait_for_hand_offs_of_a_dead_engine(start: Start) -> None:
    engine = await start(role="prefill")
    await engine.prefill(prompt(), HandedOver())
    assert engine._child is not None
    stopping = asyncio.create_task(engine.stop())
    await asyncio.sleep(0)
    os.kill(engine._child.engine_pid, signal.SIGKILL)
    await asyncio.wait_for(stopping, 10)


# -- stop ----------------------------------------------------------------------------------------------


async def test_stopped_it_leaves_no_process_no_lease_and_no_port(start: Start, tmp_path: Path) -> None:
    engine = await start()
    assert engine._child is not None
    pid, port = engine._child.pid, int(engine.url.rpartition(":")[2])
    await engine.stop()
    assert group_members(pid) == ()
    assert list((tmp_path / "node").glob("port-*")) == []
    with socket.socket() as probe, pytest.raises(ConnectionRefusedError):
        probe.connect(("127.0.0.1", port))


async def test_one_that_ignores_sigterm_is_killed_with_its_core(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await start({"fake-ignores-sigterm": True})
    object.__setattr__(engine, "_kind", _impatient(engine))
    assert engine._child is not None
    pid = engine._child.pid
    await engine.stop()
    assert group_members(pid) == ()


async def test_one_whose_process_cannot_be_looked_up_is_told_to_end_all_the_same(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = await start()
    assert engine._child is not None
    pid = engine._child.pid

    def out_of_descriptors(_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(child.EngineChild, "engine_pid", property(out_of_descriptors))
    await engine.stop()
    assert group_members(pid) == ()


def _impatient(engine: ServerEngine) -> Any:
    kind = copy(engine._kind)
    kind.term_grace_s = 0.05
    return kind


async def test_stopping_one_that_never_started_or_twice_does_not_raise(make: Make, start: Start) -> None:
    await make().stop()
    engine = await start()
    await asyncio.gather(engine.stop(), engine.stop())
    await engine.stop()


async def test_sglangs_file_with_the_key_is_there_for_its_owner_while_the_server_runs(tmp_path: Path) -> None:
    given = EngineContext("ns_VllmWorker", token=TOKEN, scratch_dir=str(tmp_path))
    engine = sglang.KIND.make({"model": "m", "sglang-command": COMMAND}, given)
    file = tmp_path / "ns_VllmWorker.sglang.yaml"
    try:
        await engine.start()
        assert file.stat().st_mode & 0o777 == 0o600
        assert engine.card()["model"] == "m"
    finally:
        await engine.stop()
    assert not file.exists()
