"""A whole ``dynaplan serve``, driven through its etcd by an independent client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp

from dynaplan.contract.store_keys import DesiredCounts, planner_prefix
from tests.e2e.deployment import MODEL, Deployment
from tests.fakes.load import stream_one
from tests.fakes.polling import eventually
from tests.interop.conftest import Etcd3

QUIET = ("--Planner.no-operation=true",)
SERVICES = "/services/dynamo/"


def connected(connect_etcd3: Callable[[str], Etcd3], deployment: Deployment) -> Etcd3:
    runtime_dir = Path(deployment.statefile()["addresses"]["runtime_dir"])
    return connect_etcd3(json.loads((runtime_dir / "clients.json").read_text())["ETCD_ENDPOINTS"])


def registrations(client: Etcd3, component: str = "") -> list[dict[str, Any]]:
    """The registrations in etcd, each with the lease that its key lives under."""
    prefix = f"{SERVICES}{component}/" if component else SERVICES
    return [
        {**json.loads(each["value"]), "key": each["key"], "lease": each["lease"]}
        for each in client.call("get_prefix", prefix)
    ]


def desired_counts(client: Etcd3) -> DesiredCounts:
    keys = {each["key"]: each["value"] for each in client.call("get_prefix", planner_prefix("dynamo"))}
    return DesiredCounts.from_keys("dynamo", keys)


def ready(deployment: Deployment, component: str) -> int:
    return sum(worker["state"] == "ready" for worker in deployment.workers(component).values())


async def test_it_reads_the_fleet_drains_a_worker_and_scales(
    connect_etcd3: Callable[[str], Etcd3], deploy: Callable[..., Deployment]
) -> None:
    deployment = await asyncio.to_thread(deploy, "graphs.disagg:Frontend", "disagg.yaml", *QUIET)
    client = connected(connect_etcd3, deployment)
    reads_every_worker(client, deployment)
    await revoking_a_lease_drains_that_worker_and_loses_nothing(client, deployment)
    await writing_the_desired_counts_scales(client, deployment)


def reads_every_worker(client: Etcd3, deployment: Deployment) -> None:
    found = registrations(client)
    assert {each["worker"] for each in found} == set(deployment.workers())
    for each in found:
        assert each["pid"] == deployment.pid_of(each["worker"])
        assert each["lease"] == each["instance_id"]
        assert each["key"].endswith(f"/{each['component']}/{each['endpoint']}/{each['lease']:x}")


async def revoking_a_lease_drains_that_worker_and_loses_nothing(
    client: Etcd3, deployment: Deployment
) -> None:
    (old,) = registrations(client, "VllmWorker")
    async with aiohttp.ClientSession() as session:
        stream = asyncio.create_task(stream_one(session, deployment.url, MODEL, "Hello", 300))
        await eventually(lambda: is_running_one(old["transport"]["http"]))
        await asyncio.to_thread(client.call, "revoke", old["lease"])
        outcome = await stream
    assert outcome.is_complete, outcome
    await eventually(lambda: proof(deployment, old["worker"]))
    assert "held 1 requests" in proof(deployment, old["worker"])
    assert "1 finished, 0 cut" in proof(deployment, old["worker"])
    await eventually(lambda: ready(deployment, "VllmWorker") == 1, 20)
    await eventually(lambda: {each["pid"] for each in registrations(client, "VllmWorker")} - {old["pid"]})
    async with aiohttp.ClientSession() as session:
        assert (await stream_one(session, deployment.url, MODEL, "Hello", 5)).is_complete


async def is_running_one(url: str) -> bool:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/load_metrics") as response:
        return bool((await response.json())["worker_stats"]["request_active_slots"])


def proof(deployment: Deployment, worker: str) -> str:
    log = Path(deployment.statefile()["addresses"]["log_dir"]) / f"{worker}.log"
    return "\n".join(line for line in log.read_text().splitlines() if "drained: held" in line)


async def writing_the_desired_counts_scales(client: Etcd3, deployment: Deployment) -> None:
    for prefill, decode in ((2, 3), (1, 1)):
        decision_id = desired_counts(client).next_decision_id
        counts = {"num_prefill_workers": prefill, "num_decode_workers": decode, "decision_id": decision_id}
        keys = {planner_prefix("dynamo") + name: str(value) for name, value in counts.items()}
        assert client.call("put_together", keys)
        await eventually(lambda wanted=decision_id: desired_counts(client).scaled_decision_id == wanted, 30)
        assert (ready(deployment, "PrefillWorker"), ready(deployment, "VllmWorker")) == (prefill, decode)
        assert len(registrations(client, "VllmWorker")) == decode
