"""Statefiles that somebody left, spoilt or forbids: a clear answer each time, and serving goes on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from dynaplan.process.process_table import boot_id, identify
from tests.e2e.deployment import EXECUTED, MODEL, Deployment, refusal
from tests.e2e.test_kills import is_whole, process_of
from tests.e2e.traces import fill, processes_of, small_disk
from tests.fakes.load import Load
from tests.fakes.polling import eventually

QUIET = ("--Planner.no-operation=true",)
WORKER = "dynamo_VllmWorker"
SERVICE = "--service-name VllmWorker"


@pytest.fixture
def leftover() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Start processes such as a worker that outlives its arbiter: their own group, deaf to SIGTERM."""
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        code = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(600)"
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", code],
            env={"DYNAPLAN_WORKER_NAME": WORKER, "DYN_NAMESPACE": "dynamo"},
            start_new_session=True,
            stdout=subprocess.PIPE,
        )
        assert process.stdout
        process.stdout.readline()
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def state_disk(tmp_path: Path) -> Iterator[Path]:
    """The state directory on a small file system of its own."""
    try:
        with small_disk(tmp_path / "state") as directory:
            yield directory
    except OSError as error:
        pytest.skip(f"cannot mount a small file system: {error}")


def dead_statefile(directory: Path, pid: int, started_at: int) -> Path:
    """A statefile whose arbiter is gone and whose decode worker is that process."""
    document = json.loads((Path("statefiles") / "worker_added.json").read_text())
    document["namespace"] = "dynamo"
    document["arbiter"] = {"pid": 2**22 + 1, "started_at": 1, "boot_id": boot_id()}
    entry = next(each for each in document["components"].values() if each["component"] == "VllmWorker")
    entry |= {"watcher_name": WORKER, "pid": pid, "started_at": started_at, "state": "ready"}
    document["components"] = {WORKER: entry}
    path = directory / "state" / "dynamo.json"
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.write_text(json.dumps(document))
    return path


def test_a_worker_that_outlived_its_arbiter_is_ended_before_its_gpu_is_given_out(
    deploy: Callable[..., Deployment], leftover: Callable[[], subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    old = leftover()
    dead_statefile(tmp_path, old.pid, identify(old.pid) or 0)
    deployment = deploy("graphs.agg:Frontend", "agg.yaml", *QUIET)
    assert old.poll() == -signal.SIGKILL
    assert f"killed {WORKER} (session {old.pid}" in deployment.text
    assert is_whole(deployment)


def test_a_statefile_from_a_live_arbiter_is_refused_and_kept(tmp_path: Path) -> None:
    path = dead_statefile(tmp_path, 0, 0)
    document = json.loads(path.read_text())
    document["arbiter"] |= {"pid": os.getpid(), "started_at": identify(os.getpid())}
    path.write_text(json.dumps(document))
    assert f"already running here (pid {os.getpid()})" in refusal(tmp_path)
    assert json.loads(path.read_text()) == document


@pytest.mark.slow
async def test_a_statefile_spoilt_while_serving_is_written_anew_when_the_plugin_starts_again(
    deploy: Callable[..., Deployment],
) -> None:
    deployment = await asyncio.to_thread(deploy, "graphs.agg:Frontend", "agg.yaml", *QUIET)
    before = facts(deployment)
    plugin = process_of(deployment, "FleetPlugin")
    async with Load(deployment.url, MODEL, clients=2, tokens=30) as load:
        deployment.statefile_path.write_bytes(b"")
        plugin.kill()
        await eventually(lambda: facts(deployment) == before, 15)
        await load.stop()
    assert load.incomplete == []
    await asyncio.to_thread(deployment.scale, decode=2)
    await eventually(lambda: len(deployment.workers("VllmWorker")) == 2 and is_whole(deployment), 20)


def facts(deployment: Deployment) -> dict[str, tuple[Any, ...]]:
    """What must be the same after the statefile was written anew."""
    return {
        name: (worker["state"], worker["pid"], worker["resources"])
        for name, worker in deployment.workers().items()
    }


async def test_on_a_full_disk_serving_goes_on_scaling_up_waits_and_then_happens(
    deploy: Callable[..., Deployment], state_disk: Path
) -> None:
    deployment = await asyncio.to_thread(deploy, "graphs.agg:Frontend", "agg.yaml", *QUIET)
    # The first decision and the store's identity are written a moment after the workers are ready.
    awaited = {"num_decode_workers", "store_id"}
    await eventually(lambda: awaited <= deployment.statefile().get("planner_keys", {}).keys())
    before = deployment.statefile_path.read_text()
    url, children = deployment.url, len(deployment.children())
    ballast = fill(state_disk)
    async with Load(url, MODEL, clients=2, tokens=30) as load:
        await asyncio.to_thread(deployment.run, "scale", "decode=2", "--no-wait")
        await eventually(lambda: "statefile cannot be written" in deployment.text, 10)
        count = len(load.outcomes)
        await eventually(lambda: len(load.outcomes) > count + 6, 10)
        assert deployment.statefile_path.read_text() == before
        assert len(deployment.children()) == children
        ballast.unlink()
        await eventually(lambda: len(deployment.workers("VllmWorker")) == 2 and is_whole(deployment), 15)
        await load.stop()
    assert load.incomplete == []
    assert deployment.text.count("statefile cannot be written") == 1
    assert deployment.text.count("statefile can be written again") == 1


@pytest.mark.slow
async def test_on_a_full_disk_a_crashed_worker_and_plugin_come_back_and_exit_is_clean(
    deploy: Callable[..., Deployment], state_disk: Path
) -> None:
    deployment = await asyncio.to_thread(
        deploy, "graphs.agg:Frontend", "agg.yaml", *QUIET, environment=EXECUTED
    )
    url = deployment.url
    worker, plugin = process_of(deployment, SERVICE), process_of(deployment, "FleetPlugin")
    ballast = fill(state_disk)
    async with Load(url, MODEL, clients=1, tokens=5) as load:
        worker.kill()
        plugin.kill()
        await eventually(lambda: others(deployment, SERVICE, worker), 15)
        count = len(load.outcomes)
        await eventually(lambda: len(load.outcomes) > count + 3, 15)
        # The one after the next reads a statefile that is out of date.
        (await eventually(lambda: others(deployment, "FleetPlugin", plugin), 15))[0].kill()
        count = len(load.outcomes)
        await eventually(lambda: len(load.outcomes) > count + 10, 15)
        await load.stop()
    assert [outcome for outcome in load.incomplete if outcome.status != 200] == []
    ballast.unlink()
    await eventually(lambda: is_whole(deployment), 15)
    assert [each.pid for each in others(deployment, SERVICE)] == [deployment.pid_of(WORKER)]
    fill(state_disk)
    assert await asyncio.to_thread(deployment.stop) == 0, deployment.text
    assert not deployment.statefile_path.exists()


def others(deployment: Deployment, words: str, known: psutil.Process | None = None) -> list[psutil.Process]:
    """The processes with these words on their command lines, without the known one."""
    found = []
    for pid, line in processes_of(deployment).items():
        with suppress(psutil.NoSuchProcess):  # one that was killed may still have been seen above
            if words in line and (process := psutil.Process(pid)) != known:
                found.append(process)
    return found


@pytest.mark.parametrize(
    "place", ["state", *(pytest.param(each, marks=pytest.mark.slow) for each in ("node", "logs"))]
)
def test_a_disk_that_is_full_at_the_start_is_refused_in_words(
    tmp_path: Path,
    runtime_dir: Path,
    place: str,
) -> None:
    full = runtime_dir / place
    names = {
        "state": "DYN_LOCAL_STATE_DIR",
        "node": "DYNAPLAN_NODE_DIR",
        "logs": "DYN_CIRCUS_LOG_DIR",
    }
    try:
        with small_disk(full):
            fill(full)
            said = refusal(tmp_path, environment={names[place]: str(full)})
    except OSError as error:
        pytest.skip(f"cannot mount a small file system: {error}")
    assert str(full) in said
    assert "No space left" in said
