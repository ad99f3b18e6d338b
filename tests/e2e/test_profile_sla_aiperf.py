"""The real ``aiperf``, where it is installed (0.13.0 was), against a served graph of the simulated engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from dynaplan.lab.profiling.engine_facts import served_model
from dynaplan.lab.profiling.load.aiperf import Aiperf
from dynaplan.lab.profiling.load.completions import CompletionClient
from dynaplan.lab.profiling.load.meters import DecodeMeter, measure_prefill
from dynaplan.lab.profiling.load.programs import find_program
from dynaplan.lab.profiling.loads import DecodeLoad
from tests.e2e.deployment import Deployment

LOAD = DecodeLoad(isl_tokens=300, osl_tokens=60, concurrency=3)


@pytest.mark.timeout(300)
@pytest.mark.skipif(not find_program("aiperf"), reason="aiperf is not installed")
async def test_aiperf_and_our_own_generator_measure_the_same(
    deploy: Callable[..., Deployment], tmp_path: Path
) -> None:
    slow = ("--VllmWorker.speedup-ratio=0.2", "--VllmWorker.profile=a100-bf16", "--Planner.no-operation=true")
    deployment = await asyncio.to_thread(deploy, "graphs.agg:Frontend", "agg.yaml", *slow)
    async with CompletionClient(deployment.url, await served_model(deployment.url), takes_text=True) as own:
        aiperf = Aiperf(find_program("aiperf"), own, tmp_path)
        itls = [await DecodeMeter(each).measure(LOAD) for each in (own, aiperf)]
        ttfts = [await measure_prefill(each, LOAD._replace(concurrency=1)) for each in (own, aiperf)]
    assert itls[0] is not None and itls[1] is not None
    assert itls[1].itl_ms == pytest.approx(itls[0].itl_ms, rel=0.2)
    assert ttfts[0].ttft_ms > 0.0 < ttfts[1].ttft_ms
