"""Frontends that share one port: what a request costs all of them, and how evenly they share the connections.

The real ``dynaplan serve``, with simulated workers that take their usual time: nobody is saturated.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from urllib.parse import urlsplit

import psutil
import uvloop

from tests.bench.deployments import run_s, serving
from tests.bench.load import generate
from tests.bench.table import Row
from tests.e2e.deployment import MODEL

FRONTENDS = (1, 2, 4)
OPTIONS = ("--VllmWorker.ServiceArgs.workers=2", "--Planner.no-operation=true")
STREAMS = 64
STREAMS_OF_EACH = 16
"""A frontend with fewer streams finds fewer chunks when it wakes up: each costs more, alone or not."""

REQUESTS_OF_A_STREAM = 20
TOKENS = 32
STEADY_S = 2.0
"""Time after which every stream has its connection."""


def rows(repeats: int) -> Iterator[Row]:
    """CPU of all frontends per request, and the largest distance of one from an equal part."""
    for number in FRONTENDS:
        wanted = f"--Frontend.ServiceArgs.workers={number}"
        with serving("graphs.agg:Frontend", "agg.yaml", *OPTIONS, wanted) as deployment:
            pids = [worker["pid"] for worker in deployment.workers("Frontend").values()]
            uvloop.run(generate(deployment.url, MODEL, STREAMS, STREAMS, 2))
            for streams in dict.fromkeys((number * STREAMS_OF_EACH, STREAMS)):
                yield from _rows_of(deployment.url, pids, streams, repeats)


def _rows_of(url: str, pids: list[int], streams: int, repeats: int) -> Iterator[Row]:
    requests, number = streams * REQUESTS_OF_A_STREAM, len(pids)
    costs_ms, distances_percent = [], []
    for _ in range(repeats):
        before_s = sum(map(run_s, pids))
        counts, failures = uvloop.run(_load(url, pids, streams, requests))
        assert not failures, f"{failures} of {requests} failed"
        costs_ms.append(1000 * (sum(map(run_s, pids)) - before_s) / requests)
        even = sum(counts) / number
        distances_percent.append(100 * max(abs(each - even) for each in counts) / even)
    yield Row(f"CPU per request, {number} frontends, {streams} streams", "ms", costs_ms)
    yield Row(
        f"distance from an equal part, {number} frontends, {streams} streams", "%", distances_percent, 10
    )


async def _load(url: str, pids: list[int], streams: int, requests: int) -> tuple[list[int], int]:
    """Send the requests; return each frontend's connections while they run, and the failures."""
    port = urlsplit(url).port or 0
    load = asyncio.create_task(generate(url, MODEL, requests, streams, TOKENS))
    await asyncio.sleep(STEADY_S)
    counts = [await asyncio.to_thread(_connections, pid, port) for pid in pids]
    return counts, (await load).failures


def _connections(pid: int, port: int) -> int:
    found = psutil.Process(pid).net_connections("tcp")
    return sum(each.laddr.port == port and each.status == psutil.CONN_ESTABLISHED for each in found)
