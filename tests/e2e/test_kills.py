"""kill -9 of any one process: the service is whole again by itself."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import suppress

import psutil
import pytest

from tests.e2e.deployment import MODEL, Deployment
from tests.e2e.held import serve_of
from tests.e2e.traces import in_torture
from tests.fakes.load import Load
from tests.fakes.polling import eventually

KILLS = int(os.environ.get("DYNAPLAN_KILLS", "50"))
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
        "nats-server",
    ],
)
async def test_requests_are_answered_and_the_service_is_whole_again(
    deploy: Callable[..., Deployment], victim: str
) -> None:
    deployment = await asyncio.to_thread(deploy, "graphs.disagg:Frontend", "disagg.yaml", *QUIET)
    words = {"circus": "FleetPlugin"}.get(victim, victim)
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


async def test_a_worker_that_dies_while_serve_is_away_is_reported_with_its_signal(
    deploy: Callable[..., Deployment],
) -> None:
    deployment = await asyncio.to_thread(deploy, "graphs.agg:Frontend", "agg.yaml", *QUIET)
    serve, worker = serve_of(deployment), process_of(deployment, "--service-name VllmWorker")
    assert serve
    serve.kill()
    worker.send_signal(signal.SIGSEGV)
    await eventually(lambda: "VllmWorker ended unasked (killed by SIGSEGV)" in deployment.text)
    await eventually(lambda: is_whole(deployment))


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
