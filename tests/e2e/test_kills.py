"""kill -9 of any one process: the service is whole again by itself."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import psutil
import pytest

from tests.e2e.deployment import MODEL, Deployment
from tests.e2e.traces import in_torture
from tests.fakes.load import Load, Outcome
from tests.fakes.polling import eventually, wait_until

KILLS = int(os.environ.get("DYNAPLAN_KILLS", "50"))
MOST_ENDS_A_MINUTE = 4
QUIET = ("--Planner.no-operation=true",)


def process_of(deployment: Deployment, words: str) -> psutil.Process:
    [pid] = pids_of(deployment, words)
    return psutil.Process(pid)


def pids_of(deployment: Deployment, words: str) -> list[int]:
    """The processes of the deployment whose command line has the words."""
    found = []
    for child in deployment.children():
        with suppress(psutil.Error):  # one that has just ended
            if words in deployment.command_line(child.pid, " ".join(child.cmdline())):
                found.append(child.pid)
    return found


def is_whole(deployment: Deployment) -> bool:
    workers = deployment.workers()
    is_ready = all(worker["state"] == "ready" for worker in workers.values())
    gpus = [gpu for worker in workers.values() for gpu in worker["resources"].get("allocated_gpus", ())]
    return (
        is_ready
        and len(gpus) == len(set(gpus))
        and all(psutil.pid_exists(each["pid"]) for each in workers.values())
    )


@pytest.mark.parametrize(
    "victim",
    [
        "--service-name VllmWorker",
        pytest.param("--service-name PrefillWorker", marks=in_torture),
        pytest.param("--service-name Planner", marks=in_torture),
        pytest.param("circus", marks=pytest.mark.slow),
        pytest.param("etcd", marks=in_torture),
        "nats-server",
    ],
)
async def test_requests_are_answered_and_the_service_is_whole_again(
    deploy: Callable[..., Deployment], victim: str
) -> None:
    deployment = await asyncio.to_thread(deploy, "graphs.disagg:Frontend", "disagg.yaml", *QUIET)
    words = {"circus": "FleetPlugin", "etcd": "etcd --name"}.get(victim, victim)
    killed = process_of(deployment, words)
    async with Load(deployment.url, MODEL, clients=3, tokens=30, prompt="word " * 900) as load:
        await eventually(lambda: len(load.outcomes) > 3, 20)
        killed.kill()
        await eventually(lambda: pids_of(deployment, words) not in ([], [killed.pid]), 20)
        await eventually(lambda: is_whole(deployment), 20)
        count = len(load.outcomes)
        await eventually(lambda: len(load.outcomes) > count + 6, 20)
        await load.stop()
    # A stream that a killed decode worker had begun cannot be completed; everything else is.
    begun = [outcome for outcome in load.incomplete if outcome.status == 200]
    assert [outcome for outcome in load.incomplete if outcome.status != 200] == []
    assert len(begun) <= (3 if "VllmWorker" in victim else 0), begun


@in_torture
@pytest.mark.timeout(120 + 60 * KILLS)
@pytest.mark.parametrize("frontends", [1, 2])
async def test_no_connection_is_refused_while_frontends_are_killed(
    deploy: Callable[..., Deployment], frontends: int
) -> None:
    options = (f"--Frontend.ServiceArgs.workers={frontends}", "--VllmWorker.startup-time=0.1")
    deployment = await asyncio.to_thread(deploy, "graphs.agg:Frontend", "agg.yaml", *QUIET, *options)
    killed_s: list[float] = []
    cut: list[Outcome] = []
    async with Load(deployment.url, MODEL, clients=20, tokens=60, keeps_connections=False) as load:
        while len(killed_s) < KILLS:
            # After more crashes in a minute a frontend is failed, and tried again after half a minute.
            await eventually(lambda: len(recent(killed_s)) < MOST_ENDS_A_MINUTE * frontends, 60)
            await eventually(load.streams, 60)
            names = sorted(deployment.workers("Frontend"))
            victim = deployment.pid_of(names[len(killed_s) % frontends])
            cut += load.open
            os.kill(victim, signal.SIGKILL)
            killed_s.append(time.monotonic())
            await eventually(partial(back, deployment, victim), 60)
        await load.stop()
    lost = [outcome for outcome in load.incomplete if not any(outcome is each for each in cut)]
    print(f"{len(load.outcomes)} requests, {len(load.incomplete)} cut of {len(cut)} that were open at kills")
    assert lost == []
    assert [each for each in load.incomplete if "ConnectorError" in each.error] == []
    assert len(load.incomplete) < len(cut) or frontends == 1


def recent(moments_s: list[float]) -> list[float]:
    """Those of the last minute."""
    return [each for each in moments_s if time.monotonic() - each < 60]


def back(deployment: Deployment, old: int) -> bool:
    """Tell whether another process runs in the place of the one that was killed."""
    return is_whole(deployment) and all(each["pid"] != old for each in deployment.workers().values())


@in_torture
@pytest.mark.timeout(120 + 60 * KILLS)
async def test_a_frontend_is_restarted_under_load_and_no_request_is_lost(
    deploy: Callable[..., Deployment],
) -> None:
    deployment = await asyncio.to_thread(
        deploy, "graphs.agg:Frontend", "agg.yaml", *QUIET, "--VllmWorker.startup-time=0.1"
    )
    pid = deployment.pid_of("dynamo_Frontend")
    async with Load(deployment.url, MODEL, clients=20, tokens=60) as load:
        for _ in range(KILLS):
            await eventually(load.streams, 60)
            told = await asyncio.to_thread(deployment.run, "restart", "frontend")
            assert told.returncode == 0, told.stderr
            before, [pid] = (
                pid,
                [each["pid"] for each in deployment.workers("Frontend").values() if each["pid"]],
            )
            assert pid != before
        await load.stop()
    assert load.incomplete == []


@in_torture
def test_a_worker_that_crashes_again_and_again_is_failed_and_says_why(
    deploy: Callable[..., Deployment],
) -> None:
    deployment = deploy("graphs.agg:Frontend", "agg.yaml", *QUIET, "--VllmWorker.startup-time=0.1")
    for _ in range(8):
        worker = deployment.workers()["dynamo_VllmWorker"]
        if worker["state"] == "failed":
            break
        if worker["pid"] and psutil.pid_exists(worker["pid"]):
            os.kill(worker["pid"], signal.SIGKILL)
        wait_until(
            lambda pid=worker["pid"]: (
                deployment.workers()["dynamo_VllmWorker"]["state"] == "failed"
                or deployment.workers()["dynamo_VllmWorker"]["pid"] not in (0, pid)
            ),
            40,
        )
    worker = deployment.workers()["dynamo_VllmWorker"]
    assert worker["state"] == "failed"
    assert worker["reason"]
    assert worker["resources"].get("allocated_gpus", []) == []
    assert "dynamo_VllmWorker" in deployment.text
