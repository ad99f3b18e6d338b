"""The runtime directory vanishes under load: no request is lost, and everything goes on afterwards."""

from __future__ import annotations

import asyncio
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from circus.client import CircusClient

from tests.e2e.deployment import MODEL, Deployment
from tests.e2e.held import serve_of
from tests.e2e.test_kills import is_whole, pids_of, process_of
from tests.e2e.traces import in_torture
from tests.fakes.load import Load
from tests.fakes.polling import eventually

QUIET = ("--Planner.no-operation=true",)
LONG_NAME = "a_name_with_which_the_path_is_too_long_for_any_socket"
"""So a link leads to the runtime directory."""

NO_DESCRIPTORS = 3
"""A limit below which all descriptors are taken: nothing more can be opened."""


def link_of(deployment: Deployment) -> Path:
    return Path(deployment.statefile()["circus_endpoint"].removeprefix("ipc://")).parent


def statuses(deployment: Deployment) -> int:
    """The number of watchers that circusctl would list."""
    client = CircusClient(endpoint=deployment.statefile()["circus_endpoint"], timeout=10)
    try:
        return len(client.send_message("status")["statuses"])
    finally:
        client.stop()


@pytest.mark.parametrize(
    "victim", [pytest.param("link", marks=in_torture), pytest.param("directory", marks=pytest.mark.slow)]
)
async def test_what_vanishes_is_healed_under_load(deploy: Callable[..., Deployment], victim: str) -> None:
    deployment = await asyncio.to_thread(
        deploy, "graphs.disagg:Frontend", "disagg.yaml", *QUIET, namespace=LONG_NAME
    )
    root, link = Path(deployment.statefile()["addresses"]["runtime_dir"]), link_of(deployment)
    assert link.is_symlink()
    assert link.parent.parent == deployment.runtime_base
    async with Load(deployment.url, MODEL, clients=3, tokens=30, prompt="word " * 900) as load:
        await eventually(lambda: len(load.outcomes) > 3, 30)
        for path in [root] if victim == "directory" else deployment.runtime_base.glob("dynaplan*"):
            remove(path)
        await eventually(lambda: "had vanished" in deployment.text, 20)
        await eventually(lambda: link.exists() and (root / "clients.json").exists(), 20)
        count = len(load.outcomes)
        await eventually(lambda: len(load.outcomes) > count + 6, 30)
        await load.stop()
    assert load.incomplete == []
    worker = deployment.pid_of(f"{LONG_NAME}_VllmWorker")
    os.kill(worker, 9)
    process_of(deployment, "FleetPlugin").kill()
    name = f"{LONG_NAME}_VllmWorker"
    await eventually(lambda: is_whole(deployment) and deployment.pid_of(name) != worker, 60)
    servers = 3 if os.environ.get("DYN_DISCOVERY_BACKEND", "etcd") == "etcd" else 2
    assert await asyncio.to_thread(statuses, deployment) == 5 + servers
    await asyncio.to_thread(deployment.scale, decode=2)
    assert "cannot be made again" not in deployment.text


def remove(directory: Path) -> None:
    """Remove it at one blow; servers may put files into what it was for a moment longer."""
    gone = directory.rename(directory.with_name(f"{directory.name}.gone"))
    for _ in range(100):
        shutil.rmtree(gone, ignore_errors=True)
        if not gone.exists():
            return
    raise AssertionError(f"{gone} cannot be removed")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [(), pytest.param(("--no-supervise",), marks=in_torture)], ids=["supervised", "alone"]
)
async def test_a_server_and_the_fleet_plugin_come_back_after_their_starts_were_refused(
    deploy: Callable[..., Deployment], options: tuple[str, ...]
) -> None:
    """Out of descriptors, as on a full machine, ``serve`` can start nothing for a while."""
    deployment = await asyncio.to_thread(deploy, "graphs.disagg:Frontend", "disagg.yaml", *QUIET, *options)
    assert deployment.process
    serve = serve_of(deployment) if not options else psutil.Process(deployment.process.pid)
    assert serve
    soft, hard = serve.rlimit(resource.RLIMIT_NOFILE)
    serve.rlimit(resource.RLIMIT_NOFILE, (NO_DESCRIPTORS, hard))
    circus_log = next(deployment.directory.glob("**/circus.log"))
    try:
        for words in ("nats-server", "FleetPlugin"):
            for pid in pids_of(deployment, words):
                os.kill(pid, 9)
        await eventually(lambda: circus_log.read_text().count("it is tried again") >= 2, 20)
    finally:
        serve.rlimit(resource.RLIMIT_NOFILE, (soft, hard))
    await eventually(lambda: is_whole(deployment) and pids_of(deployment, "nats-server"), 30)
    await asyncio.to_thread(deployment.scale, decode=2)
