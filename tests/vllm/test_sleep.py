"""A real vLLM that sleeps or is paused is not routed to, is shown as asleep, and is woken.

Level 0 stops its scheduler and keeps its memory: levels 1 and 2 need a GPU.
"""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import Callable

import pytest

from tests.e2e.deployment import Deployment
from tests.e2e.llamacpp import MESSAGES, WORKER, ask, engine_of
from tests.fakes.polling import eventually

ANSWERED_WITHIN_S = 60.0


@pytest.fixture(scope="module")
def deployment(deploy_vllm: Callable[..., Deployment]) -> Deployment:
    mode = "--VllmWorker.ServiceArgs.envs.VLLM_SERVER_DEV_MODE=1"
    return deploy_vllm("graphs.agg:Frontend", "vllm.yaml", ("VllmWorker",), mode)


def command(url: str, token: str) -> None:
    request = urllib.request.Request(url, b"", {"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=30) as response:
        assert response.status == 200


def state(deployment: Deployment) -> str:
    rows = json.loads(deployment.run("status", "--json").stdout)["workers"]
    return next(str(row["state"]) for row in rows if row["worker"] == WORKER)


async def answered(deployment: Deployment) -> None:
    asking = asyncio.to_thread(ask, deployment, "/v1/chat/completions", messages=MESSAGES, max_tokens=4)
    status, answer = await asyncio.wait_for(asking, ANSWERED_WITHIN_S)
    assert status == 200, answer


@pytest.mark.parametrize("way", ["/sleep?level=0", "/pause"])
async def test_it_is_shown_woken_by_the_command_and_by_a_request_even_in_its_first_second(
    deployment: Deployment, way: str
) -> None:
    url, token = await engine_of(deployment, WORKER)
    await answered(deployment)

    await asyncio.to_thread(command, url + way, token)
    await answered(deployment)  # sent before anybody knows that it sleeps
    await eventually(lambda: state(deployment) == "ready")

    await asyncio.to_thread(command, url + way, token)
    await eventually(lambda: state(deployment) == "asleep")
    woken = await asyncio.to_thread(deployment.run, "wake", WORKER)
    assert woken.stdout.startswith(f"{WORKER} is awake after "), woken.stderr
    await answered(deployment)

    await asyncio.to_thread(command, url + way, token)
    await eventually(lambda: state(deployment) == "asleep")
    await answered(deployment)
    await eventually(lambda: state(deployment) == "ready")
