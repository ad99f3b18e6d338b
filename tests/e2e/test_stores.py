"""What holds with etcd on a socket holds with a store in files and an etcd behind passwords, under load.

NATS as the store is in test_outages.py; ``tox -e stores-file,stores-nats`` runs the longer suites on both.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.deployment import MODEL, Deployment, refusal
from tests.e2e.test_kills import is_whole, process_of
from tests.e2e.traces import files_of, in_torture, processes_of
from tests.fakes.load import Load
from tests.fakes.polling import eventually
from tests.fakes.secured_etcd import SecuredEtcd

pytestmark = pytest.mark.timeout(300)

QUIET = ("--Planner.no-operation=true", "--drain-timeout", "3")
SERVERS = {"etcd", "nats-server"}


async def lives_on(load: Load, deployment: Deployment) -> None:
    """Wait until the deployment is whole and has answered more requests than are under way."""
    count = len(load.outcomes)
    await eventually(lambda: is_whole(deployment) and len(load.outcomes) > count + 2 * load.clients)


async def scaled(deployment: Deployment, **counts: int) -> None:
    """Scale, which returns when it is carried out."""
    await asyncio.to_thread(deployment.scale, **counts)


async def killed(deployment: Deployment, words: str) -> None:
    """Kill a process with -9, and wait until another is in its place."""
    old = process_of(deployment, words)
    old.kill()
    await eventually(lambda: any(words in line for line in lines_without(deployment, old.pid)))


def wipe(directory: Path) -> None:
    """Remove it at one stroke, while others write into it."""
    aside = directory.with_name("aside")
    directory.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def lines_without(deployment: Deployment, pid: int) -> list[str]:
    return [line for each, line in processes_of(deployment).items() if each != pid]


def servers_of(deployment: Deployment) -> set[str]:
    return {child.name() for child in deployment.children()} & SERVERS


def names_of(deployment: Deployment) -> dict[str, int | None]:
    return {name: worker["lease"] for name, worker in deployment.workers().items()}


@in_torture
async def test_a_store_in_files_needs_no_server_and_all_holds(deploy: Callable[..., Deployment]) -> None:
    deployment = await asyncio.to_thread(deploy, "graphs.agg:Frontend", "agg.yaml", *QUIET, "--store", "file")
    assert servers_of(deployment) == set()
    store = Path(deployment.clients_environment()["DYN_FILE_KV"])
    async with Load(deployment.url, MODEL, clients=3, tokens=20) as load:
        await scaled(deployment, decode=3)
        await scaled(deployment, decode=2)
        for words in ("FleetPlugin", "--service-name Planner"):
            await killed(deployment, words)
            await lives_on(load, deployment)
        before = names_of(deployment)
        wipe(store)
        await eventually(lambda: set(names_of(deployment).values()).isdisjoint(before.values()))
        await lives_on(load, deployment)
        assert load.incomplete == []
        os.kill(deployment.pid_of("dynamo_VllmWorker_1"), signal.SIGKILL)
        await lives_on(load, deployment)
        await scaled(deployment, decode=1)
        await load.stop()
    assert names_of(deployment).keys() == before.keys() - {"dynamo_VllmWorker_1"}
    assert [outcome for outcome in load.incomplete if outcome.status != 200] == []
    assert len(load.incomplete) <= load.clients
    assert await asyncio.to_thread(deployment.stop) == 0
    assert (processes_of(deployment), files_of(deployment)) == ({}, [])


@in_torture
async def test_an_etcd_behind_tls_and_passwords_does_for_a_whole_deployment(
    deploy: Callable[..., Deployment], secured_etcd: SecuredEtcd
) -> None:
    deployment = await asyncio.to_thread(
        deploy, "graphs.agg:Frontend", "agg.yaml", *QUIET, environment=secured_etcd.environment
    )
    assert servers_of(deployment) == set()
    async with Load(deployment.url, MODEL, clients=1, tokens=5) as load:
        await scaled(deployment, decode=2)
        await lives_on(load, deployment)
        await load.stop()
    assert load.incomplete == []
    assert secured_etcd.environment["ETCD_AUTH_PASSWORD"] not in str(deployment.statefile())
    assert await asyncio.to_thread(deployment.stop) == 0


@pytest.mark.parametrize(
    ("environment", "fault"),
    [
        ({"DYN_DISCOVERY_BACKEND": "flie"}, "DYN_DISCOVERY_BACKEND is 'flie'"),
        (
            {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": "/usr/bin/env"},
            "/usr/bin/env, is a link or a file",
        ),
        ({"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": "/usr"}, "/usr, can be reached by other users"),
    ],
)
def test_a_store_that_cannot_be_used_is_named_before_anything_starts(
    tmp_path: Path, environment: dict[str, str], fault: str
) -> None:
    assert fault in refusal(tmp_path, environment=environment)
