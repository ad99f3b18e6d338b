"""What a swap of models costs beyond the load itself, with simulated models whose load takes ``LOAD_S``."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import aiohttp

from dynaplan.engines.sim.engine import WAKE_S
from tests.bench.table import Row
from tests.e2e.deployment import Deployment
from tests.e2e.mixed_load import ask

LOAD_S = 1.0
"""What the engine itself takes to load, in seconds; a sleeper takes ``WAKE_S``."""

PAUSE_S = 1.5
"""Between two requests, so that all is settled."""

CONFIG = f"""
Common: {{engine: sim, memory: 50GB, startup-time: {LOAD_S}, ttl: 0}}
Models: {{ant: {{}}, bee: {{}}}}
"""

SLEEPERS = CONFIG.replace("ttl: 0", "ttl: 0, enable-sleep-mode: true")


def rows(repeats: int) -> Iterator[Row]:
    """Every row of this group."""
    with models(CONFIG) as deployment:
        into_free = asyncio.run(loads(deployment, repeats))
        swapped = asyncio.run(swaps(deployment, repeats))
    with models(SLEEPERS) as deployment:
        woken = asyncio.run(swaps(deployment, repeats))
    yield Row("load into free memory beyond the engine's own", "s", [each - LOAD_S for each in into_free])
    bare_s = median(into_free)
    yield Row("swap beyond a load into free memory", "s", [each - bare_s for each in swapped], aim=0.3)
    yield Row("swap with a sleeper beyond its waking", "s", [each - WAKE_S for each in woken], aim=0.3)


@contextmanager
def models(config: str) -> Iterator[Deployment]:
    """Two models of which one at a time fits the GPU, for the length of the block."""
    with tempfile.TemporaryDirectory(prefix="dynaplan-bench-") as directory:
        file = Path(directory) / "models.yaml"
        file.write_text(config)
        with Deployment(Path(directory), str(file), "", "--gpus", "1") as deployment:
            yield deployment.start()


async def loads(deployment: Deployment, repeats: int) -> list[float]:
    """From a request for a model to its answer, while nothing is loaded."""
    async with aiohttp.ClientSession() as session:
        found = []
        for _ in range(repeats + 1):
            found.append(await answered_after(session, deployment, "ant"))
            await asyncio.to_thread(deployment.run, "unload", "ant")
            await asyncio.sleep(PAUSE_S)
        return found[1:]


async def swaps(deployment: Deployment, repeats: int) -> list[float]:
    """From a request for a model to its answer, while the other one has all memory."""
    async with aiohttp.ClientSession() as session:
        found = []
        for number in range(repeats + 2):
            found.append(await answered_after(session, deployment, ("ant", "bee")[number % 2]))
            await asyncio.sleep(PAUSE_S)
        return found[2:]


async def answered_after(session: aiohttp.ClientSession, deployment: Deployment, model: str) -> float:
    begun_s = time.perf_counter()
    answer = await ask(session, deployment.url, model, is_stream=False, tokens=1)
    assert not answer.fault, answer.fault
    return time.perf_counter() - begun_s
