"""How long a user waits: for the first answer, for a killed worker, for a scaling decision."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator

import aiohttp

from dynaplan.contract.store_keys import planner_prefix
from dynaplan.store.instances import SERVICES_PREFIX
from dynaplan.store.model import Transaction
from tests.bench.deployments import INSTANT, INSTANT_DISAGG, keep_bytecode, name_of, run_s, serving, tree
from tests.bench.table import Row
from tests.e2e.deployment import MODEL, Deployment
from tests.fakes.load import stream_one


def rows(repeats: int) -> Iterator[Row]:
    """Every row of this group."""
    keep_bytecode()
    starts: dict[str, list[float]] = defaultdict(list)
    for _ in range(repeats):
        started_s = time.perf_counter()
        with serving("graphs.disagg:Frontend", "disagg.yaml", *INSTANT_DISAGG, wait=False) as deployment:
            for part, seconds in time_start(deployment, started_s).items():
                starts[part].append(seconds)
    for part, values in starts.items():
        yield Row(part, "s", values, START_AIM_S if part == START else None)
    yield Row("worker kill -9 to routable again", "s", [kill_to_routable() for _ in range(repeats)], aim=1.5)
    with serving("graphs.agg:Frontend", "agg.yaml", *INSTANT) as deployment:
        ups, downs = asyncio.run(scale_up_and_down(deployment, repeats))
        yield Row("scale decision to routable", "s", ups, aim=0.5)
        yield Row("scale-down decision to not routed", "ms", [1000 * down for down in downs], aim=10)


START, START_AIM_S = "start to first answer", 1.0


def time_start(deployment: Deployment, started_s: float) -> dict[str, float]:
    """Wait for the first complete answer of a deployment whose command was started at ``started_s``.

    Return the seconds from then on, to the moment at which ``serve`` starts the first process, and the CPU
    seconds of each process meanwhile.
    """
    while not deployment.statefile().get("addresses", {}).get("frontend_url"):
        time.sleep(0.005)
    prepared_s = time.perf_counter() - started_s
    asyncio.run(first_answer(deployment.url))
    answered_s = time.perf_counter() - started_s
    used_s = {f"{START}: CPU of {name_of(each)}": run_s(each.pid) for each in tree(deployment)}
    return {START: answered_s, f"{START}: until serve starts processes": prepared_s, **used_s}


async def first_answer(url: str) -> None:
    """Return when a request has been answered completely."""
    async with aiohttp.ClientSession() as session:
        while not (await stream_one(session, url, MODEL, "Hello", 4)).is_complete:
            await asyncio.sleep(0.02)


def kill_to_routable() -> float:
    """From kill -9 of the only worker to the next complete answer: a first crash, not backed off."""
    with serving("graphs.agg:Frontend", "agg.yaml", *INSTANT) as deployment:
        os.kill(deployment.pid_of("dynamo_VllmWorker"), signal.SIGKILL)
        started_s = time.perf_counter()
        asyncio.run(first_answer(deployment.url))
        return time.perf_counter() - started_s


async def scale_up_and_down(deployment: Deployment, repeats: int) -> tuple[list[float], list[float]]:
    """From the desired count being written to the registration appearing (1 -> 2), and going (2 -> 1)."""
    from dynaplan.store.etcd import EtcdStore

    endpoints = deployment.statefile()["addresses"]["etcd"]
    store = EtcdStore.from_environment({"ETCD_ENDPOINTS": endpoints})
    ups, downs = [], []
    try:
        for _ in range(repeats):
            ups.append(await _until_registered(store, 2))
            await _settled(deployment, 2)
            downs.append(await _until_registered(store, 1))
            await _settled(deployment, 1)
    finally:
        await store.close()
    return ups, downs


async def _until_registered(store: object, count: int) -> float:
    from dynaplan.store.etcd import EtcdStore

    assert isinstance(store, EtcdStore)
    prefix = planner_prefix("dynamo")
    decision = max(
        [int(item.value) for item in await store.list(prefix) if item.key.endswith("decision_id")], default=-1
    )
    started_s = time.perf_counter()
    puts = {f"{prefix}num_decode_workers": str(count), f"{prefix}decision_id": str(decision + 1)}
    await store.commit(Transaction(puts=puts))
    workers = f"{SERVICES_PREFIX}dynamo/VllmWorker/generate/"
    while len(await store.list(workers)) != count:
        await asyncio.sleep(0.001)
    return time.perf_counter() - started_s


async def _settled(deployment: Deployment, count: int, timeout_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while _states(deployment) != ["ready"] * count and time.monotonic() < deadline_s:
        await asyncio.sleep(0.05)
    assert _states(deployment) == ["ready"] * count, deployment.statefile()


def _states(deployment: Deployment) -> list[str]:
    return [worker["state"] for worker in deployment.workers("VllmWorker").values()]
