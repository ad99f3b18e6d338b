"""What it costs a request that its stream could go on at another worker: the frontend's CPU time.

The first row is that of keeping alone: the time to add an event to a ``PartialAnswer``, the least of many
runs. Then two frontends in one process, of which one keeps what it passes on (``migration-limit`` 3) and the
other does not (0), get the same streams from one worker by turns; the ratio is that of each pair of turns.
Worker and clients are a process of their own, ``python -m tests.bench.migration``, which is told what to do
line by line. Each token is an event of its own, as long as those of vLLM, and comes in a read of its own.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Iterator
from statistics import median

import uvloop

from dynaplan.gateway.migration import PartialAnswer, UnreadPages
from dynaplan.store.instances import Instance
from tests.bench.load import generate
from tests.bench.table import Row
from tests.fakes.frontend_runtime import Stage, stage
from tests.fakes.openai_worker import MODEL

AT_ONCE = 16
PACE_S = 0.005
PAIRS = 8
"""Pairs of turns of one repetition."""

RUNS = 200
"""Runs of which the least time counts."""

LENGTHS_TOKENS = (100, 1000)

_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def rows(repeats: int) -> Iterator[Row]:
    for tokens in LENGTHS_TOKENS:
        name = f"keeping an event of a stream of {tokens} tokens"
        yield Row(name, "us", [_kept_us(tokens) for _ in range(repeats)])
    for tokens in LENGTHS_TOKENS:
        kept_ms, passed_ms = asyncio.run(_turns(tokens, repeats * PAIRS))
        ratios = [100 * (kept / passed - 1) for kept, passed in zip(kept_ms, passed_ms, strict=True)]
        name = f"frontend CPU per request of {tokens} tokens"
        yield Row(name, "ms", kept_ms)
        yield Row(f"{name}, without migration", "ms", passed_ms)
        yield Row(f"more by migration, {tokens} tokens", "%", ratios, 2.0)
        # Repeated measurements of one quantity: the middle of them is known better than each.
        yield Row("the same, medians of the repeats", "%", _medians(ratios), 2.0)


def _kept_us(tokens: int) -> float:
    """The CPU time of keeping one event, the least of many runs, in us."""
    token, pages, taken_ns = events()[0], UnreadPages(), []
    for _ in range(RUNS):
        partial = PartialAnswer(pages)
        begun_ns = time.process_time_ns()
        for _ in range(tokens):
            partial.add(token)
        taken_ns.append(time.process_time_ns() - begun_ns)
        partial.close()
    return min(taken_ns) / tokens / 1000


def _medians(values: list[float]) -> list[float]:
    return [median(values[start : start + PAIRS]) for start in range(0, len(values), PAIRS)]


async def _turns(tokens: int, pairs: int) -> tuple[list[float], list[float]]:
    """The CPU time per request, in ms, of the frontend that keeps and of the one that does not."""
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.bench.migration", stdin=PIPE, stdout=PIPE
    )
    assert child.stdout
    try:
        port = int(await child.stdout.readline())
        async with stage(migration_limit=3) as keeping, stage(migration_limit=0) as passing:
            for here in (keeping, passing):
                await _know(here, port)
                await _turn(child, here, tokens)  # what is loaded and compiled at first does not count
            taken: dict[int, list[float]] = {0: [], 1: []}
            for number in range(pairs):
                for which in (0, 1) if number % 2 else (1, 0):
                    taken[which].append(await _turn(child, (keeping, passing)[which], tokens))
        return taken[0], taken[1]
    finally:
        child.kill()
        await child.communicate()


async def _know(here: Stage, port: int) -> None:
    card = {
        "model": MODEL,
        "context_tokens": 8192,
        "tokenizer": "sim",
        "kv_block_tokens": 16,
        "engine": "sim",
    }
    instance = Instance("ns", "VllmWorker", "generate", 1, f"http://127.0.0.1:{port}", "a worker", 0, card)
    await here.store.put(instance.key, instance.to_json())
    await here.know(instance)


async def _turn(child: Process, here: Stage, tokens: int) -> float:
    assert child.stdin and child.stdout
    gc.collect()
    begun_s = time.process_time()
    child.stdin.write(f"{here.url} {tokens}\n".encode())
    failures = await child.stdout.readline()
    assert failures == b"0\n", failures
    return (time.process_time() - begun_s) / AT_ONCE * 1000


def events() -> tuple[bytes, bytes]:
    """A token's event, and the end of a stream."""
    choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": None}
    document = {
        "id": "cmpl-0123456789abcdef0123456789abcdef",
        "object": "text_completion",
        "created": 1_795_380_238,
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "choices": [choice],
    }
    token = b"data: %b\n\n" % json.dumps(document, separators=(",", ":")).encode()
    choice["finish_reason"] = "length"
    end = b"data: %b\n\ndata: [DONE]\n\n" % json.dumps(document, separators=(",", ":")).encode()
    return token, end


async def _worker(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    token, end = events()
    try:
        while found := re.search(rb"(?i)content-length: *(\d+)", await reader.readuntil(b"\r\n\r\n")):
            asked = json.loads(await reader.readexactly(int(found[1])))
            writer.write(_HEAD)
            for _ in range(asked["max_tokens"] - 1):
                writer.write(b"%x\r\n%b\r\n" % (len(token), token))
                await asyncio.sleep(PACE_S)
            writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(end), end))
    except asyncio.IncompleteReadError:
        writer.close()


async def _serve() -> None:
    server = await asyncio.start_server(_worker, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        url, tokens = line.split()
        result = await generate(url, MODEL, AT_ONCE, AT_ONCE, int(tokens))
        print(result.failures + AT_ONCE - result.requests, flush=True)


if __name__ == "__main__":
    uvloop.run(_serve())
