"""A real engine killed and hung."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.deployment import Deployment
from tests.e2e.llamacpp import (
    PREFILL_WORKER,
    WORKER,
    disaggregated,
    model_of,
    prefills,
    scratch_files,
)
from tests.e2e.traces import in_torture
from tests.fakes.load import Load
from tests.fakes.polling import eventually
from tests.fakes.processes import freeze

CLIENTS = 6


@pytest.fixture(scope="module")
def two_pools(tmp_path_factory: pytest.TempPathFactory, tiny_gguf: Path) -> Iterator[Deployment]:
    options = (
        "--VllmWorker.ServiceArgs.workers=2",
        "--VllmWorker.hang-timeout=2",
        "--PrefillWorker.hang-timeout=2",
    )
    with disaggregated(tmp_path_factory.mktemp("faults"), tiny_gguf, *options) as deployment:
        yield deployment.start()


async def is_back(deployment: Deployment, worker: str, old_pid: int) -> bool:
    entry = deployment.workers().get(worker, {})
    return entry.get("state") == "ready" and entry.get("pid") not in (0, old_pid)


def lost_without_a_token(load: Load) -> list[object]:
    return [outcome for outcome in load.incomplete if outcome.chunks == 0]


@pytest.mark.slow
async def test_kill_9_of_a_decode_worker_loses_only_what_had_begun(two_pools: Deployment) -> None:
    pid = two_pools.pid_of(WORKER)
    async with Load(two_pools.url, model_of(two_pools), clients=CLIENTS, tokens=300) as load:
        await eventually(lambda: len(load.outcomes) > 3, 20)
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: is_back(two_pools, WORKER, pid), 20)
        answered = len(load.outcomes)
        await eventually(lambda: len(load.outcomes) > answered + CLIENTS, 20)
        await load.stop()
    assert lost_without_a_token(load) == []
    assert len(load.incomplete) <= CLIENTS, load.incomplete
    await eventually(lambda: scratch_files(two_pools) == [], 10)


@pytest.mark.slow
async def test_kill_9_of_a_prefill_worker_loses_nothing_and_no_file_stays(two_pools: Deployment) -> None:
    pid = two_pools.pid_of(PREFILL_WORKER)
    async with Load(two_pools.url, model_of(two_pools), clients=CLIENTS, tokens=60) as load:
        await eventually(lambda: len(load.outcomes) > 3, 20)
        os.kill(pid, signal.SIGKILL)
        await eventually(lambda: is_back(two_pools, PREFILL_WORKER, pid), 20)
        remote = prefills(two_pools)["remote"]
        await eventually(lambda: prefills(two_pools)["remote"] > remote, 20)
        await load.stop()
    assert load.incomplete == []
    await eventually(lambda: scratch_files(two_pools) == [], 10)


@in_torture
async def test_workers_that_stand_still_are_replaced_and_busy_ones_are_not(two_pools: Deployment) -> None:
    pids = {name: entry["pid"] for name, entry in two_pools.workers().items()}
    frozen = {WORKER, PREFILL_WORKER}
    async with Load(two_pools.url, model_of(two_pools), clients=CLIENTS, tokens=300) as load:
        await eventually(lambda: len(load.outcomes) > 3, 20)
        for worker in frozen:
            freeze(pids[worker])
        for worker in frozen:
            await eventually(lambda worker=worker: is_back(two_pools, worker, pids[worker]), 45)
        answered = len(load.outcomes)
        await eventually(lambda: len(load.outcomes) > answered + CLIENTS, 20)
        await load.stop()
    assert lost_without_a_token(load) == []
    assert len(load.incomplete) <= CLIENTS, load.incomplete
    now = {name: entry["pid"] for name, entry in two_pools.workers().items()}
    assert {name for name in pids if pids[name] != now[name]} == frozen
    await eventually(lambda: scratch_files(two_pools) == [], 10)
