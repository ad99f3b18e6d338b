"""One worker process from outside: a real child, a real etcd, the simulated engine."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from dynaplan.store.etcd import EtcdStore
from dynaplan.util.errors import StoreUnavailable
from tests.fakes.polling import eventually
from tests.fakes.servers import Server
from tests.integration.worker_child import AUTHORIZATION, Worker, Workers

SLOW = {"speedup-ratio": 0.2}
"""About 40 ms per token: a stream of 40 tokens is in flight for more than a second."""


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as made:
        yield made


async def start_streams(worker: Worker, session: aiohttp.ClientSession, count: int, tokens: int) -> list:
    streams = [asyncio.create_task(worker.stream(session, tokens)) for _ in range(count)]

    async def are_running() -> bool:
        return await worker.running(session) == count

    await eventually(are_running)
    return streams


async def test_a_worker_registers_its_engine_and_tells_its_load(
    workers: Workers, store: EtcdStore, session: aiohttp.ClientSession
) -> None:
    worker = workers.make()
    instance = await worker.start(store)
    (item,) = await store.list("/services/ns/")
    assert item.key == f"/services/ns/VllmWorker/generate/{instance.instance_id:x}"
    assert item.lease == instance.instance_id
    assert (instance.worker, instance.pid) == ("ns_VllmWorker", worker.pid)
    assert instance.card["model"] == "sim"
    async with session.get(f"{worker.url}/health") as response:
        assert (response.status, (await response.json())["status"]) == (200, "ready")
    assert await worker.running(session) == 0
    async with session.get(f"{worker.url}/metrics") as response:
        names = {family.name for family in text_string_to_metric_families(await response.text())}
    assert {"dynamo_component_kvstats_total_blocks", "vllm:num_requests_running"} <= names
    outcome = await worker.stream(session, 20)
    assert outcome.is_complete, outcome


async def test_sigterm_lets_streams_finish_however_often_it_comes(
    workers: Workers, store: EtcdStore, session: aiohttp.ClientSession
) -> None:
    worker = workers.make(settings=SLOW)
    await worker.start(store)
    streams = await start_streams(worker, session, 3, 40)
    worker.signal(signal.SIGTERM)
    await eventually(lambda: "draining: 3 requests held" in worker.log)
    worker.signal(signal.SIGTERM)
    worker.signal(signal.SIGINT)
    outcomes = await asyncio.gather(*streams)
    assert all(outcome.is_complete for outcome in outcomes), outcomes
    assert await worker.exit_code() == 0
    assert worker.proof.startswith("drained: held 3 requests when told to leave, 3 finished, 0 cut, in ")
    assert worker.proof.endswith("s (because SIGTERM arrived)")
    assert await store.list("/services/") == ()


async def test_a_revoked_lease_drains_and_new_requests_are_sent_elsewhere(
    workers: Workers, store: EtcdStore, session: aiohttp.ClientSession
) -> None:
    worker = workers.make(settings=SLOW)
    instance = await worker.start(store)
    streams = await start_streams(worker, session, 3, 40)
    await store.revoke(instance.instance_id)
    await eventually(lambda: "draining: 3 requests held" in worker.log, 1)
    body = {"model": "sim", "prompt": "x", "max_tokens": 1}
    async with session.post(f"{worker.url}/v1/completions", json=body, headers=AUTHORIZATION) as response:
        assert response.status == 503
        assert response.headers["x-dynaplan-draining"] == "1"
    async with session.get(f"{worker.url}/health") as response:
        assert (response.status, (await response.json())["status"]) == (503, "draining")
    outcomes = await asyncio.gather(*streams)
    assert all(outcome.is_complete for outcome in outcomes), outcomes
    assert await worker.exit_code() == 0
    assert worker.proof.startswith("drained: held 3 requests when told to leave, 3 finished, 0 cut, in ")
    assert worker.proof.endswith("s (because the lease was revoked)")


async def test_a_worker_told_to_leave_while_it_starts_leaves(workers: Workers, store: EtcdStore) -> None:
    worker = workers.make(settings={"startup-time": 60})
    worker.spawn()
    await eventually(lambda: worker.log_path.exists() and ready_to_be_told(worker.pid))
    worker.signal(signal.SIGTERM)
    assert await worker.exit_code() == 0
    assert await store.list("/services/") == ()


def ready_to_be_told(pid: int) -> bool:
    """Whether the process catches SIGTERM by now."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught.split()[1], 16) & 1 << (signal.SIGTERM - 1))


async def test_a_worker_dies_with_its_parent(workers: Workers, store: EtcdStore, tmp_path: Path) -> None:
    worker = workers.make()
    parent = (
        "import os, subprocess, sys, time\n"
        "os.environ['DYNAPLAN_PARENT_PID'] = str(os.getpid())\n"
        "print(subprocess.Popen(sys.argv[1:]).pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    command = [sys.executable, "-c", parent, *worker.command]
    started = subprocess.Popen(  # noqa: ASYNC220
        command, cwd=tmp_path, env=worker.environment, stdout=subprocess.PIPE
    )
    with started:
        assert started.stdout is not None
        pid = int(started.stdout.readline())
        await eventually(lambda: worker.registration(store))
        started.kill()
    await eventually(lambda: not is_alive(pid), 2)


def is_alive(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


async def test_a_worker_whose_parent_is_gone_does_not_start(workers: Workers) -> None:
    worker = workers.make(DYNAPLAN_PARENT_PID="1" if os.getpid() != 1 else "2")
    worker.spawn()
    assert await worker.exit_code() != 0


async def test_an_etcd_that_comes_back_empty_gets_the_registration_again_and_drains_nobody(
    workers: Workers,
    store: EtcdStore,
    etcd: Server,
) -> None:
    worker = workers.make()
    instance = await worker.start(store)
    etcd.kill()
    etcd.wipe()
    await etcd.start_again()

    async def is_back() -> bool:
        try:
            found = await worker.registration(store)
        except StoreUnavailable:
            return False
        return found is not None and found.instance_id != instance.instance_id

    await eventually(is_back)
    assert worker.process.poll() is None
    assert "draining" not in worker.log


async def test_the_shutdown_hooks_of_a_service_run(workers: Workers, store: EtcdStore) -> None:
    worker = workers.make("Fragile", graph="fragile:Fragile")
    await worker.start(store)
    worker.signal(signal.SIGTERM)
    assert await worker.exit_code() == 0
    assert "the shutdown hook ran" in worker.log


async def test_a_failure_in_the_background_ends_the_worker_and_its_registration(
    workers: Workers, store: EtcdStore, session: aiohttp.ClientSession
) -> None:
    worker = workers.make("Fragile", graph="fragile:Fragile")
    await worker.start(store)
    async with session.post(f"{worker.url}/generate", json={}, headers=AUTHORIZATION) as response:
        assert await response.text() == '"ok"\n'
    assert await worker.exit_code() == 1
    assert "ValueError: something broke" in worker.log
    assert await store.list("/services/") == ()
