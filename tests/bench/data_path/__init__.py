"""What a request and a token cost a frontend, beside other routers: ``python -m tests.bench data-path``.

All of them pass the same load on to the same two simulated workers (``workers``), which write each token as a
chunk of its own, in steps: what is measured is the processor time of the frontend's process, as the scheduler
counts it. ``sketch`` is the lower bound; ``vllm-router`` and ``smg`` (sglang-router) are measured where they
are on PATH or ``tox -e interop`` has fetched them; ``DYNAPLAN_BASELINE`` names a directory with another
version of dynaplan, and ``DYNAPLAN_PYTHONS`` further interpreters, separated by colons, to run this one with.
Rounds alternate. The costs of a request and of a chunk follow from answers of two
lengths. ``data-path-kv`` (``kv``) measures routing by prefix, beside Dynamo's frontend.

All of it takes about 25 minutes with five rounds. Behind the rows come two tables for docs/benchmarks.md.
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
from statistics import median
from typing import Any

import psutil

from dynaplan.util.sockets import free_port
from tests.bench.deployments import run_s
from tests.bench.table import Row, cell, matrix

STEPS_MS = {1: 5.0, 16: 5.0, 64: 10.0, 256: 20.0, 1000: 40.0}
"""Number of streams -> ms of a decode step, so long that nobody is saturated: 25,000 tokens/s at most."""

LENGTHS_TOKENS = (32, 512)
MEASURED_S = 1.5
"""Time that one measurement takes at least; each stream has one whole answer in any case."""

MAX_LONG_ROUNDS = 3
"""Rounds at most of an answer that takes 10 s or more, for every frontend."""

SATURATING_STREAMS = 64
ROUTERS = ("vllm-router", "smg")
TIMES = ("TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "whole p50", "whole p99")
AIMS_MS = {(1, "TTFT p50"): 0.3, (64, "TTFT p50"): 1.0}
"""Streams of the shortest answers, and a time -> what a frontend may add to it."""

ITL_AIM_MS = 0.2
MAX_CPU_RATIO = 1.0
MAX_P99_RATIO = 1.01
"""The aims: CPU, and the p99 of whole answers, over those of the router that takes less in the same round. A
percent of that p99 is no more than rounds of one router differ by."""

START_S = 60.0

FETCHED = ".tox/interop/routers/bin"


@dataclass
class Measured:
    """The rounds of one frontend at one load."""

    cpu_ms: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    times_ms: list[tuple[float, ...]] = field(default_factory=list)
    """In each round the percentiles of ``TIMES``."""

    def of(self, percentile: str) -> list[float]:
        """Return that time of each round."""
        return [seen[TIMES.index(percentile)] for seen in self.times_ms]

    def added_ms(self, direct: Measured, percentile: str) -> list[float]:
        """Return the time of each round less that at the engine directly."""
        pairs = zip(self.of(percentile), direct.of(percentile), strict=True)
        return [seen - own for seen, own in pairs]


def frontends() -> Mapping[str, Sequence[str]]:
    """Name -> command line, with ``PORT`` and ``WORKERS`` to be filled in."""
    modules = (sys.executable, "-m")
    found: dict[str, Sequence[str]] = {
        "sketch": (*modules, "tests.bench.data_path.sketch", "PORT", "WORKERS"),
        "dynaplan": (*modules, "tests.bench.data_path.frontend", "PORT", "{}", "WORKERS"),
    }
    if directory := os.environ.get("DYNAPLAN_BASELINE"):
        found["baseline"] = ("env", "-C", directory, *found["dynaplan"])
    for python in filter(None, os.environ.get("DYNAPLAN_PYTHONS", "").split(os.pathsep)):
        version = subprocess.check_output(
            (python, "-c", "import platform; print(platform.python_version())"), text=True
        )
        found[f"dynaplan, {version.strip()}"] = (python, *found["dynaplan"][1:])
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


def _cpu_s(pid: int | None) -> float:
    """The CPU time of a process and of its children; 0 without one."""
    if pid is None:
        return 0.0
    return sum(map(run_s, (pid, *(each.pid for each in psutil.Process(pid).children()))))


def measure(
    port: int, pid: int | None, streams: int, tokens: int, requests: int, keys: int | None = None
) -> tuple[float, Any]:
    """Return the CPU ms per request of that process, and what the load saw; ``keys`` as it takes them."""
    numbers = map(str, (port, streams, tokens, requests, *(() if keys is None else (keys,))))
    with program((sys.executable, "-m", "tests.bench.data_path.load", *numbers)) as process:
        assert process.stdout
        assert process.stdin
        assert json.loads(process.stdout.readline()) == "ready"
        before_s = _cpu_s(pid)
        process.stdin.write("\n")
        process.stdin.flush()
        seen = json.loads(process.stdout.readline())
        used_s = _cpu_s(pid) - before_s
    assert seen["failures"] == 0, f"{seen['failures']} of {requests} failed at {port}: {seen['fault']}"
    return 1000 * used_s / requests, seen


@contextmanager
def running_at(step_ms: float) -> Iterator[dict[str, tuple[int, int | None]]]:
    """The workers and every frontend: name -> port and process; "engine directly" has none."""
    workers = [free_port(), free_port()]
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
        yield running


def measure_in_turns(
    running: Mapping[str, tuple[int, int | None]], streams: int, tokens: int, requests: int, repeats: int
) -> dict[str, Measured]:
    """Measure each in rounds that alternate."""
    found: dict[str, Measured] = {name: Measured() for name in running}
    for _ in range(repeats):
        for name, (port, pid) in running.items():
            cpu_ms, seen = measure(port, pid, streams, tokens, requests)
            found[name].cpu_ms.append(cpu_ms)
            found[name].tokens_per_s.append(requests * tokens / seen["seconds"])
            found[name].times_ms.append((*seen["ttft_ms"], *seen["itl_ms"], *seen["whole_ms"]))
    return found


def rows(repeats: int) -> Iterator[Row]:
    """What has an aim; then the tables of CPU per request and per chunk, and of added times, are printed."""
    by_load: dict[tuple[int, int], dict[str, Measured]] = {}
    for streams, step_ms in STEPS_MS.items():
        with running_at(step_ms) as running:
            for tokens in LENGTHS_TOKENS:
                requests = streams * max(1, round(1000 * MEASURED_S / (step_ms * tokens)))
                rounds = min(repeats, MAX_LONG_ROUNDS) if tokens * step_ms > 10_000 else repeats
                found = measure_in_turns(running, streams, tokens, requests, rounds)
                by_load[streams, tokens] = found
                yield from _rows_of(streams, tokens, found)
    yield from _saturated(repeats)
    print(f"\n{_cpu_table(by_load)}\n\n{_times_table(by_load)}")


def _rows_of(streams: int, tokens: int, found: Mapping[str, Measured]) -> Iterator[Row]:
    load, ours = f"{streams} streams of {tokens}", found["dynaplan"]
    if routers := [found[name] for name in ROUTERS if name in found]:
        cpu_ms = _over_least(ours.cpu_ms, [each.cpu_ms for each in routers])
        yield Row(f"CPU over the faster router's, {load}", "x", cpu_ms, MAX_CPU_RATIO)
        p99_ms = _over_least(ours.of("whole p99"), [each.of("whole p99") for each in routers])
        yield Row(f"p99 of whole answers over the faster router's, {load}", "x", p99_ms, MAX_P99_RATIO)
    direct = found["engine directly"]
    yield Row(f"added ITL p50, {load}", "ms", ours.added_ms(direct, "ITL p50"), ITL_AIM_MS)
    if tokens == min(LENGTHS_TOKENS):
        for percentile in TIMES[:2]:
            aim_ms = AIMS_MS.get((streams, percentile))
            yield Row(f"added {percentile}, {load}", "ms", ours.added_ms(direct, percentile), aim_ms)


def _over_least(own: Sequence[float], others: Sequence[Sequence[float]]) -> list[float]:
    """Return each round's value over the least of the others in it."""
    return [mine / min(theirs) for mine, *theirs in zip(own, *others, strict=True)]


def _saturated(repeats: int) -> Iterator[Row]:
    """Engines that do not pause: clients, engines and the frontend share what cores there are."""
    streams, tokens = SATURATING_STREAMS, max(LENGTHS_TOKENS)
    with running_at(0.0) as running:
        found = measure_in_turns(running, streams, tokens, 2 * streams, repeats)
    for name, measured in found.items():
        yield Row(f"{name}: saturated by {streams} streams", "tokens/s", measured.tokens_per_s, None, True)
        if name != "engine directly":
            of_core = [1000 * tokens / each for each in measured.cpu_ms]
            yield Row(f"{name}: the same, of its own CPU time", "tokens/s of a core", of_core, None, True)


def _cpu_table(by_load: Mapping[tuple[int, int], Mapping[str, Measured]]) -> str:
    """CPU per request in ms, and per chunk in us, as medians with the least and the most."""
    names = [name for name in next(iter(by_load.values())) if name != "engine directly"]
    lines = [
        [f"{streams}, {tokens}", *(cell(found[name].cpu_ms) for name in names)]
        for (streams, tokens), found in by_load.items()
    ]
    short_tokens, long_tokens = LENGTHS_TOKENS
    for streams in STEPS_MS:
        short, long = by_load[streams, short_tokens], by_load[streams, long_tokens]
        chunk_us = {
            name: [
                1000 * (more_ms - less_ms) / (long_tokens - short_tokens)
                for less_ms, more_ms in zip(short[name].cpu_ms, long[name].cpu_ms, strict=False)
            ]
            for name in names
        }
        lines.append([f"{streams}: a chunk, us", *(cell(chunk_us[name]) for name in names)])
    return matrix(["streams, tokens: CPU per request, ms", *names], lines)


def _times_table(by_load: Mapping[tuple[int, int], Mapping[str, Measured]]) -> str:
    """What each adds to the engine's own times, in ms, as medians."""
    names = [name for name in next(iter(by_load.values())) if name != "engine directly"]
    short_tokens = min(LENGTHS_TOKENS)
    lines = []
    for streams in STEPS_MS:
        found = by_load[streams, short_tokens]
        for percentile in TIMES:
            added = (found[name].added_ms(found["engine directly"], percentile) for name in names)
            lines.append([f"{streams}: {percentile}", *(f"{median(each):.2f}" for each in added)])
    return matrix([f"streams of {short_tokens}: added, ms", *names], lines)
