"""Nothing is left behind, however it ends."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable

import psutil
import pytest

from tests.e2e.deployment import MODEL, Deployment
from tests.e2e.traces import files_of
from tests.fakes.load import Load
from tests.fakes.polling import consistently, eventually, wait_until

QUIET = ("--Planner.no-operation=true",)


def left_of(children: list[psutil.Process]) -> list[str]:
    return [
        child.name() for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE
    ]


async def test_ctrl_c_finishes_the_streams_and_exits_0(deploy: Callable[..., Deployment]) -> None:
    deployment = await asyncio.to_thread(deploy, "graphs.disagg:Frontend", "disagg.yaml", *QUIET)
    children = deployment.children()
    async with Load(deployment.url, MODEL, clients=4, tokens=250) as load:
        await eventually(load.streams)
        load.send_no_more()
        code = await asyncio.to_thread(deployment.stop)
    assert code == 0, deployment.text
    assert load.incomplete == []
    assert left_of(children) == []
    assert not deployment.statefile_path.exists()


@pytest.mark.alone
async def test_a_second_ctrl_c_ends_it_within_two_seconds(deploy: Callable[..., Deployment]) -> None:
    deployment = await asyncio.to_thread(deploy, "graphs.disagg:Frontend", "disagg.yaml", *QUIET)
    children = deployment.children()
    assert deployment.process
    async with Load(deployment.url, MODEL, clients=2, tokens=8000) as load:
        await eventually(load.streams)
        load.send_no_more()
        deployment.process.send_signal(signal.SIGINT)
        await consistently(lambda: deployment.process.poll() is None, for_s=1.0)
        deployment.process.send_signal(signal.SIGINT)
        started_s = time.monotonic()
        await asyncio.to_thread(deployment.process.wait, 10)
        assert time.monotonic() - started_s < 2.0
    assert left_of(children) == []


def test_stop_ends_the_deployment_and_says_so_when_there_is_none(deploy: Callable[..., Deployment]) -> None:
    deployment = deploy("graphs.agg:Frontend", "agg.yaml", *QUIET)
    assert deployment.run("stop").returncode == 0
    assert deployment.process
    assert deployment.process.wait(20) == 0
    for command in (["stop"], ["status"], ["scale", "decode=2"], ["why"]):
        result = deployment.run(*command)
        assert result.returncode == 2, command
        assert "dynaplan serve" in result.stderr


@pytest.mark.parametrize(
    "moment",
    ["Stopping", *(pytest.param(each, marks=pytest.mark.slow) for each in ("statefile", "Stopped."))],
)
def test_sighup_while_it_starts_or_cleans_up_leaves_nothing(
    deploy: Callable[..., Deployment], moment: str
) -> None:
    deployment = deploy("graphs.agg:Frontend", "agg.yaml", *QUIET, wait=False)
    process = deployment.process
    assert process
    if moment == "statefile":
        wait_until(lambda: deployment.statefile_path.with_suffix(".serve.lock").exists(), 90)
        for _ in range(20):
            process.send_signal(signal.SIGHUP)
    deployment.wait_ready()
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: moment in deployment.text, interval_s=0.001)

    def ends_though_it_is_told_of_a_closed_terminal() -> bool:
        process.send_signal(signal.SIGHUP)
        return process.poll() is not None

    wait_until(ends_though_it_is_told_of_a_closed_terminal, 60, 0.002)
    assert process.returncode == 0, deployment.text
    assert not deployment.statefile_path.exists()
    assert files_of(deployment) == []
