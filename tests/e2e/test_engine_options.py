"""A planner that may adjust engines' options mends one that is too small, and no request is lost."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from os import kill
from typing import Any

import pytest

from tests.e2e.deployment import MODEL, Deployment
from tests.e2e.held import serve_of
from tests.e2e.test_targets import records
from tests.fakes.load import Load
from tests.fakes.polling import eventually

OPTIONS = (
    *("--Planner.policy=sla", "--Planner.ttft=250", "--Planner.itl=100", "--Planner.adjust-knobs=true"),
    *("--Planner.adjustment-interval=1", "--Planner.metric-pulling-interval=0.25"),
    *("--Planner.max-gpu-budget=2", "--Planner.min-gpu-budget=2"),
    "--Planner.slo-window=20",  # a quarter of it is how long a change is judged
    *("--VllmWorker.ServiceArgs.workers=2", "--VllmWorker.max-num-seqs=1", "--VllmWorker.startup-time=1"),
    "--VllmWorker.profile=h200-fp8-fit",
)


def starts(deployment: Deployment) -> set[tuple[int, int]]:
    """The processes of the decode workers."""
    return {(each["pid"], each["started_at"]) for each in deployment.workers("VllmWorker").values()}


def planner(deployment: Deployment) -> int:
    return deployment.pid_of("dynamo_Planner")


def serve(deployment: Deployment) -> int:
    found = serve_of(deployment)
    assert found
    return found.pid


def last_change(deployment: Deployment) -> dict[str, Any]:
    """The change that the planner's last decision knew of; empty before the first one."""
    found = records(deployment)[-1:]
    return (found[0]["next_state"].get("options", {}).get("change") or {}) if found else {}


@pytest.mark.parametrize("victim", [planner, serve], ids=lambda each: each.__name__)
async def test_too_few_requests_at_once_are_mended_while_requests_flow_and_something_is_killed(
    deploy: Callable[..., Deployment], victim: Callable[[Deployment], int]
) -> None:
    deployment = await asyncio.to_thread(deploy, "graphs.agg:Frontend", "agg.yaml", *OPTIONS)
    before = starts(deployment)
    async with Load(deployment.url, MODEL, clients=8, tokens=40) as load:
        await eventually(lambda: bool(last_change(deployment)), 60)
        kill(victim(deployment), signal.SIGKILL)
        await eventually(lambda: last_change(deployment).get("result") == "done", 60)
        await load.stop()
    assert load.incomplete == []
    assert len(starts(deployment)) == 2
    assert not starts(deployment) & before
    assert "VllmWorker.max-num-seqs is 2 by the planner, in place of 1" in deployment.run("status").stdout
    assert "max-num-seqs 1 -> 2 is asked for" in deployment.run("why", "-n", "200").stdout
    assert "nothing has changed" in deployment.run("reload", "-y").stdout
