"""The SLA policy on a live deployment: traffic seen at the frontend, workers that it needs, none lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

from tests.e2e.deployment import MODEL, Deployment
from tests.e2e.test_scaling import ready
from tests.fakes.load import Load
from tests.fakes.polling import eventually

PROFILE = "a100-bf16"
OPTIONS = (
    "--Planner.policy=sla",
    f"--Planner.profile-results-dir={PROFILE}",
    "--Planner.adjustment-interval=2",
    "--Planner.metric-pulling-interval=0.25",
    "--Planner.ttft=250",
    "--Planner.itl=100",
    "--Planner.isl=1875",  # what is assumed until an answer has ended: what is sent
    "--Planner.osl=20",
    "--Planner.max-gpu-budget=4",
    "--Planner.slo-window=10",  # what backtests look back on
    f"--VllmWorker.profile={PROFILE}",
    f"--PrefillWorker.profile={PROFILE}",
)


async def test_targets_get_the_workers_that_the_traffic_needs_and_give_them_back(
    deploy: Callable[..., Deployment],
) -> None:
    deployment = await asyncio.to_thread(deploy, "graphs.disagg:Frontend", "disagg.yaml", *OPTIONS)
    async with Load(deployment.url, MODEL, clients=8, tokens=20, prompt="word " * 1500) as load:
        await eventually(lambda: ready(deployment, "PrefillWorker") >= 2, 40)
        await load.stop()
    assert load.incomplete == []
    await eventually(lambda: ready(deployment, "PrefillWorker") == 1, 80)
    told = deployment.run("why", "-n", "50", "--changes").stdout
    assert "of the TTFTs are over 250 ms" in told
    assert "requests/s expected in" in told
    record = last_record(deployment)
    assert record["observation"]["startup_s"] > 0
    assert record["observation"]["traffic"]["requests"] is not None


def last_record(deployment: Deployment) -> dict:
    planner = Path(deployment.statefile()["addresses"]["log_dir"]) / "planner"
    log_dir = Path((planner / "current").read_text().strip())
    *_, line = (log_dir / "decisions.jsonl").read_text().splitlines()
    return json.loads(line)
