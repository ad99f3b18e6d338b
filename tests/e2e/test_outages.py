"""etcd and NATS away for a while, for real: killed, frozen, back with an empty disk. Nobody is restarted.

The servers are the tests' own, named by ETCD_ENDPOINTS and NATS_SERVER, so that nobody but the test brings
them back.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping

import aiohttp
import pytest

from dynaplan.config.settings.servers import BACKEND_VARIABLE
from tests.e2e.deployment import MODEL, Deployment
from tests.e2e.test_kills import is_whole
from tests.e2e.traces import files_of, in_torture, processes_of
from tests.fakes.load import Load
from tests.fakes.polling import eventually, lasting
from tests.fakes.servers import Server

QUIET = ("--Planner.no-operation=true", "--drain-timeout", "3")
SECONDS = [5, pytest.param(40, marks=in_torture)]


async def killed(server: Server, seconds: float) -> None:
    server.kill()
    await lasting(seconds)
    await server.start_again()


async def frozen(server: Server, seconds: float) -> None:
    server.freeze()
    await lasting(seconds)
    server.thaw()


async def wiped(server: Server, seconds: float) -> None:
    server.kill()
    server.wipe()
    await lasting(seconds)
    await server.start_again()


Outage = Callable[[Server, float], Awaitable[None]]


def start(
    deploy: Callable[..., Deployment], *servers: Server, graph: str = "disagg", wait: bool = True
) -> Deployment:
    environment = {name: value for server in servers for name, value in server.environment.items()}
    return deploy(f"graphs.{graph}:Frontend", f"{graph}.yaml", *QUIET, environment=environment, wait=wait)


def pids(deployment: Deployment) -> dict[str, int]:
    return {name: worker["pid"] for name, worker in deployment.workers().items()}


def leases(deployment: Deployment) -> Mapping[str, int | None]:
    return {name: worker["lease"] for name, worker in deployment.workers().items()}


async def remote_prefills(deployment: Deployment) -> float:
    """How many prompts the prefill workers have computed, as the Frontend counts them."""
    async with aiohttp.ClientSession() as session, session.get(f"{deployment.url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return sum(float(line.split()[-1]) for line in lines if "prefill" in line and 'place="remote"' in line)


async def load_through(deployment: Deployment, *outages: Awaitable[None]) -> Load:
    """A steady load from before the outages to well after them."""
    async with Load(deployment.url, MODEL, clients=3, tokens=30, prompt="word " * 900) as load:
        await eventually(lambda: len(load.outcomes) > 3, 20)
        await asyncio.gather(*outages)
        count = len(load.outcomes)
        await eventually(lambda: is_whole(deployment) and len(load.outcomes) > count + 6, 30)
        await load.stop()
    return load


@pytest.mark.parametrize("seconds", SECONDS)
@pytest.mark.parametrize("outage", [pytest.param(each, marks=in_torture) for each in (killed, frozen, wiped)])
async def test_etcd_away_restarts_nobody_and_loses_nothing(
    deploy: Callable[..., Deployment],
    etcd: Server,
    outage: Outage,
    seconds: int,
) -> None:
    deployment = await asyncio.to_thread(start, deploy, etcd)
    before, leases_before = pids(deployment), leases(deployment)
    load = await load_through(deployment, outage(etcd, seconds))
    assert load.incomplete == []
    assert pids(deployment) == before
    if outage is wiped or (outage is frozen and seconds > 10):
        # The leases were lost; every worker has a new one.
        await eventually(
            lambda: all(lease and lease != leases_before[name] for name, lease in leases(deployment).items()),
            15,
        )
    await asyncio.to_thread(deployment.scale, decode=2)
    await eventually(lambda: len(deployment.workers("VllmWorker")) == 2 and is_whole(deployment), 15)
    assert pids(deployment).items() >= before.items()


@in_torture
@pytest.mark.parametrize("outage", [killed, frozen, wiped])
@pytest.mark.parametrize("seconds", [5, 40])
async def test_nats_away_that_is_the_store_too_restarts_nobody_and_loses_nothing(
    deploy: Callable[..., Deployment],
    nats: Server,
    outage: Outage,
    seconds: int,
) -> None:
    nats.environment[BACKEND_VARIABLE] = "nats"
    deployment = await asyncio.to_thread(start, deploy, nats)
    before = pids(deployment)
    load = await load_through(deployment, outage(nats, seconds))
    assert load.incomplete == []
    assert pids(deployment) == before
    await asyncio.to_thread(deployment.scale, decode=2)
    await eventually(lambda: len(deployment.workers("VllmWorker")) == 2 and is_whole(deployment), 15)
    assert pids(deployment).items() >= before.items()


@in_torture
@pytest.mark.parametrize("outage", [killed, frozen, wiped])
@pytest.mark.parametrize("seconds", [5, 40])
async def test_nats_away_restarts_nobody_loses_nothing_and_remote_prefill_comes_back(
    deploy: Callable[..., Deployment],
    nats: Server,
    outage: Outage,
    seconds: int,
) -> None:
    deployment = await asyncio.to_thread(start, deploy, nats)
    before = pids(deployment)
    load = await load_through(deployment, outage(nats, seconds))
    assert load.incomplete == []
    assert pids(deployment) == before
    count = await remote_prefills(deployment)
    async with Load(deployment.url, MODEL, clients=1, tokens=5, prompt="word " * 900) as after:

        async def is_remote_again() -> bool:
            return await remote_prefills(deployment) > count

        await eventually(is_remote_again, 15)
        await after.stop()
    assert after.incomplete == []


@in_torture
async def test_everything_away_at_once_while_a_worker_and_the_plugin_crash(
    deploy: Callable[..., Deployment],
    etcd: Server,
    nats: Server,
) -> None:
    deployment = await asyncio.to_thread(start, deploy, etcd, nats)
    before = pids(deployment)

    async def crash() -> None:
        await eventually(lambda: etcd.process is None and nats.process is None)
        os.kill(before["dynamo_VllmWorker"], 9)
        plugin = [pid for pid, line in processes_of(deployment).items() if "FleetPlugin" in line]
        os.kill(plugin[0], 9)

    load = await load_through(deployment, killed(etcd, 5), killed(nats, 5), crash())
    assert [outcome for outcome in load.incomplete if outcome.status != 200] == []
    assert len(load.incomplete) <= 3
    after = pids(deployment)
    assert after.pop("dynamo_VllmWorker") != before.pop("dynamo_VllmWorker")
    assert after == before


@in_torture
async def test_ctrl_c_while_every_server_is_away_still_exits_0_and_leaves_nothing(
    deploy: Callable[..., Deployment],
    etcd: Server,
    nats: Server,
) -> None:
    deployment = await asyncio.to_thread(start, deploy, etcd, nats)
    etcd.freeze()
    nats.kill()
    assert await asyncio.to_thread(deployment.stop, 15) == 0, deployment.text
    etcd.thaw()
    assert (processes_of(deployment), files_of(deployment)) == ({}, [])
