"""Requests per second through the frontend, and what a request costs it."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import psutil
import uvloop

from tests.bench import serving_stores
from tests.bench.deployments import INSTANT, cpu_s, idle_cpu_percent, serving, tree
from tests.bench.load import generate
from tests.bench.table import Row
from tests.e2e.deployment import MODEL

REQUESTS = {1: 300, 16: 2000, 64: 4000, 256: 4000}
TOKENS = 32


def rows(repeats: int) -> Iterator[Row]:
    """Every row of this group: two instant workers, streams of 32 tokens."""
    with serving(
        "graphs.agg:Frontend", "agg.yaml", *INSTANT, "--VllmWorker.ServiceArgs.workers=2"
    ) as deployment:
        frontend = [psutil.Process(deployment.pid_of("dynamo_Frontend"))]
        uvloop.run(generate(deployment.url, MODEL, 300, 16, TOKENS))
        for concurrency, requests in REQUESTS.items():
            rates, costs_ms, latencies_ms = [], [], []
            for _ in range(repeats):
                before_s = cpu_s(frontend)
                result = uvloop.run(generate(deployment.url, MODEL, requests, concurrency, TOKENS))
                assert result.failures == 0, f"{result.failures} of {result.requests} failed"
                rates.append(result.requests / result.seconds)
                costs_ms.append(1000 * (cpu_s(frontend) - before_s) / result.requests)
                latencies_ms.append(1000 * median(result.latencies_s))
            at_64, at_1 = concurrency == 64, concurrency == 1
            yield Row(
                f"requests at concurrency {concurrency}",
                "1/s",
                rates,
                900 if at_64 else None,
                more_is_better=True,
            )
            yield Row(f"frontend CPU per request at {concurrency}", "ms", costs_ms, 1.0 if at_64 else None)
            yield Row(f"end to end at {concurrency}", "ms", latencies_ms, 4.0 if at_1 else None)


def idle_rows(repeats: int) -> Iterator[Row]:
    """What the whole tree costs when nobody asks for anything: the disaggregated graph with its planner.

    Then the aggregated graph on each key-value store, with its start and a worker's death.
    """
    with serving("graphs.disagg:Frontend", "disagg.yaml") as deployment:
        processes = tree(deployment)
        idle_cpu_percent(processes, 3.0)
        yield Row(
            "idle CPU, whole tree", "% of a core", [idle_cpu_percent(processes) for _ in range(repeats)], 0.5
        )
        memory = [
            sum(process.memory_full_info().pss for process in processes) / 2**20 for _ in range(repeats)
        ]
        yield Row("idle memory, whole tree", "MiB", memory, 350, note="proportional set size")
        for process in processes:
            name = " ".join(process.cmdline())[-60:]
            print(f"    {process.memory_full_info().pss / 2**20:6.1f} MiB  {cpu_s([process]):6.2f} s  {name}")
    yield from serving_stores.rows(repeats)
