"""A vLLM that sleeps is not routed to, is shown as asleep, and is woken by command or by demand.

The engine is ``tests.fakes.engine_server``, which says what it copies of vLLM.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dynaplan.store.etcd import EtcdStore
from dynaplan.store.instances import ASLEEP, SERVICES_PREFIX, Instance
from tests.e2e.deployment import Deployment
from tests.e2e.traces import in_torture
from tests.fakes.engine_server import COMMAND
from tests.fakes.polling import wait_until

WORKERS = ("dynamo_VllmWorker", "dynamo_VllmWorker_1")


async def engines(deployment: Deployment) -> dict[str, str]:
    """The address of each worker's engine."""
    store = EtcdStore.from_environment(deployment.clients_environment())
    try:
        found = [Instance.from_json(item.value) for item in await store.list(SERVICES_PREFIX)]
    finally:
        await store.close()
    return {each.worker: each.engine_url for each in found if each.engine_url}


def post(url: str, body: Any = None) -> tuple[int, str]:
    data = json.dumps(body).encode() if body else b""
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def ask(deployment: Deployment) -> tuple[int, str]:
    return post(f"{deployment.url}/v1/completions", {"model": "m", "prompt": "hi", "max_tokens": 2})


def run(deployment: Deployment, *words: str) -> subprocess.CompletedProcess[str]:
    command = [deployment.command[0], *words]
    return subprocess.run(command, env=deployment.environment, capture_output=True, text=True, check=False)


def states(deployment: Deployment) -> dict[str, str]:
    rows = json.loads(run(deployment, "status", "--json").stdout)["workers"]
    return {row["worker"]: row["state"] for row in rows if row["role"] == "decode"}


async def told(deployment: Deployment, number: int) -> None:
    """Wait until that many workers have told the frontends that they sleep; ``status`` asks them itself."""
    store = EtcdStore.from_environment(deployment.clients_environment())
    try:
        while len(await store.list(ASLEEP.prefix("dynamo"))) != number:
            await asyncio.sleep(0.05)
    finally:
        await store.close()


@in_torture
async def test_a_sleeping_worker_is_shown_left_alone_and_woken_by_command_or_demand(
    deploy: Callable[..., Deployment], tiny_hf: Path
) -> None:
    deployment = await asyncio.to_thread(
        deploy,
        "graphs.agg:Frontend",
        "vllm.yaml",
        f"--Common.model={tiny_hf}",
        "--Common.served-model-name=m",
        f"--VllmWorker.vllm-command={shlex.join(COMMAND)}",
        "--VllmWorker.hang-timeout=4",
        "--VllmWorker.ServiceArgs.workers=2",
        "--Planner.no-operation=true",
        environment={"VLLM_SERVER_DEV_MODE": "1", "DYNAPLAN_SIMULATED_GPUS": "2"},
    )
    pids = {name: deployment.pid_of(name) for name in WORKERS}
    urls = await engines(deployment)
    post(f"{urls[WORKERS[0]]}/sleep?level=1")
    wait_until(lambda: states(deployment) == dict(zip(WORKERS, ("asleep", "ready"), strict=True)), 20)
    await asyncio.wait_for(told(deployment, 1), 20)
    assert [ask(deployment)[0] for _ in range(8)] == [200] * 8
    assert "asleep" in run(deployment, "status").stdout

    woken = run(deployment, "wake")
    assert woken.returncode == 0, woken.stderr
    assert woken.stdout.startswith(f"{WORKERS[0]} is awake after ")
    assert run(deployment, "wake").stdout == "no worker is asleep\n"
    assert run(deployment, "wake", "nobody").returncode == 2

    post(f"{urls[WORKERS[0]]}/sleep?level=1")
    post(f"{urls[WORKERS[1]]}/pause")
    wait_until(lambda: set(states(deployment).values()) == {"asleep"}, 20)
    await asyncio.wait_for(told(deployment, 2), 20)
    with ThreadPoolExecutor(8) as threads:
        answers = [each.result() for each in [threads.submit(ask, deployment) for _ in range(8)]]
    assert [status for status, _ in answers] == [200] * 8
    assert sorted(states(deployment).values()) == ["asleep", "ready"]
    # Neither is held to hang, whatever it is sent, nor has one crashed.
    assert {name: deployment.pid_of(name) for name in WORKERS} == pids
