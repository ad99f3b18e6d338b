"""Two deployments that want the same name or GPUs, and processes that stand still while others act."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tests.e2e.deployment import EXECUTED, Deployment
from tests.e2e.held import environment_of
from tests.e2e.test_kills import is_whole
from tests.e2e.traces import files_of, in_torture, processes_of
from tests.fakes.polling import eventually, wait_until

QUIET = ("--Planner.no-operation=true", "--drain-timeout", "3", "--leave-timeout", "3")
AGGREGATED = ("graphs.agg:Frontend", "agg.yaml", *QUIET)


def gpus_in_use(*deployments: Deployment) -> list[str]:
    """By the environments of the decode workers that run."""
    return [
        environment_of(pid)["CUDA_VISIBLE_DEVICES"]
        for deployment in deployments
        for pid, line in processes_of(deployment).items()
        if "--service-name VllmWorker" in line and environment_of(pid)
    ]


@pytest.mark.slow
def test_of_two_serves_of_one_namespace_at_the_same_moment_one_serves(
    deploy: Callable[..., Deployment],
) -> None:
    rivals = [deploy(*AGGREGATED, wait=False) for _ in range(2)]
    # Their runtime directories differ, so only the statefile's lock is between them.
    wait_until(lambda: any(each.process and each.process.poll() is not None for each in rivals), 20)
    refused, serving = sorted(rivals, key=lambda each: each.process is None or each.process.poll() is None)
    assert refused.process
    assert serving.process
    assert refused.process.returncode == 2
    assert f"already running here (pid {serving.process.pid})" in serving.text
    serving.wait_ready()
    assert is_whole(serving)
    assert serving.stop() == 0
    assert files_of(serving) == []


@in_torture
async def test_two_deployments_that_scale_against_each_other_never_share_a_gpu(
    deploy: Callable[..., Deployment],
) -> None:
    gpus = ("--gpus", "4")
    one = await asyncio.to_thread(deploy, *AGGREGATED, *gpus, namespace="one", environment=EXECUTED)
    two = await asyncio.to_thread(deploy, *AGGREGATED, *gpus, namespace="two", environment=EXECUTED)
    seen: list[list[str]] = []

    def in_use() -> list[str]:
        seen.append(gpus_in_use(one, two))
        return seen[-1]

    both = [asyncio.to_thread(each.run, *scale_to(each, 4)) for each in (one, two)]
    await asyncio.gather(*both)
    await eventually(lambda: len(in_use()) == 4, 15)
    waiting = one if "waits for its GPUs" in one.text else two
    assert "claimed by deployment" in waiting.text
    other = two if waiting is one else one
    await asyncio.to_thread(other.run, *scale_to(other, 1))
    await eventually(lambda: len(in_use()) and len(gpus_in_use(waiting)) == 3, 20)
    assert all(len(gpus) == len(set(gpus)) for gpus in seen), seen


def scale_to(deployment: Deployment, decode: int) -> tuple[str, ...]:
    return ("scale", f"decode={decode}", "--no-wait", "--namespace", deployment.namespace)
