"""What the load generator of ``profile-sla`` costs, and how far the ITL that it reads is from the truth."""

from __future__ import annotations

import time
from collections.abc import Iterator

import uvloop

from dynaplan.config.settings.worker import SimOptions
from dynaplan.engines.sim.profiles import timing_for
from dynaplan.lab.profiling.load.completions import CompletionClient, open_client
from dynaplan.lab.profiling.load.meters import DecodeMeter
from dynaplan.lab.profiling.load.prompts import PromptPool
from dynaplan.lab.profiling.load_points import DecodeLoad
from tests.bench.deployments import serving
from tests.bench.table import Row
from tests.e2e.deployment import MODEL

PROFILE = "h200_sxm-Llama-3.1-8B-Instruct-FP8"
LOADS = (DecodeLoad(1000, 150, 64), DecodeLoad(1000, 150, 150))


def rows(repeats: int) -> Iterator[Row]:
    """Loads on one worker that is as fast as an H200; the prompts are in its prefix cache."""
    worker = (f"--VllmWorker.profile={PROFILE}", "--Planner.no-operation=true")
    with serving("graphs.agg:Frontend", "agg.yaml", *worker) as deployment:
        for load in LOADS:
            costs_us, errors = uvloop.run(_measured(deployment.url, load, repeats))
            yield Row(f"load generator, CPU per token at {load.concurrency}", "us", costs_us)
            yield Row(f"ITL over the profile's at {load.concurrency}", "%", errors, 3)


async def _measured(url: str, load: DecodeLoad, repeats: int) -> tuple[list[float], list[float]]:
    timing, _ = timing_for(SimOptions(profile=PROFILE))
    context_tokens = load.concurrency * (load.isl_tokens + load.osl_tokens // 2)
    expected_ms = timing.decode_ms(load.concurrency, context_tokens)
    costs_us, errors = [], []
    async with open_client() as http:
        meter = DecodeMeter(CompletionClient(http, url, MODEL), PromptPool(is_text=True))
        for _ in range(repeats + 1):
            before_s = time.process_time()
            measured = await meter.measure(load)
            assert measured is not None
            tokens = load.concurrency * load.osl_tokens
            costs_us.append((time.process_time() - before_s) / tokens * 1e6)
            errors.append(100 * (measured.itl_ms / expected_ms - 1))
    return costs_us[1:], errors[1:]  # the first run fills the prefix cache
