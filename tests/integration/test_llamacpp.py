"""llama.cpp for real, with a tiny random model: load, slots, KV entries that move, and both hosts."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("xllamacpp", reason="pip install xllamacpp")

from dynaplan.engines.llamacpp import engine as llamacpp_engine
from dynaplan.engines.llamacpp.engine import LlamaCppEngine
from dynaplan.engines.llamacpp.launch_line import KIND
from dynaplan.engines.port import EngineContext
from dynaplan.engines.server import engine as server_engine
from dynaplan.engines.server.child import EngineChild
from dynaplan.events.prefill_requests import RemotePrefillRequest
from dynaplan.process.port_leases import PortLease
from dynaplan.util.errors import PermanentError, TemporaryError, WorkerStartFailed
from tests.contract.engine_workers import TOKEN, Worker, starting
from tests.fakes.llama_server import write_program
from tests.fakes.polling import PATIENCE_S, eventually
from tests.fakes.processes import freeze
from tests.fakes.tiny_models import split_gguf

CHAT = "/v1/chat/completions"
WHOLE = {"temperature": 0, "seed": 1, "ignore_eos": True}

StartWorker = Callable[..., Awaitable[Worker]]


@pytest.fixture
async def start_worker(tiny_gguf: Path, tmp_path: Path) -> AsyncIterator[StartWorker]:
    async with starting(tmp_path) as start_any:

        async def start(role: str = "decode", **options: Any) -> Worker:
            section = {"model": str(tiny_gguf), "max-model-len": 2048, "threads": 1, "threads-http": 32}
            section |= {key.replace("_", "-"): value for key, value in options.items()}
            return await start_any("llamacpp", section, role=role)

        yield start


@pytest.fixture
async def pair(start_worker: StartWorker) -> tuple[Worker, Worker]:
    """A prefill and a decode worker of two slots each."""
    return (
        await start_worker("prefill", parallel=2),
        await start_worker("decode", parallel=2, remote_prefill=True),
    )


async def test_a_model_in_several_files_is_loaded_by_the_first(
    start_worker: StartWorker, tiny_gguf: Path, tmp_path: Path
) -> None:
    first, *others = split_gguf(tmp_path)
    assert len(others) > 1
    split = await start_worker(model=str(first))
    whole = await start_worker()
    answers = [await each.ask({"prompt": "hi", "max_tokens": 8, **WHOLE}) for each in (split, whole)]
    assert [status for status, _ in answers] == [200, 200]
    assert answers[0][1]["choices"] == answers[1][1]["choices"]


def chat(text: str, tokens: int = 8) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, **WHOLE}


async def reserve(worker: Worker, request_id: str, hand_off: Mapping[str, Any] | None = None) -> Any:
    """The fields for a request, as a frontend gets them."""
    url = worker.engine._context.address + "/kv_slots/reserve"
    async with worker.session.post(url, json={"request_id": request_id, "hand_off": hand_off}) as response:
        assert response.status == 200
        return (await response.json())["fields"]


async def release(worker: Worker, request_id: str) -> None:
    url = worker.engine._context.address + "/kv_slots/release"
    async with worker.session.post(url, json={"request_id": request_id}) as response:
        assert response.status == 200


async def answer_of(worker: Worker, request_id: str, body: Any, hand_off: Any) -> Any:
    """What a frontend does with a request that has been prefilled elsewhere."""
    fields = await reserve(worker, request_id, hand_off)
    try:
        status, answer = await worker.ask({**body, **fields}, CHAT)
        assert status == 200
        return answer
    finally:
        await release(worker, request_id)


def files_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


# -- KV entries that move ------------------------------------------------------------------------------


async def test_the_decode_worker_computes_at_most_one_token_of_a_prompt_that_was_prefilled_elsewhere(
    pair: tuple[Worker, Worker], tmp_path: Path
) -> None:
    prefill, decode = pair

    async def request(number: int) -> None:
        body, request_id = chat(f"Tell me story {number}. " * (3 + number)), f"r{number}"
        hand_off = await prefill.prefill(RemotePrefillRequest(request_id, path=CHAT, body=body))
        prompt_tokens = hand_off["kv_slot_file"]["tokens"]
        answer = await answer_of(decode, request_id, body, hand_off)
        prefill.engine.release(request_id)
        assert answer["timings"]["prompt_n"] <= 1
        assert answer["timings"]["cache_n"] >= prompt_tokens - 1
        assert answer["usage"]["prompt_tokens"] == prompt_tokens
        assert answer["usage"]["completion_tokens"] == 8

    await asyncio.gather(*(request(number) for number in range(8)))
    assert decode.engine.metrics()["dynaplan:remote_prefills_taken_total"] == 8
    assert decode.engine.metrics()["dynaplan:remote_prefill_fallbacks_total"] == 0
    await eventually(lambda: decode.engine._pool.reserved == decode.engine._pool.releasing == 0)
    assert files_in(tmp_path) == []


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, chat("What is it? " * 9, 24)), ("/v1/completions", {"prompt": "so it is " * 9})]
)
async def test_the_continuation_is_the_one_that_the_prefill_worker_would_give(
    start_worker: StartWorker, path: str, body: dict[str, Any]
) -> None:
    prefill = await start_worker("prefill", parallel=1)
    decode = await start_worker("decode", parallel=1, remote_prefill=True)
    body = {**body, **WHOLE, "max_tokens": 24}
    hand_off = await prefill.prefill(RemotePrefillRequest("r1", path=path, body=body))
    fields = await reserve(decode, "r1", hand_off)
    _, there = await decode.ask({**body, **fields}, path)
    _, here = await prefill.ask(body, path)
    assert here["timings"]["prompt_n"] == there["timings"]["prompt_n"] == 1
    assert here["choices"][0] == there["choices"][0]


async def test_a_file_is_held_until_it_is_released_and_stopping_waits_for_that(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    prefill = await start_worker("prefill")
    await prefill.prefill(RemotePrefillRequest("a", path=CHAT, body=chat("hello")))
    await prefill.prefill(RemotePrefillRequest("b", path=CHAT, body=chat("hello")))
    assert len(files_in(tmp_path)) == prefill.engine.metrics()["dynaplan:kv_hand_offs_held"] == 2
    assert all(name.startswith("ns_Worker_0.") for name in files_in(tmp_path))
    prefill.engine.release("a")
    prefill.engine.release("unknown")
    assert len(files_in(tmp_path)) == 1
    stopping = asyncio.create_task(prefill.engine.stop())
    prefill.engine.release("b")
    await stopping
    assert files_in(tmp_path) == []


async def test_work_that_comes_twice_leaves_no_file_behind(start_worker: StartWorker, tmp_path: Path) -> None:
    prefill = await start_worker("prefill")
    for _ in range(2):
        await prefill.prefill(RemotePrefillRequest("a", path=CHAT, body=chat("hello")))
    prefill.engine.release("a")
    assert files_in(tmp_path) == []


async def test_what_cannot_be_restored_the_decode_worker_computes_itself(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    decode = await start_worker("decode", remote_prefill=True)
    (tmp_path / "w.broken.kv").write_bytes(b"no KV entries")
    (tmp_path.parent / "outside.kv").write_bytes(b"no KV entries")
    hand_offs = [
        {"kv_slot_file": {"file": "w.gone.kv", "tokens": 5, "slots": 4}},
        {"kv_slot_file": {"file": "w.broken.kv", "tokens": 5, "slots": 4}},
        {"kv_slot_file": {"file": "../outside.kv", "tokens": 5, "slots": 4}},
        {"kv_slot_file": {"file": 7, "slots": 4}},
        {"kv_transfer_params": {"do_remote_prefill": True}},
    ]
    for number, hand_off in enumerate(hand_offs):
        answer = await answer_of(decode, f"r{number}", chat(f"{number} hello"), hand_off)
        assert answer["usage"]["completion_tokens"] == 8
    assert decode.engine.metrics()["dynaplan:remote_prefill_fallbacks_total"] == len(hand_offs)


async def test_a_hand_off_between_different_numbers_of_slots_says_what_to_change(
    start_worker: StartWorker, caplog: pytest.LogCaptureFixture
) -> None:
    prefill = await start_worker("prefill", parallel=1)
    decode = await start_worker("decode", parallel=2, remote_prefill=True)
    hand_off = await prefill.prefill(RemotePrefillRequest("r", path=CHAT, body=chat("hello")))
    answer = await answer_of(decode, "r", chat("hello"), hand_off)
    assert answer["usage"]["completion_tokens"] == 8
    assert "max-num-seqs" in caplog.text


async def test_a_prefill_that_is_cancelled_leaves_neither_a_file_nor_a_taken_slot(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    prefill = await start_worker("prefill", parallel=1, max_model_len=8192)
    request = RemotePrefillRequest("a", path=CHAT, body=chat("x" * 2000))
    work = asyncio.create_task(prefill.prefill(request))
    await eventually(prefill.requests, interval_s=0.001)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    await prefill.prefill(RemotePrefillRequest("b", path=CHAT, body=chat("hello")))
    prefill.engine.release("b")
    assert files_in(tmp_path) == []


# -- reserving -----------------------------------------------------------------------------------------


async def test_whoever_finds_all_slots_taken_waits_for_one_in_his_turn(start_worker: StartWorker) -> None:
    decode = await start_worker("decode", parallel=1, remote_prefill=True)
    assert decode.engine.card()["reserves"] is True
    await reserve(decode, "first")
    second = asyncio.create_task(reserve(decode, "second"))
    await eventually(lambda: decode.engine._pool.waiting == 1)
    third = asyncio.create_task(reserve(decode, "third"))
    await eventually(lambda: decode.engine.load().waiting_requests == 2)
    assert await decode.engine.count_requests() == 2
    assert not any(route.is_work and route.is_counted for route in decode.engine.routes())  # once is enough
    await release(decode, "first")
    assert await second == {"id_slot": 0, "cache_prompt": True}
    assert not third.done()
    await release(decode, "second")
    await third


async def test_without_prefill_workers_nothing_is_reserved(start_worker: StartWorker) -> None:
    worker = await start_worker()
    assert worker.engine.routes() == ()
    assert "reserves" not in worker.engine.card()
    assert worker.engine.card()["keep_alive"] is False


# -- load and the end ----------------------------------------------------------------------------------


async def test_the_load_tells_running_and_waiting_requests_and_kv_usage(start_worker: StartWorker) -> None:
    worker = await start_worker(parallel=2, max_model_len=1024, block_size=32, served_model_name="mine")
    bodies = [{"prompt": f"{n}" * 100, **WHOLE, "max_tokens": 900} for n in range(4)]
    answers = asyncio.gather(*(worker.ask(body) for body in bodies))

    async def is_full() -> bool:
        return await worker.requests() == 4

    await eventually(is_full)
    load = worker.engine.load()
    assert (load.running_requests, load.request_slots, load.kv_total_blocks) == (2, 2, 64)
    assert 0 < load.kv_usage <= 1
    assert load.kv_active_blocks >= 6
    assert {answer["model"] for _, answer in await answers} == {"mine"}
    assert worker.engine.card()["context_tokens"] == 1024
    await eventually(lambda: worker.engine.load().kv_active_blocks == 0)


async def test_many_waiting_requests_do_not_hide_the_load(start_worker: StartWorker) -> None:
    worker = await start_worker(parallel=1, threads_http=200)
    bodies = [{"prompt": "hi", **WHOLE, "max_tokens": 200} for _ in range(30)]
    answers = asyncio.gather(*(worker.ask(body) for body in bodies))

    async def are_counted() -> bool:
        return await worker.requests() > 20

    await eventually(are_counted)
    assert {status for status, _ in await answers} == {200}


CUT = """
import asyncio, sys
import aiohttp
from dynaplan.engines.llamacpp.engine import LlamaCppEngine
from dynaplan.engines.port import EngineContext

async def main():
    engine = LlamaCppEngine({"model": sys.argv[1], "threads": 1, "threads-http": 8}, EngineContext("w"))
    await engine.start()
    async with aiohttp.ClientSession() as session:
        body = {"prompt": "hi", "max_tokens": 3900, "ignore_eos": True, "stream": True}
        async with session.post(engine.url + "/v1/completions", json=body) as response:
            await response.content.readany()
            await engine.stop()
    print("stopped")

asyncio.run(main())
"""


async def test_a_process_that_must_stop_in_the_middle_of_a_request_ends(tiny_gguf: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CUT, str(tiny_gguf), stdout=asyncio.subprocess.PIPE
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), 30)
    finally:
        if process.returncode is None:
            process.kill()
    assert (process.returncode, output) == (0, b"stopped\n")


async def test_a_model_that_does_not_load_is_not_tried_again_and_llamacpp_says_why(
    tmp_path: Path, tiny_gguf: Path
) -> None:
    cut = tmp_path / "cut.gguf"
    await asyncio.to_thread(lambda: cut.write_bytes(tiny_gguf.read_bytes()[:800_000]))
    engine = LlamaCppEngine({"model": str(cut)}, EngineContext("w"))
    with pytest.raises(WorkerStartFailed, match=r"cut\.gguf") as raised:
        await engine.start()
    assert "corrupted or incomplete" in str(raised.value)
    await engine.stop()


# -- our own program -----------------------------------------------------------------------------------


@pytest.fixture
def child_of(tiny_gguf: Path, tmp_path: Path) -> Callable[..., EngineChild]:
    """Starts our own program; with a FIFO for a model it loads until the end of time."""

    def spawn(model: Path = tiny_gguf, port: int = 1) -> EngineChild:
        options = {"model": str(model), "threads": 1, "threads-http": 8, "max-model-len": 512}
        line = KIND.command(options, EngineContext("w", token=TOKEN), [port])
        return EngineChild.spawn(line.argv, line.environment)

    return spawn


async def test_a_port_that_is_taken_is_another_engine_s_and_another_one_is_tried(
    start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as free:
        ports = [each.getsockname()[1] for each in (taken, free)]
        leases = [PortLease((port,), (), tmp_path) for port in ports]
        free.close()
        monkeypatch.setattr(server_engine, "lease_ports", lambda *_, **__: leases.pop(0))
        worker = await start_worker()
    assert leases == []
    assert (await worker.ask({"prompt": "hi", "max_tokens": 2}))[0] == 200


async def test_sigterm_ends_the_program_at_once_also_while_it_loads(
    child_of: Callable[..., EngineChild], tmp_path: Path
) -> None:
    os.mkfifo(endless := tmp_path / "endless.gguf")
    child = child_of(endless)
    program = psutil.Process(await eventually(lambda: child.engine_pid))
    await eventually(lambda: str(endless) in " ".join(program.cmdline()))
    await eventually(lambda: len(program.threads()) > 1)  # llama.cpp's, so it is in its constructor
    program.terminate()
    assert await asyncio.wait_for(child.wait(), PATIENCE_S) == -signal.SIGTERM  # it would load for ever
    await child.stop(0)


async def test_a_model_that_loads_for_ever_is_given_up_after_start_timeout(tmp_path: Path) -> None:
    os.mkfifo(endless := tmp_path / "endless.gguf")
    engine = LlamaCppEngine({"model": str(endless), "start-timeout": 1.5}, EngineContext("w"))
    with pytest.raises(TemporaryError, match="start-timeout"):
        await engine.start()
    assert psutil.Process().children() == []


async def test_a_start_that_is_interrupted_while_it_loads_ends_the_program_at_once(tmp_path: Path) -> None:
    os.mkfifo(endless := tmp_path / "endless.gguf")
    engine = LlamaCppEngine({"model": str(endless)}, EngineContext("w"))
    starting = asyncio.create_task(engine.start())
    await eventually(lambda: len(psutil.Process().children()) == 1)
    starting.cancel()
    begun_s = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert time.monotonic() - begun_s < PATIENCE_S
    assert psutil.Process().children() == []


async def test_the_program_has_a_group_of_its_own_a_loopback_port_and_no_key_on_its_command_line(
    start_worker: StartWorker,
) -> None:
    worker = await start_worker()
    child = psutil.Process(worker.engine._child.engine_pid)
    assert os.getpgid(child.pid) == worker.engine._child.pid
    assert TOKEN not in " ".join(child.cmdline())
    listening = [each.laddr for each in child.net_connections("inet") if each.status == psutil.CONN_LISTEN]
    assert [address.ip for address in listening] == ["127.0.0.1"]
    assert worker.url == f"http://127.0.0.1:{listening[0].port}"


async def test_the_program_ends_with_a_worker_that_is_killed(tiny_gguf: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", ORPHAN, str(tiny_gguf), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    child = psutil.Process(int(await asyncio.wait_for(process.stdout.readline(), 30)))
    process.kill()
    await process.wait()
    await eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


ORPHAN = """
import asyncio, sys
from dynaplan.engines.llamacpp.engine import LlamaCppEngine
from dynaplan.engines.port import EngineContext

async def main():
    engine = LlamaCppEngine({"model": sys.argv[1], "threads": 1, "threads-http": 8}, EngineContext("w"))
    await engine.start()
    print(engine._child.engine_pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


async def test_options_reach_the_engine(start_worker: StartWorker) -> None:
    worker = await start_worker(
        n_predict=3,
        flash_attn="off",
        cache_type_k="f32",
        split_mode="none",
        max_num_batched_tokens=64,
        enable_prefix_caching=False,
        chat_template="{{ messages[0]['content'] }}",
    )
    for _ in range(2):
        _, answer = await worker.ask({"messages": [{"role": "user", "content": "hello"}], **WHOLE}, CHAT)
        assert answer["usage"]["completion_tokens"] == 3
        assert answer["timings"]["prompt_n"] == 5


# -- llama-server, as a child --------------------------------------------------------------------------


async def test_the_program_as_a_child_serves_hands_over_and_ends_with_its_worker(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    program = str(write_program(tmp_path))
    prefill = await start_worker("prefill", llama_server=program)
    decode = await start_worker("decode", llama_server=program, remote_prefill=True)
    body = chat("Tell me a story. " * 9)
    hand_off = await prefill.prefill(RemotePrefillRequest("r", path=CHAT, body=body))
    answer = await answer_of(decode, "r", body, hand_off)
    prefill.engine.release("r")
    assert answer["timings"]["prompt_n"] == 1
    child = psutil.Process(decode.engine._child.engine_pid)
    assert TOKEN not in " ".join(child.cmdline())
    await decode.engine.stop()
    assert not child.is_running()
    assert files_in(tmp_path) == ["llama-server"]


async def test_a_child_that_is_killed_is_an_engine_that_died(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    worker = await start_worker(llama_server=str(write_program(tmp_path)))
    dying = asyncio.create_task(worker.engine.wait_for_failure())
    os.kill(worker.engine._child.engine_pid, signal.SIGKILL)
    with pytest.raises(PermanentError, match="SIGKILL"):
        await asyncio.wait_for(dying, 5)


async def test_a_child_that_stands_still_is_hung(
    start_worker: StartWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await start_worker(llama_server=str(write_program(tmp_path)), hang_timeout=0.5)
    monkeypatch.setattr("dynaplan.engines.server.engine_watchdog.METRICS_TIMEOUT_S", 0.1)
    dying = asyncio.create_task(worker.engine.wait_for_failure())
    freeze(worker.engine._child.engine_pid)
    with pytest.raises(PermanentError, match="hang"):
        await asyncio.wait_for(dying, 20)


async def test_a_child_that_does_not_come_up_tells_its_last_lines(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    with pytest.raises(TemporaryError, match="nonsense"):
        await start_worker(llama_server=str(write_program(tmp_path)), nonsense=5)


# -- a model that is put away, and loaded again --------------------------------------------------------


def story(number: int) -> dict[str, Any]:
    return {
        "prompt": f"Tale {number}. " + f"So it went on for day {number}, and on. " * 20,
        "max_tokens": 4,
        **WHOLE,
    }


async def cached_tokens(worker: Worker, number: int) -> int:
    status, answer = await worker.ask(story(number))
    assert status == 200
    return int(answer["timings"]["cache_n"])


async def put_away(start_worker: StartWorker, *numbers: int, **options: Any) -> None:
    """Load the model, ask for those stories, and put it away as a worker does whose lease is revoked."""
    worker = await start_worker(**options)
    for number in numbers:
        await worker.ask(story(number))
    await worker.engine.stop(keeps_cache=True)


async def test_a_model_that_comes_back_does_not_compute_its_last_prompts_again(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    await put_away(start_worker, 1, 2)
    assert [each.split(".")[0] for each in files_in(tmp_path)] == ["saved", "saved"]
    worker = await start_worker()
    assert files_in(tmp_path) == []
    assert min([await cached_tokens(worker, number) for number in (1, 2)]) > 500


async def test_what_was_restored_and_not_asked_for_is_saved_again(start_worker: StartWorker) -> None:
    await put_away(start_worker, 1)
    await put_away(start_worker, 2)
    worker = await start_worker()
    assert min([await cached_tokens(worker, number) for number in (1, 2)]) > 500


@pytest.mark.parametrize("options", [{"max_model_len": 1024}, {"cache_type_k": "q8_0"}, {"saved_kv": 0}])
async def test_a_model_of_other_options_takes_nothing_over(
    start_worker: StartWorker, options: dict[str, Any]
) -> None:
    await put_away(start_worker, 1)
    assert await cached_tokens(await start_worker(**options), 1) == 0


async def test_no_more_is_saved_than_there_is_room_for(start_worker: StartWorker, tmp_path: Path) -> None:
    await put_away(start_worker, 1, 2, saved_kv="500KB")
    assert len(files_in(tmp_path)) == 1
    worker = await start_worker(saved_kv="500KB")
    assert await cached_tokens(worker, 2) > 500
    assert await cached_tokens(worker, 1) < 100


@pytest.mark.parametrize("fault", ["the directory is gone", "the engine stands still"])
async def test_a_save_that_fails_costs_a_line_of_the_log_and_a_bounded_time(
    start_worker: StartWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any, fault: str
) -> None:
    worker = await start_worker()
    await worker.ask(story(1))
    if fault == "the directory is gone":
        shutil.rmtree(tmp_path)
    else:
        monkeypatch.setattr(llamacpp_engine, "SAVE_TIMEOUT_S", 0.1)
        freeze(worker.engine._child.engine_pid)
    await worker.engine.stop(keeps_cache=True)
    assert "cannot save KV entries" in caplog.text
    assert fault == "the directory is gone" or files_in(tmp_path) == []


async def test_a_saved_file_that_was_cut_is_not_given_to_the_engine(
    start_worker: StartWorker, tmp_path: Path
) -> None:
    await put_away(start_worker, 1)
    (name,) = files_in(tmp_path)
    os.truncate(tmp_path / name, 1000)
    assert await cached_tokens(await start_worker(), 1) == 0
