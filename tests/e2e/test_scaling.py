"""Scaling loses nothing."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.deployment import MODEL, Deployment
from tests.fakes.load import Load
from tests.fakes.polling import eventually

ROUNDS = 10 if os.environ.get("DYNAPLAN_TORTURE") else 1
QUIET = ("--Planner.no-operation=true",)


def ready(deployment: Deployment, component: str) -> int:
    workers = deployment.workers(component).values()
    return len(workers) if all(worker["state"] == "ready" for worker in workers) else -1


async def scale_up_and_down(deployment: Deployment, role: str, component: str) -> None:
    for _ in range(ROUNDS):
        for count in (2, 1):
            await asyncio.to_thread(deployment.scale, **{role: count})
            assert ready(deployment, component) == count, "carried out is said when it is so"


async def test_every_request_is_complete_while_both_pools_scale_up_and_down(
    deploy: Callable[..., Deployment],
) -> None:
    deployment = await asyncio.to_thread(deploy, "graphs.disagg:Frontend", "disagg.yaml", *QUIET)
    async with Load(deployment.url, MODEL, clients=6, tokens=60, prompt="word " * 900) as load:
        await scale_up_and_down(deployment, "decode", "VllmWorker")
        await scale_up_and_down(deployment, "prefill", "PrefillWorker")
        await load.stop()
    assert len(load.outcomes) > 20
    assert load.incomplete == []
    assert_proof_in_logs(deployment)


def assert_proof_in_logs(deployment: Deployment) -> None:
    log_dir = Path(deployment.statefile()["addresses"]["log_dir"])
    for name in ("dynamo_VllmWorker_1", "dynamo_PrefillWorker_1"):
        text = (log_dir / f"{name}.log").read_text()
        proofs = [line for line in text.splitlines() if "drained: held" in line]
        assert len(proofs) == ROUNDS, text
        assert all(" 0 cut" in proof for proof in proofs)


@pytest.mark.slow
async def test_the_planner_adds_a_decode_worker_under_load_and_removes_it_after(
    deploy: Callable[..., Deployment],
) -> None:
    options = (
        "--Planner.adjustment-interval=2",
        "--Planner.metric-pulling-interval=0.5",
        "--Planner.decode-kv-scale-up-threshold=0.5",
        "--Planner.decode-kv-scale-down-threshold=0.2",
        "--Planner.max-gpu-budget=2",
        "--VllmWorker.num-gpu-blocks-override=36",
        "--VllmWorker.max-model-len=1024",
    )
    deployment = await asyncio.to_thread(deploy, "graphs.agg:Frontend", "agg.yaml", *options)
    async with Load(deployment.url, MODEL, clients=6, tokens=200) as load:
        await eventually(lambda: ready(deployment, "VllmWorker") == 2, 40)
        await load.stop()
    assert load.incomplete == []
    await eventually(lambda: ready(deployment, "VllmWorker") == 1, 60)
    explanation = deployment.run("why", "-n", "50").stdout
    assert "decode" in explanation
