"""Routing by cached prefixes in virtual time: hit rates and TTFT beside other routers', and the limit.

The limit is one cache of all workers' size that every request goes through in the order of arrival, least
recently used blocks leaving first: a router cannot do better, but by chance. Workers are aggregated H200s
with the shipped profile of the 8B model; beyond its longest prompt, 16,372 tokens, times are extrapolated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.traffic import Traffic
from dynaplan.engines.timing_model.engine_model import EngineSettings
from dynaplan.engines.timing_model.kv_blocks import KvBlocks
from dynaplan.graph.lifecycle import Role
from dynaplan.lab.simulate.options import SimulateOptions
from dynaplan.lab.simulate.policy_runs import run_simulations, service_settings
from dynaplan.simulation.meter import TrafficMeter
from dynaplan.simulation.router import SimulatedRouting
from dynaplan.simulation.run import Result, StaticPolicy, simulate
from dynaplan.simulation.traces.reading import read_requests
from tests.bench.table import Row

MOONCAKE = str(Path(__file__).parent.parent / "fixtures" / "traces" / "mooncake_synthetic.jsonl.gz")
LONG: Mapping[str, Any] = {
    "profile": "h200_sxm-Llama-3.1-8B-Instruct-FP8",
    "block-size": 64,
    "max-model-len": 200_000,
}
FITTING = {**LONG, "max-model-len": 16_384}

KV = SimulatedRouting("kv")
ROUTERS = {
    "kv, events": KV,
    "kv, prediction": replace(KV, is_kv_events=False),
    "kv, events, the original's weight 1": replace(KV, overlap_weight=1.0),
    "round-robin": SimulatedRouting("round-robin"),
    "least-loaded": SimulatedRouting("least-loaded"),
}
SAME = "turns=8,think=15,duration=240"
TALK = "conversations:{same},rate={rate},system={system},isl={isl},osl={osl},seed={seed}"
TALKS = {
    "long turns": TALK.format(same=SAME, rate=2.5, system=2000, isl=1500, osl=500, seed=1),
    "long turns, another seed": TALK.format(same=SAME, rate=2.5, system=2000, isl=1500, osl=500, seed=2),
    "short turns": TALK.format(same=SAME, rate=6, system=500, isl=300, osl=300, seed=3),
    "a long system prompt": TALK.format(same=SAME, rate=4, system=6000, isl=200, osl=200, seed=4),
}


def rows(_: int) -> Iterator[Row]:
    """Virtual time: the same each time, and measured once."""
    yield from _compared("Mooncake", MOONCAKE, 8, LONG, ROUTERS)
    yield from _compared("Mooncake, what fits 16,384 tokens", MOONCAKE, 8, FITTING, ROUTERS)
    yield from _compared("Mooncake, 4 workers", MOONCAKE, 4, LONG, {"kv, events": KV})
    for name, trace in TALKS.items():
        yield from _compared(name, trace, 4, LONG, ROUTERS)
    first = next(iter(TALKS.values()))
    four, three = run(first, SimulatedRouting("round-robin"), 4, LONG), run(first, KV, 3, LONG)
    slower = mean(three) / mean(four)
    yield Row("long turns: 3 workers with kv over 4 round-robin, mean TTFT", "x", [slower], 1)
    yield from _planned()


SHARED = "conversations:turns=1,system=2400,isl=600,osl=150,rate=40,duration=1500,seed=1"
"""Prompts of 3000 tokens, of which all share 2400."""


def _planned() -> Iterator[Row]:
    """The GPUs of the SLA policy in a disaggregated deployment, with and without the measured hits."""
    traffic = TrafficMeter.traffic

    def without_hits(meter: TrafficMeter, interval_s: float) -> Traffic:
        return replace(traffic(meter, interval_s), prefix_hit_rate=None)

    for name, measured in (("known", traffic), ("not known", without_hits)):
        options = SimulateOptions(
            SHARED, ("sla",), gpus=16, first=PoolSizes(3, 2), engine=FITTING, routing=KV
        )
        with mock.patch.object(TrafficMeter, "traffic", measured):
            [result] = run_simulations(options)
        gpus, outcome = result.gpu_hours * 3600 / result.trace_s, result.outcome
        in_time = 100 * outcome.attainment(outcome.both_met)
        yield Row(f"80 % shared, sla, hits {name}: GPUs", "mean", [gpus])
        yield Row(f"80 % shared, sla, hits {name}: in time", "%", [in_time])


def _compared(
    name: str, trace: str, workers: int, engine: Mapping[str, Any], routers: Mapping[str, SimulatedRouting]
) -> Iterator[Row]:
    most = limit(trace, workers, engine)
    yield Row(f"{name}: hits of one cache of all workers' size", "%", [100 * most])
    results = {router: run(trace, routing, workers, engine) for router, routing in routers.items()}
    others = results.get("least-loaded")
    for router, result in results.items():
        outcome, is_ours = result.outcome, router == "kv, events"
        ttft_ms = outcome.ttft_ms
        yield Row(
            f"{name}, {router}: hits over the limit's",
            "x",
            [(outcome.hit_rate or 0.0) / most],
            0.95 if is_ours else None,
            True,
        )
        if is_ours and "round-robin" in results:
            part = mean(result) / mean(results["round-robin"])
            half = 0.5 if name.startswith("long turns") else None
            yield Row(f"{name}, {router}: mean TTFT over round-robin's", "x", [part], half)
        for percent in (50, 95, 99):
            aim = others.outcome.ttft_ms.percentile(99) if is_ours and others and percent == 99 else None
            yield Row(f"{name}, {router}: TTFT p{percent}", "ms", [ttft_ms.percentile(percent)], aim)
        yield Row(f"{name}, {router}: busiest worker's requests over the mean", "x", [outcome.imbalance])


def mean(result: Result) -> float:
    """The mean TTFT in ms."""
    return result.outcome.ttft_ms.total / result.outcome.ttft_ms.count


def run(trace: str, routing: SimulatedRouting, workers: int, engine: Mapping[str, Any]) -> Result:
    """Simulate that many aggregated workers."""
    options = SimulateOptions(trace, gpus=workers, is_disaggregated=False, engine=engine, routing=routing)
    requests = read_requests(trace, 1.0, 1)
    return simulate(requests, service_settings(options), PoolSizes(0, workers), StaticPolicy())


def limit(trace: str, workers: int, engine: Mapping[str, Any]) -> float:
    """The part of the prompts' tokens that one cache of all workers' size would hold."""
    options = SimulateOptions(trace, gpus=workers, is_disaggregated=False, engine=engine)
    sizes, _ = service_settings(options).engines[Role.DECODE]
    blocks = KvBlocks(workers * sizes.total_blocks)
    cached = asked = 0
    for request in read_requests(trace, 1.0, 1):
        if request.prompt_tokens + request.output_tokens <= sizes.context_tokens:
            hashes = request.with_blocks_of(sizes.block_tokens).block_hashes
            cached += _through(blocks, hashes, request.prompt_tokens, sizes)
            asked += request.prompt_tokens
    return cached / asked


def _through(blocks: KvBlocks, hashes: tuple[int, ...], prompt_tokens: int, sizes: EngineSettings) -> int:
    """Send a prompt through a cache; return the tokens that were there. The last one is always computed."""
    most = (prompt_tokens - 1) // sizes.block_tokens
    held = list(hashes[: blocks.matching(hashes[:most])])
    cached = len(held) * sizes.block_tokens
    fresh = len(hashes) - len(held)
    blocks.share(held)
    blocks.take(fresh)
    for block in hashes[len(held) :]:
        if not blocks.publish(block):
            break
        held.append(block)
    blocks.release(len(hashes) - len(held), held)
    return cached
