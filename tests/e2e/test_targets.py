"""The SLA policy on a live deployment: traffic seen at the frontend, workers that it needs, none lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dynaplan.planner.learnt_timings import LearntTimings
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
    record = records(deployment)[-1]
    assert record["observation"]["startup_s"] > 0
    assert record["observation"]["traffic"]["requests"] is not None


async def test_no_more_requests_run_on_a_worker_than_the_planner_lets_and_all_are_answered(
    deploy: Callable[..., Deployment],
) -> None:
    options = (
        *("--Planner.policy=sla", "--Planner.ttft=60000", "--Planner.adjustment-interval=1"),
        *("--Planner.metric-pulling-interval=0.25", "--Planner.max-running-requests=3"),
        *("--Planner.max-gpu-budget=1", f"--VllmWorker.profile={PROFILE}"),
    )
    deployment = await asyncio.to_thread(deploy, "graphs.agg:Frontend", "agg.yaml", *options)
    async with Load(deployment.url, MODEL, clients=12, tokens=60, prompt="word " * 50) as load:

        async def is_full() -> bool:
            return await asyncio.to_thread(running, deployment) == 3

        await eventually(is_full, 40)
        assert max([await asyncio.to_thread(running, deployment) for _ in range(4)]) == 3
        await load.stop()
    assert load.incomplete == []
    assert "running limit: 3 at once on a worker" in deployment.run("why").stdout


def running(deployment: Deployment) -> int:
    """The requests that the workers' engines have."""
    document = json.loads(deployment.run("status", "--json").stdout)
    return sum(each["running"] or 0 for each in document["workers"] if each["role"] == "decode")


TWO_NUMBERS = (
    "--Planner.policy=sla",
    "--Planner.ttft=250",
    "--Planner.itl=100",
    "--Planner.profile-results-dir=learnt",  # simulated engines have a profile otherwise
    "--Planner.adjustment-interval=2",
    "--Planner.max-gpu-budget=2",
    "--Planner.slo-window=20",
    f"--VllmWorker.profile={PROFILE}",
)


@pytest.mark.slow
async def test_without_a_profile_the_planner_learns_and_begins_with_it_the_next_time(
    deploy: Callable[..., Deployment],
) -> None:
    deployment = await asyncio.to_thread(deploy, "graphs.agg:Frontend", "agg.yaml", *TWO_NUMBERS)
    async with Load(deployment.url, MODEL, clients=8, tokens=20, prompt="word " * 1500) as load:
        await eventually(lambda: ready(deployment, "VllmWorker") == 2, 60)
        await eventually(lambda: is_known(records(deployment)[-1]), 60)
        await load.stop()
    assert load.incomplete == []
    await eventually(lambda: ready(deployment, "VllmWorker") == 1, 80)
    assert "learnt from" in deployment.run("why", "-n", "50").stdout
    await asyncio.to_thread(deployment.stop)
    await asyncio.to_thread(deployment.start)
    await eventually(lambda: records(deployment) != [], 20)
    assert is_known(records(deployment)[0])


def is_known(record: dict) -> bool:
    """Tell whether workers are counted by what was learnt."""
    learnt = LearntTimings.from_json(record["observation"].get("learnt", {}))
    return bool(learnt.decode) and not learnt.lacking(is_disaggregated=False)


def records(deployment: Deployment) -> list[dict]:
    planner = Path(deployment.statefile()["addresses"]["log_dir"]) / "planner"
    log_dir = Path((planner / "current").read_text().strip())
    file = log_dir / "decisions.jsonl"
    if not file.exists():
        return []
    *whole, _ = file.read_text().split("\n")  # the last line may be half written yet
    return [json.loads(line) for line in whole]
