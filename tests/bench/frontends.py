"""Frontends that share one port: what a request costs all of them, and how evenly they share the connections.

The real ``dynaplan serve``, with simulated workers that take their time: nobody is saturated. The deployments
run at once, and rounds go through them in turns. A frontend with fewer streams finds fewer chunks when it
wakes up, and each costs more, alone or not: so the fair comparison is at as many streams for each, and the
number of times that the frontends wake up says what it is about.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import uvloop

from tests.bench.deployments import run_s, serving
from tests.bench.load import generate
from tests.bench.table import Row
from tests.e2e.deployment import MODEL

FRONTENDS = (1, 2, 4)
OPTIONS = (
    *("--VllmWorker.ServiceArgs.workers=2", "--VllmWorker.speedup-ratio=0.25"),
    *("--Planner.no-operation=true", "--Planner.metric-pulling-interval=30", "--store=file"),
)
STREAMS = 64
STREAMS_OF_EACH = (16, 32)

REQUESTS_OF_A_STREAM = 8
TOKENS = 32
STEADY_S = 2.0
"""Time after which every stream has its connection."""


@dataclass
class Measured:
    """The rounds of so many frontends under so many streams."""

    cpu_ms: list[float] = field(default_factory=list)
    wakeups: list[float] = field(default_factory=list)
    distance_percent: list[float] = field(default_factory=list)


@dataclass
class Served:
    """A deployment with so many frontends."""

    url: str
    pids: list[int]
    by_streams: dict[int, Measured] = field(default_factory=dict)


def rows(repeats: int) -> Iterator[Row]:
    """CPU and wake-ups of all frontends per request, and the largest distance of one from an equal part."""
    with ExitStack() as stack:
        running = [_started(stack, number) for number in FRONTENDS]
        for _ in range(repeats):
            for each in running:
                for streams, measured in each.by_streams.items():
                    _measure(each, streams, measured)
    for each in running:
        for streams, measured in each.by_streams.items():
            where = f"{len(each.pids)} frontends, {streams} streams"
            yield Row(f"CPU per request, {where}", "ms", measured.cpu_ms)
            yield Row(f"wake-ups per request, {where}", "", measured.wakeups)
            yield Row(f"distance from an equal part, {where}", "%", measured.distance_percent, 10)


def _started(stack: ExitStack, number: int) -> Served:
    wanted = f"--Frontend.ServiceArgs.workers={number}"
    deployment = stack.enter_context(serving("graphs.agg:Frontend", "agg.yaml", *OPTIONS, wanted))
    pids = [worker["pid"] for worker in deployment.workers("Frontend").values()]
    uvloop.run(generate(deployment.url, MODEL, STREAMS, STREAMS, 2))
    streams = sorted({STREAMS, *(number * each for each in STREAMS_OF_EACH if number * each < STREAMS)})
    return Served(deployment.url, pids, {each: Measured() for each in streams})


def _measure(served: Served, streams: int, measured: Measured) -> None:
    requests, pids = streams * REQUESTS_OF_A_STREAM, served.pids
    before_s, before = sum(map(run_s, pids)), sum(map(wakeups, pids))
    counts, failures = uvloop.run(_load(served.url, pids, streams, requests))
    assert not failures, f"{failures} of {requests} failed"
    measured.cpu_ms.append(1000 * (sum(map(run_s, pids)) - before_s) / requests)
    measured.wakeups.append((sum(map(wakeups, pids)) - before) / requests)
    even = sum(counts) / len(pids)
    measured.distance_percent.append(100 * max(abs(each - even) for each in counts) / even)


def wakeups(pid: int) -> int:
    """The number of times that a process has waited for something to do."""
    (line,) = (
        each
        for each in Path(f"/proc/{pid}/status").read_text().splitlines()
        if each.startswith("voluntary_ctxt_switches")
    )
    return int(line.split()[1])


async def _load(url: str, pids: Sequence[int], streams: int, requests: int) -> tuple[list[int], int]:
    """Send the requests; return each frontend's connections while they run, and the failures."""
    port = urlsplit(url).port or 0
    load = asyncio.create_task(generate(url, MODEL, requests, streams, TOKENS))
    await asyncio.sleep(STEADY_S)
    counts = [await asyncio.to_thread(_connections, pid, port) for pid in pids]
    return counts, (await load).failures


def _connections(pid: int, port: int) -> int:
    found = psutil.Process(pid).net_connections("tcp")
    return sum(each.laddr.port == port and each.status == psutil.CONN_ESTABLISHED for each in found)
