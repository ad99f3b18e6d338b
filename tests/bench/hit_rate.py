"""Hit rates live and simulated: the same conversations through `dynaplan serve` and through `simulate`.

Simulated engines with caches so small that blocks are evicted. A prompt's text has one piece for each block
of the trace, so that equal blocks are equal texts.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp

from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.lab.simulate.options import SimulateOptions
from dynaplan.lab.simulate.policy_runs import run_simulations
from dynaplan.simulation.router import SimulatedRouting
from dynaplan.simulation.traces.reading import read_requests
from tests.bench.deployments import serving
from tests.bench.table import Row
from tests.e2e.deployment import MODEL
from tests.e2e.replay import BYTES_PER_TOKEN
from tests.e2e.two_fleets import ENGINE, PROFILE

WORKERS = 3
TRACE = "conversations:rate=0.8,turns=5,think=4,system=800,isl=200,osl=60,duration=60,seed=3"
CACHE_TOKENS = 24_576
KV = SimulatedRouting("kv")
ROUTERS = {
    "kv, events": KV,
    "kv, prediction": replace(KV, is_kv_events=False),
    "round-robin": SimulatedRouting("round-robin"),
}
MOST_APART = 3.0
"""The aim, in points: chances decide ties, and a live choice is made a few milliseconds later."""


def rows(_: int) -> Iterator[Row]:
    """A minute each, and measured once."""
    trace = [
        each
        for each in read_requests(TRACE, 1.0, 1)
        if each.prompt_tokens + each.output_tokens <= ENGINE["max-model-len"]
    ]
    for name, routing in ROUTERS.items():
        with tempfile.TemporaryDirectory(prefix="dynaplan-bench-") as directory:
            engine = _engine(Path(directory))
            simulated = 100 * _simulated(Path(directory), trace, routing, engine)
            live = 100 * _live(trace, routing, engine)
        yield Row(f"{name}: hits, simulated", "%", [simulated])
        yield Row(f"{name}: hits, live", "%", [live])
        yield Row(f"{name}: live and simulated hits apart", "points", [abs(live - simulated)], MOST_APART)


def _engine(directory: Path) -> dict[str, Any]:
    profile = directory / "profile.json"
    profile.write_text(json.dumps({**PROFILE, "max_kv_tokens": CACHE_TOKENS}))
    return {**ENGINE, "profile": str(profile)}


def _simulated(
    directory: Path, trace: Sequence[TracedRequest], routing: SimulatedRouting, engine: dict[str, Any]
) -> float:
    path = directory / "trace.jsonl"
    path.write_text("".join(json.dumps(each.to_json()) + "\n" for each in trace))
    options = SimulateOptions(
        str(path),
        (f"static:{WORKERS}",),
        gpus=WORKERS,
        is_disaggregated=False,
        engine=engine,
        routing=routing,
    )
    [result] = run_simulations(options)
    return result.outcome.hit_rate or 0.0


def _live(trace: Sequence[TracedRequest], routing: SimulatedRouting, engine: dict[str, Any]) -> float:
    options = [f"--VllmWorker.{name}={value}" for name, value in engine.items()]
    options += [f"--Common.{name}={ENGINE[name]}" for name in ("block-size", "max-model-len")]
    options += [f"--Router.router={routing.mode}", f"--Router.kv-events={str(routing.is_kv_events).lower()}"]
    options += ["--Planner.no-operation=true", f"--VllmWorker.ServiceArgs.workers={WORKERS}"]
    arguments = ("graphs.agg_router:Frontend", "agg_router.yaml", "--gpus", str(WORKERS), "--store", "file")
    with serving(*arguments, *options) as deployment:
        return asyncio.run(_replayed(deployment.url, trace))


async def _replayed(url: str, trace: Sequence[TracedRequest]) -> float:
    """Send each request at its time; return the cached part of all prompts' tokens, as answers state it."""
    loop = asyncio.get_running_loop()
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:
        await _asked(session, TracedRequest(0.0, 16, 1), "first")
        begin_s = loop.time()
        asking = []
        for number, request in enumerate(trace):
            await asyncio.sleep(begin_s + request.arrival_s - loop.time())
            asking.append(asyncio.create_task(_asked(session, request, str(number))))
        answers = await asyncio.gather(*asking)
    return sum(cached for _, cached in answers) / sum(tokens for tokens, _ in answers)


async def _asked(session: aiohttp.ClientSession, request: TracedRequest, name: str) -> tuple[int, int]:
    body = {
        "model": MODEL,
        "prompt": _text(request, name),
        "max_tokens": request.output_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    async with session.post("/v1/completions", json=body) as response:
        answer = await response.text()
        assert response.status == 200, answer
    last = [line for line in answer.splitlines() if line.startswith("data: {")][-1]
    usage = json.loads(last.removeprefix("data: "))["usage"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def _text(request: TracedRequest, name: str) -> str:
    """A prompt of as many tokens: a piece for each block, and an end of its own."""
    length = request.block_tokens * BYTES_PER_TOKEN
    pieces = (f"{block:016x}" * (length // 16) for block in request.block_hashes)
    text = "".join(pieces)
    rest = request.prompt_tokens * BYTES_PER_TOKEN - len(text)
    return text + f"{name} ".ljust(rest, ".")[:rest]
