"""Dynamo 1.6.1's coordinator scales our box, and goes on after it, or the box, was started anew."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.deployment import Deployment
from tests.fakes.polling import eventually
from tests.interop.test_dynamo_runtime import coordinating, decided

NAMESPACE = "ns"
WITHIN_S = 120.0


@pytest.fixture
def box(tmp_path: Path, tcp_etcd: str) -> Iterator[Deployment]:
    options = ("--gpus", "6", "--Planner.no-operation=true", "--Common.speedup-ratio=0")
    with Deployment(
        tmp_path,
        "graphs.disagg:Frontend",
        "disagg.yaml",
        *options,
        namespace=NAMESPACE,
        environment={"ETCD_ENDPOINTS": tcp_etcd},
    ) as made:
        yield made.start()


async def wait_carried_out(
    box: Deployment, coordinator: subprocess.Popen[str], prefill: int, decode: int
) -> None:
    """Have the coordinator decide that, and wait until the box has it."""
    await decided(coordinator, prefill, decode)

    def is_so() -> bool:
        workers = {"PrefillWorker": prefill, "VllmWorker": decode}
        return all(
            [each["state"] for each in box.workers(component).values()] == ["ready"] * number
            for component, number in workers.items()
        )

    await eventually(lambda: asyncio.to_thread(is_so), WITHIN_S)


@pytest.mark.timeout(600)
async def test_its_decisions_are_carried_out_and_acknowledged_before_and_after_restarts(
    python: str, box: Deployment, tcp_etcd: str
) -> None:
    rounds = (((2, 3), (1, 3)), ((1, 1), (2, 1)))  # the second coordinator begins with decision 0 again
    for decisions in rounds:
        coordinator = await asyncio.to_thread(coordinating, python, tcp_etcd, NAMESPACE)
        try:
            for wanted in decisions:
                await wait_carried_out(box, coordinator, *wanted)
        finally:
            coordinator.kill()
            await asyncio.to_thread(coordinator.communicate)
    coordinator = await asyncio.to_thread(coordinating, python, tcp_etcd, NAMESPACE)
    try:
        await wait_carried_out(box, coordinator, 1, 2)
        assert await asyncio.to_thread(box.stop) == 0
        await asyncio.to_thread(box.start)
        await wait_carried_out(box, coordinator, 2, 2)
    finally:
        coordinator.kill()
        await asyncio.to_thread(coordinator.communicate)
