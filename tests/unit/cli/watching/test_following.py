"""Looking at a deployment again and again."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dynaplan.cli.watching import following
from dynaplan.cli.watching.following import Following
from dynaplan.cli.watching.gathering import DeploymentAnswers
from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.fleet import deployments, gpu_devices
from dynaplan.fleet.deployments import RunningDeployment
from dynaplan.fleet.gpus import GpuActivity, GpuProcess, GpuUse
from dynaplan.fleet.rules.statefile import with_fleet
from dynaplan.process.identity import ProcessIdentity
from dynaplan.store.instances import Instance
from tests.unit.fleet.rules.graphs import worker
from tests.unit.fleet.rules.test_statefile import new_document

WORKER = worker("VllmWorker", gpus=(0,))


class OneWorker:
    """A store and a worker that generates ten tokens between two looks; copies ``Gathering``."""

    def __init__(self, namespace: str) -> None:
        self.generated = 0
        self.lists = 0

    async def listed(self) -> DeploymentAnswers:
        self.lists += 1
        card = {"role": "decode", "model": "llama"}
        instance = Instance("dynamo", "VllmWorker", "generate", 1, "http://x", worker=WORKER.name, card=card)
        frontend = Instance("dynamo", "Frontend", "http", 2, "http://y", worker="dynamo_Frontend")
        return DeploymentAnswers(registered=(instance, frontend), fleet={"free_gpus": [1]})

    async def loads(self, registered: list[Instance]) -> dict[str, WorkerLoad]:
        self.generated += 10
        return {each.worker: WorkerLoad(generated_tokens=self.generated) for each in registered}

    async def close(self) -> None: ...


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[float]]:
    document = with_fleet(
        {
            **new_document(),
            "addresses": {"frontend_url": "http://z", "log_dir": str(tmp_path), "runtime_dir": str(tmp_path)},
        },
        [WORKER],
    )
    found = RunningDeployment(tmp_path / "dynamo.json", document, ProcessIdentity(5, 1, "boot"))
    now = [100.0]
    monkeypatch.setattr(following, "connect", lambda namespace: found)
    monkeypatch.setattr(deployments, "find_deployment", lambda namespace: found)
    monkeypatch.setattr(following, "Gathering", OneWorker)
    monkeypatch.setattr(following.time, "monotonic", lambda: now[0])
    use = GpuUse(2**30, (GpuProcess(os.getpid(), "python"), GpuProcess(0)))
    monkeypatch.setattr(gpu_devices, "uses_reader", lambda gpus: lambda: {0: use})
    monkeypatch.setattr(gpu_devices, "activity_reader", lambda gpus: lambda: {0: GpuActivity(0.5, 300.0)})
    yield now


async def test_two_looks_tell_the_tokens_and_one_the_gpus(seconds: list[float]) -> None:
    live = Following(None)
    first = await live.look()
    seconds[0] += 1.0
    second = await live.look()
    await live.close()
    assert [row["tokens_per_s"] for row in (first["workers"][0], second["workers"][0])] == [None, 10.0]
    assert (second["free_gpus"], second["models"], second["load"]) == ([1], ["llama"], None)
    shown: dict[str, Any] = second["gpus"][0]
    assert (shown["used_bytes"], shown["utilisation"], shown["watts"]) == (2**30, 0.5, 300.0)
    assert shown["others"] == [f"python ({os.getpid()})"]
    assert shown["workers"] == [WORKER.name]


async def test_the_store_is_asked_every_other_second_only(seconds: list[float]) -> None:
    live = Following(None)
    for _ in range(4):
        await live.look()
        seconds[0] += 1.0
    gathering: Any = live._gathering
    assert gathering.lists == 2
    await live.close()


async def test_an_engine_that_began_anew_has_no_rate_yet(seconds: list[float]) -> None:
    live = Following(None)
    await live.look()
    gathering: Any = live._gathering
    gathering.generated = -10
    seconds[0] += 1.0
    assert (await live.look())["workers"][0]["tokens_per_s"] is None
    await live.close()
