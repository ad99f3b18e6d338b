"""What a request and a token cost a frontend, beside other routers: ``python -m tests.bench data-path``.

All of them pass the same load on to the same two simulated workers (``workers``), which write each token as a
chunk of its own, in steps: what is measured is the processor time of the frontend's process, as the scheduler
counts it. ``sketch`` is the lower bound; ``vllm-router`` and ``smg`` (sglang-router) are measured where they
are on PATH or ``tox -e interop`` has fetched them; ``DYNAPLAN_BASELINE`` names a directory with another
version of dynaplan. Rounds alternate. The costs of a request and of a chunk follow from answers of two
lengths.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from dynaplan.util.sockets import free_port
from tests.bench.deployments import run_s
from tests.bench.table import Row

STEPS_MS = {1: 5.0, 16: 5.0, 64: 10.0, 256: 40.0}
"""Number of streams -> ms of a decode step: at most 6,400 tokens/s, so that nobody is saturated."""

LENGTHS_TOKENS = (32, 512)
MEASURED_S = 4.0
"""Time that one measurement takes at least; each stream has one whole answer in any case."""

START_S = 60.0

FETCHED = ".tox/interop/routers/bin"


@dataclass
class Measured:
    """The rounds of one frontend at one load."""

    cpu_ms: list[float] = field(default_factory=list)
    ttft_ms: list[float] = field(default_factory=list)
    itl_ms: list[float] = field(default_factory=list)


def frontends() -> Mapping[str, Sequence[str]]:
    """Name -> command line, with ``PORT`` and ``WORKERS`` to be filled in."""
    python = (sys.executable, "-m")
    found: dict[str, Sequence[str]] = {
        "sketch": (*python, "tests.bench.data_path.sketch", "PORT", "WORKERS"),
        "dynaplan": (*python, "tests.bench.data_path.frontend", "PORT", "{}", "WORKERS"),
        "dynaplan, no migration": (
            *(*python, "tests.bench.data_path.frontend", "PORT", '{"migration-limit": 0}', "WORKERS"),
        ),
    }
    if directory := os.environ.get("DYNAPLAN_BASELINE"):
        found["baseline"] = ("env", "-C", directory, *found["dynaplan"])
    listen_on = ("--host", "127.0.0.1", "--port", "PORT", "--policy", "round_robin", "--log-level", "error")
    listen_on = (*listen_on, "--prometheus-port", "ANOTHER_PORT", "--max-concurrent-requests", "4096")
    path = os.pathsep.join((FETCHED, os.environ["PATH"]))
    if program := shutil.which("vllm-router", path=path):
        found["vllm-router"] = (program, *listen_on, "--worker-urls", "WORKER_URLS")
    if program := shutil.which("smg", path=path):
        found["smg"] = (program, "launch", *listen_on, "--worker-urls", "WORKER_URLS")
    return found


@contextmanager
def program(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A process for the length of the block."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    process: subprocess.Popen[str] = subprocess.Popen(command, text=True, **pipes)  # type: ignore[call-overload]
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def filled_in(command: Sequence[str], port: int, workers: Sequence[int]) -> list[str]:
    words: list[str] = []
    for word in command:
        if word == "WORKERS":
            words += map(str, workers)
        elif word == "WORKER_URLS":
            words += [f"http://127.0.0.1:{each}" for each in workers]
        else:
            filled = {"PORT": str(port), "ANOTHER_PORT": str(free_port())}
            words.append(filled.get(word, word))
    return words


def wait_for(port: int) -> None:
    """Wait until a chat request is answered there."""
    document = {"model": "sim-8b", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    body = json.dumps({**document, "stream": True})
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions", body.encode(), {"Content-Type": "application/json"}
    )
    deadline_s = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(request, timeout=START_S) as answer:
                if b"[DONE]" in answer.read():
                    return
        except OSError:
            if time.monotonic() > deadline_s:
                raise
        time.sleep(0.2)


def measure(port: int, pid: int | None, streams: int, tokens: int, requests: int) -> tuple[float, Any]:
    """Return the CPU ms per request of that process, and what the load saw."""
    load = (sys.executable, "-m", "tests.bench.data_path.load", str(port), str(streams), str(tokens))
    with program((*load, str(requests))) as process:
        assert process.stdout
        assert process.stdin
        assert json.loads(process.stdout.readline()) == "ready"
        before_s = run_s(pid) if pid else 0.0
        process.stdin.write("\n")
        process.stdin.flush()
        seen = json.loads(process.stdout.readline())
        used_s = (run_s(pid) if pid else 0.0) - before_s
    assert seen["failures"] == 0, f"{seen['failures']} of {requests} failed at {port}: {seen['fault']}"
    return 1000 * used_s / requests, seen


def rounds_at(streams: int, step_ms: float, repeats: int) -> dict[tuple[str, int], Measured]:
    """Measure every frontend in turns: (name, tokens) -> what was measured."""
    workers = [free_port(), free_port()]
    found: dict[tuple[str, int], Measured] = {}
    with ExitStack() as stack:
        serve = (sys.executable, "-m", "tests.bench.data_path.workers")
        stack.enter_context(program((*serve, *map(str, workers), str(step_ms))))
        wait_for(workers[0])
        running: dict[str, tuple[int, int | None]] = {"engine directly": (workers[0], None)}
        for name, command in frontends().items():
            port = free_port()
            process = stack.enter_context(program(filled_in(command, port, workers)))
            wait_for(port)
            running[name] = port, process.pid
        for _ in range(repeats):
            for tokens in LENGTHS_TOKENS:
                requests = streams * max(1, round(1000 * MEASURED_S / (step_ms * tokens)))
                for name, (port, pid) in running.items():
                    cpu_ms, seen = measure(port, pid, streams, tokens, requests)
                    measured = found.setdefault((name, tokens), Measured())
                    measured.cpu_ms.append(cpu_ms)
                    measured.ttft_ms.append(seen["ttft_ms"][0])
                    measured.itl_ms.append(seen["itl_ms"][0])
    return found


def rows(repeats: int) -> Iterator[Row]:
    """CPU per request and per chunk, and the times that are added to the engine's own."""
    for streams, step_ms in STEPS_MS.items():
        found = rounds_at(streams, step_ms, repeats)
        names = dict.fromkeys(name for name, _ in found)
        for name in names:
            if name == "engine directly":
                continue
            by_length = [found[name, tokens] for tokens in LENGTHS_TOKENS]
            for tokens, measured in zip(LENGTHS_TOKENS, by_length, strict=True):
                yield Row(f"{name}: CPU per request, {streams} streams of {tokens}", "ms", measured.cpu_ms)
            yield from _split_rows(name, streams, by_length)
        yield from _latency_rows(streams, found, list(names))


def _split_rows(name: str, streams: int, by_length: Sequence[Measured]) -> Iterator[Row]:
    (short_tokens, long_tokens), (short, long) = next(pairwise(LENGTHS_TOKENS)), by_length
    chunk_us = [
        1000 * (more_ms - less_ms) / (long_tokens - short_tokens)
        for less_ms, more_ms in zip(short.cpu_ms, long.cpu_ms, strict=True)
    ]
    request_us = [
        1000 * less_ms - short_tokens * each for less_ms, each in zip(short.cpu_ms, chunk_us, strict=True)
    ]
    yield Row(f"{name}: CPU per chunk, {streams} streams", "us", chunk_us)
    yield Row(f"{name}: CPU per request without its chunks, {streams} streams", "us", request_us)


def _latency_rows(
    streams: int, found: Mapping[tuple[str, int], Measured], names: Sequence[str]
) -> Iterator[Row]:
    direct = found["engine directly", LENGTHS_TOKENS[0]]
    for name in names[1:]:
        measured = found[name, LENGTHS_TOKENS[0]]
        added = [via - own for via, own in zip(measured.ttft_ms, direct.ttft_ms, strict=True)]
        yield Row(f"{name}: added TTFT (p50), {streams} streams", "ms", added)
