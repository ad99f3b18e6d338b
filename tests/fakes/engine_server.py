"""A small engine server that stands in for vLLM: ``python -m tests.fakes.engine_server --port P ...``.

What it copies of vLLM 0.32, each seen on the real one:

- flags: ``--host --port --model --served-model-name --shutdown-timeout --kv-transfer-config``; others are
  taken and ignored, but ``--no-such-flag`` ends it with exit code 2 and argparse's last line; a taken port
  with 1
- the key in ``VLLM_API_KEY`` is asked for below ``/v1`` only
- ``/health`` 200 from when it is up, and still while it drains; ``/metrics`` with vLLM's names and labels
- ``/v1/models`` with ``max_model_len``; completions and chat, streamed or not, one event per token,
  ``[DONE]``; 404 for another model's name
- a request with ``kv_transfer_params.do_remote_decode`` is answered with those to take its KV blocks by;
  one with ``do_remote_prefill`` computes no prompt token (``prompt_tokens_by_source_total``)
- SIGTERM: with ``--shutdown-timeout`` streams end whole, new requests get a 500, the port stays open; without
  it streams end with ``finish_reason: "abort"`` and ``[DONE]``, HTTP 200
- with ``VLLM_SERVER_DEV_MODE=1`` (read in 0.32; levels 1 and 2 are not run, they need a GPU):
  ``/sleep?level=0|1|2``, ``/wake_up``, ``/pause``, ``/resume``, ``/is_paused``; sleep pauses the scheduler,
  so that ``/is_paused`` says so; requests in flight are aborted, later ones wait unseen in its metrics;
  only sleep shows in ``vllm:engine_sleep_state``; one that is resumed while its weights are away fails
- it has a child (the EngineCore), which lives on when only the server is killed

What is its own: ``--fake-token-s`` (seconds per token), ``--fake-slots`` (requests at once, the others
wait), ``--fake-start-s``, ``--fake-wake-s``, ``--fake-core-s`` (how long the child lives at most),
``--fake-ignores-sigterm``,
``--fake-dies-at-start TEXT`` (prints it, ends with 1), ``--fake-kept-port N`` (the first N starts, counted
in the file ``--fake-counter``, find their port taken), and ``POST /fake/{hang|go-on|die|fail|refuse}``:
tokens stop coming while everything else answers; they come again; exit code 3; every answer is a 500; every
answer is a 400. ``GET /fake/requests`` lists the bodies it got, ``/fake/environment`` what it was started
with.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
from asyncio import StreamReader, StreamWriter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-I", "-S", str(Path(__file__).resolve())]
"""What to give as ``vllm-command``. The standard library alone makes it start in a twentieth of a second."""

BLOCK_TOKENS, TOTAL_BLOCKS, CONTEXT_TOKENS = 16, 400, 2048


def main() -> None:
    options = _options()
    if options.fake_dies_at_start:
        sys.exit(options.fake_dies_at_start)
    if options.fake_kept_port and _starts(options.fake_counter) <= options.fake_kept_port:
        sys.exit("OSError: [Errno 98] error while attempting to bind on address: address already in use")
    core = subprocess.Popen(["sleep", str(options.fake_core_s)])
    try:
        code = asyncio.run(Server(options, core.pid).run())
    finally:
        core.kill()
        core.wait()
    sys.exit(code)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default="fake")
    parser.add_argument("--served-model-name", default="")
    parser.add_argument("--shutdown-timeout", type=float, default=0)
    parser.add_argument("--kv-transfer-config", type=json.loads, default=None)
    parser.add_argument("--fake-token-s", type=float, default=0.002)
    parser.add_argument("--fake-slots", type=int, default=8)
    parser.add_argument("--fake-start-s", type=float, default=0)
    parser.add_argument("--fake-core-s", type=float, default=60)
    parser.add_argument("--fake-ignores-sigterm", action="store_true")
    parser.add_argument("--fake-dies-at-start", default="")
    parser.add_argument("--fake-kept-port", type=int, default=0)
    parser.add_argument("--fake-wake-s", type=float, default=0.1)
    parser.add_argument("--fake-counter", type=Path)
    options, others = parser.parse_known_args()
    if "--no-such-flag" in others:
        parser.error("unrecognized arguments: --no-such-flag")
    return options


def _starts(counter: Path) -> int:
    with counter.open("a+") as file:
        file.write(".")
        file.seek(0)
        return len(file.read())


@dataclass
class Request:
    """One request, and where its answer goes."""

    method: str
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    writer: StreamWriter

    async def answer(self, status: int, document: Any = None) -> None:
        text = document if isinstance(document, str) else json.dumps(document)
        data = b"" if document is None else text.encode()
        self.writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n".encode())
        self.writer.write(b"Connection: close\r\nContent-Type: application/json\r\n\r\n" + data)
        await self.writer.drain()

    async def error(self, status: int, message: str, kind: str) -> None:
        document = {"message": message, "type": kind, "param": None, "code": status}
        await self.answer(status, {"error": document})

    async def begin_stream(self) -> None:
        self.writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n")
        self.writer.write(b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n")

    async def chunk(self, data: bytes) -> None:
        self.writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        await self.writer.drain()

    async def event(self, document: dict[str, Any]) -> None:
        await self.chunk(b"data: " + json.dumps(document).encode() + b"\n\n")


async def _read(reader: StreamReader, writer: StreamWriter) -> Request:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = head[0].split(" ")
    pairs = (line.partition(":") for line in head[1:] if line)
    headers = {name.lower(): value.strip() for name, _, value in pairs}
    data = await reader.readexactly(int(headers.get("content-length", 0)))
    return Request(method, path, headers, json.loads(data or b"null") or {}, writer)


class Server:
    """The state of one fake engine."""

    def __init__(self, options: argparse.Namespace, core_pid: int) -> None:
        self.options = options
        self.core_pid = core_pid
        self.model = options.served_model_name or options.model
        self.slots = asyncio.Semaphore(options.fake_slots)
        self.running = self.waiting = self.aborted = self.finished = self.steps = self.generated = 0
        self.sources = {"local_compute": 0, "external_kv_transfer": 0}
        self.bodies: list[dict[str, Any]] = []
        self.mode = "go-on"
        self.is_draining = False
        self.is_aborting = False
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.sleep_level = -1
        self.is_paused = False
        self.pauses = 0
        self.awake = asyncio.Event()
        self.awake.set()
        self.idle = asyncio.Event()
        self.idle.set()
        self.end = asyncio.Event()

    async def run(self) -> int:
        await asyncio.sleep(self.options.fake_start_s)
        try:
            server = await asyncio.start_server(self.serve, self.options.host, self.options.port)
        except OSError as error:
            print(error, file=sys.stderr)
            return 1
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.terminate)
        print("Application startup complete.", flush=True)
        await self.end.wait()
        with suppress(TimeoutError):
            await asyncio.wait_for(self.idle.wait(), self.options.shutdown_timeout or 1)
        server.close()
        return 0

    def terminate(self) -> None:
        if self.options.fake_ignores_sigterm:
            return
        self.is_draining = True
        self.is_aborting = not self.options.shutdown_timeout
        self.end.set()

    async def serve(self, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            await self.route(await _read(reader, writer), reader)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def route(self, http: Request, reader: StreamReader) -> None:
        key = os.environ.get("VLLM_API_KEY")
        if key and http.path.startswith("/v1") and http.headers.get("authorization") != f"Bearer {key}":
            return await http.answer(401, {"error": "Unauthorized"})
        match http.method, http.path:
            case "GET", "/health":
                return await http.answer(200)
            case "GET", "/metrics":
                return await http.answer(200, self.metrics())
            case "GET", "/v1/models":
                return await http.answer(200, self.models())
            case "GET", "/fake/requests":
                return await http.answer(200, self.bodies)
            case "GET", "/fake/environment":
                return await http.answer(200, self.environment())
            case "POST", "/v1/completions" | "/v1/chat/completions":
                return await self.unless_client_leaves(self.complete(http), reader)
        if os.environ.get("VLLM_SERVER_DEV_MODE") == "1" and await self.has_slept(http):
            return None
        if http.method == "POST" and http.path.startswith("/fake/"):
            self.set_mode(http.path.removeprefix("/fake/"))
            return await http.answer(200)
        return await http.answer(404, {"detail": "Not Found"})

    async def has_slept(self, http: Request) -> bool:
        """The paths of vLLM's development mode: sleep, pause, and their ends."""
        path, _, query = http.path.partition("?")
        match http.method, path:
            case "POST", "/sleep":
                self.sleep_level = int(query.removeprefix("level=") or 1)
                self.pause()
            case "POST", "/wake_up":
                await asyncio.sleep(self.options.fake_wake_s)
                self.sleep_level = -1
                self.is_paused = False
            case "POST", "/pause":
                self.pause()
            case "POST", "/resume":
                self.is_paused = False
                self.mode = "fail" if self.sleep_level > 0 else self.mode
            case "GET", "/is_paused":
                await http.answer(200, {"is_paused": self.is_paused})
                return True
            case _:
                return False
        if not self.is_paused:
            self.awake.set()
        await http.answer(200)
        return True

    def pause(self) -> None:
        """End what is in flight, and have what comes wait."""
        self.is_paused = True
        self.pauses += 1
        self.awake.clear()

    async def unless_client_leaves(self, answer: Any, reader: StreamReader) -> None:
        """A request whose client closes its connection ends, as vLLM's does."""
        answering, leaving = asyncio.create_task(answer), asyncio.create_task(reader.read(1))
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        for task in (answering, leaving):
            task.cancel()
        await asyncio.gather(answering, leaving, return_exceptions=True)

    def models(self) -> dict[str, Any]:
        model = {"id": self.model, "object": "model", "owned_by": "vllm", "root": self.options.model}
        return {"object": "list", "data": [model | {"max_model_len": CONTEXT_TOKENS}]}

    def environment(self) -> dict[str, Any]:
        group, session = os.getpgrp(), os.getsid(0)
        document = {"argv": sys.argv, "env": dict(os.environ), "group": group, "session": session}
        return document | {"core_pid": self.core_pid}

    def set_mode(self, mode: str) -> None:
        self.mode = mode
        if self.mode == "die":
            os._exit(3)
        if self.mode == "hang":
            self.goes_on.clear()
        else:
            self.goes_on.set()

    def metrics(self) -> str:
        prompt_tokens = sum(self.sources.values())
        values = {
            "num_requests_running": self.running,
            "num_requests_waiting": self.waiting,
            "kv_cache_usage_perc": min(1.0, self.running / self.options.fake_slots),
            "prompt_tokens_total": prompt_tokens,
            "generation_tokens_total": self.generated,
            "iteration_tokens_total_count": self.steps,
            "prefix_cache_queries_total": prompt_tokens,
            "prefix_cache_hits_total": 0,
            "time_to_first_token_seconds_sum": 0.01 * self.finished,
            "time_to_first_token_seconds_count": self.finished,
        }
        labels = f'engine="0",model_name="{self.model}"'
        lines = [f"vllm:{name}{{{labels}}} {float(value)}" for name, value in values.items()]
        for source, tokens in self.sources.items():
            lines += [f'vllm:prompt_tokens_by_source_total{{{labels},source="{source}"}} {float(tokens)}']
        for reason, count in {"length": self.finished, "abort": self.aborted}.items():
            lines += [f'vllm:request_success_total{{{labels},finished_reason="{reason}"}} {float(count)}']
        states = ("awake", "weights_offloaded", "discard_all")
        for level, state in enumerate(states):
            value = float(self.sleep_level == (level or -1))
            lines += [f'vllm:engine_sleep_state{{{labels},sleep_state="{state}"}} {value}']
        size = f'block_size="{BLOCK_TOKENS}",num_gpu_blocks="{TOTAL_BLOCKS}"'
        lines += [f'vllm:cache_config_info{{{size},kv_cache_size_tokens="6400",engine="0"}} 1.0']
        return "\n".join(lines) + "\n"

    async def complete(self, http: Request) -> None:
        body = http.body
        told = {name: http.headers.get(name) for name in ("x-request-id", "traceparent")}
        self.bodies.append({"path": http.path, "headers": told, **body})
        if body.get("model") != self.model:
            await http.error(404, f"The model `{body.get('model')}` does not exist.", "NotFoundError")
        elif self.mode == "refuse":
            await http.error(400, "the prompt is not to its taste", "BadRequestError")
        elif self.mode == "fail" or self.is_draining:
            await http.error(500, "cannot schedule new futures after shutdown", "InternalServerError")
        else:
            await self.awake.wait()
            async with self.slot(body):
                await (self.stream if body.get("stream") else self.answer)(http)

    @asynccontextmanager
    async def slot(self, body: dict[str, Any]) -> AsyncIterator[None]:
        """From waiting to running to gone; the prompt is computed, or fetched from another engine."""
        self.waiting += 1
        self.idle.clear()
        is_running = False
        try:
            async with self.slots:
                self.waiting -= 1
                self.running += 1
                is_running = True
                is_remote = (body.get("kv_transfer_params") or {}).get("do_remote_prefill")
                self.sources["external_kv_transfer" if is_remote else "local_compute"] += _prompt_tokens(body)
                yield
        finally:
            self.running -= is_running
            self.waiting -= not is_running
            if not self.running and not self.waiting:
                self.idle.set()

    async def tokens(self, body: dict[str, Any]) -> AsyncIterator[tuple[int, str | None]]:
        """The number of each token, and the finish reason with the last."""
        count, pauses = body.get("max_completion_tokens") or body.get("max_tokens") or 16, self.pauses
        for number in range(1, count + 1):
            await asyncio.sleep(self.options.fake_token_s)
            await self.goes_on.wait()
            self.steps += 1
            if self.is_aborting or self.pauses != pauses:
                self.aborted += 1
                yield number, "abort"
                return
            self.generated += 1
            yield number, "length" if number == count else None
        self.finished += 1

    async def answer(self, http: Request) -> None:
        tokens, finish = [each async for each in self.tokens(http.body)][-1]
        choice = _choice(http.path, " token" * tokens, finish, is_delta=False)
        usage = _usage(http.body, tokens)
        document = {"id": "cmpl-1", "model": self.model, "choices": [choice], "usage": usage}
        if (http.body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            document["kv_transfer_params"] = _transfer(http, usage["prompt_tokens"])
        await http.answer(200, document)

    async def stream(self, http: Request) -> None:
        tokens = 0
        await http.begin_stream()
        async for number, reason in self.tokens(http.body):
            tokens = number
            choice = _choice(http.path, " token", reason, is_delta=True)
            await http.event({"id": "cmpl-1", "model": self.model, "choices": [choice]})
        if (http.body.get("stream_options") or {}).get("include_usage"):
            await http.event({"id": "cmpl-1", "choices": [], "usage": _usage(http.body, tokens)})
        await http.chunk(b"data: [DONE]\n\n")
        await http.chunk(b"")


def _transfer(http: Request, tokens: int) -> dict[str, Any]:
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(1, 2 + tokens // BLOCK_TOKENS))],
        "remote_engine_id": "87814f6c",
        "remote_request_id": http.headers.get("x-request-id"),
        "remote_host": os.environ.get("VLLM_NIXL_SIDE_CHANNEL_HOST"),
        "remote_port": int(os.environ.get("VLLM_NIXL_SIDE_CHANNEL_PORT", 0)),
        "tp_size": 1,
        "remote_num_tokens": tokens,
    }


def _choice(path: str, text: str, reason: str | None, *, is_delta: bool) -> dict[str, Any]:
    if not path.endswith("/chat/completions"):
        return {"index": 0, "text": text, "finish_reason": reason}
    message = {"role": "assistant", "content": text}
    return {"index": 0, "delta" if is_delta else "message": message, "finish_reason": reason}


def _prompt_tokens(body: dict[str, Any]) -> int:
    """One token per four characters, or what the list says."""
    prompt = body.get("prompt") or json.dumps(body.get("messages"))
    return len(prompt) if isinstance(prompt, list) else 1 + len(prompt) // 4


def _usage(body: dict[str, Any], tokens: int) -> dict[str, int]:
    prompt = _prompt_tokens(body)
    return {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}


if __name__ == "__main__":
    main()
