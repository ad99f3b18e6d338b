"""What ``status`` and ``scale`` say is so, also when the processes behind it do nothing."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

from tests.e2e.deployment import MODEL, Deployment
from tests.e2e.test_kills import process_of
from tests.fakes.load import Load
from tests.fakes.polling import eventually, wait_until

QUIET = ("--Planner.no-operation=true",)


def test_a_stopped_fleet_plugin_is_named_and_replaced_and_scaling_goes_on(
    deploy: Callable[..., Deployment],
) -> None:
    deployment = deploy("graphs.agg:Frontend", "agg.yaml", *QUIET)
    stopped = process_of(deployment, "FleetPlugin")
    stopped.suspend()
    silence = f"the fleet plugin (pid {stopped.pid}) has not answered for"
    wait_until(lambda: silence in deployment.run("status").stdout, 40)
    result = deployment.run("scale", "decode=2", timeout_s=120)
    assert (result.returncode, "carried out" in result.stdout) == (0, True), result.stderr
    assert "The fleet plugin stands still" in deployment.text
    assert json.loads(deployment.run("status", "--json").stdout)["troubles"] == []


async def test_carried_out_is_said_when_the_drained_worker_has_let_its_gpu_go(
    deploy: Callable[..., Deployment],
) -> None:
    deployment = await asyncio.to_thread(deploy, "graphs.agg:Frontend", "agg.yaml", *QUIET)
    await asyncio.to_thread(deployment.scale, decode=2)
    async with Load(deployment.url, MODEL, clients=6, tokens=300) as load:
        await eventually(load.streams)
        load.send_no_more()
        await asyncio.to_thread(deployment.scale, decode=1)
        assert list(deployment.workers("VllmWorker")) == ["dynamo_VllmWorker"]
        assert len(load.outcomes) > 0
    assert load.incomplete == []
