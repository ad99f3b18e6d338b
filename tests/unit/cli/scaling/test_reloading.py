"""A reload applies new settings worker by worker, and takes them back when one does not start."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynaplan.cli.scaling import reloading, restart
from dynaplan.cli.scaling.reloading import Reloading, alone
from dynaplan.cli.scaling.waiting import ScaleTimes
from dynaplan.fleet import circus_client, deployments
from dynaplan.fleet.launch import LAUNCH_FILE, Reload, last_reload
from dynaplan.graph.lifecycle import Role, Worker, WorkerState
from dynaplan.store import connections
from dynaplan.store.memory import MemoryStore
from dynaplan.util.clock import SystemClock
from dynaplan.util.errors import DeploymentError, PermanentError
from tests.unit.cli.scaling.test_reload import GRAPH
from tests.unit.fleet.rules.graphs import worker
from tests.unit.fleet.test_launch import LAUNCH

OLD, NEW = {"VllmWorker": {"max-num-seqs": 8}}, {"VllmWorker": {"max-num-seqs": 16}}
_, _, DECODE, _ = GRAPH.services
FRONTEND = GRAPH.services[0]
LIVE_KEY = "/ns/disagg_router/max_prefill_queue_size"


class Box:
    """A deployment of a frontend and two decode workers, which does at once what it is told.

    Every process has the settings that were in the file when it was started.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.store = MemoryStore(SystemClock())
        self.started: list[str] = []
        self.fails: Callable[[str], bool] = lambda name: False
        self.pid = 100
        self.settings: dict[tuple[str, int], Any] = {}
        self.workers = (
            self.process(Worker("ns_Frontend", "Frontend", Role.FRONTEND, WorkerState.READY)),
            self.process(replace(worker("VllmWorker"), name="ns_VllmWorker")),
            self.process(replace(worker("VllmWorker_1"), name="ns_VllmWorker_1")),
        )

    def process(self, started: Worker) -> Worker:
        self.pid += 1
        found = last_reload(self.directory)
        self.settings[started.name, self.pid] = found.config if found else OLD
        return replace(started, pid=self.pid)

    def replace(self, old: Worker) -> str:
        self.started.append(old.name)
        if self.fails(old.name):
            raise PermanentError("1 of 2 decode workers ready")
        self.workers = tuple(self.process(each) if each.name == old.name else each for each in self.workers)
        return old.name

    @property
    def found(self) -> Any:
        return SimpleNamespace(
            namespace="ns", workers=self.workers, runtime_dir=self.directory, circus_endpoint="ipc://x"
        )

    @property
    def seen(self) -> list[Any]:
        """The settings that each process has, in order of the workers."""
        return [self.settings[each.name, each.pid] for each in self.workers]

    def client(self, endpoint: str, *, sender: str) -> Any:
        """Be the client of a person: as the fleet plugin's, ``restart`` would have circus restart it."""
        assert sender == circus_client.A_PERSON
        return self

    async def call(self, command: str, name: str) -> None:
        old = next(each for each in self.workers if each.name == name)
        with suppress(PermanentError):
            self.replace(old)

    def close(self) -> None:
        """The client of circus needs no closing here."""


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Box:
    box = Box(tmp_path)

    class Restart:
        was_beside = True

        def __init__(self, store: Any, namespace: str, old: Worker, timeout_s: float | None) -> None:
            self.old = old

        async def run(self, patience_s: float) -> str:
            return box.replace(self.old)

    async def closed() -> None:
        return None

    monkeypatch.setattr(box.store, "close", closed)
    monkeypatch.setattr(reloading, "WorkerRestart", Restart)
    monkeypatch.setattr(reloading, "times_of", lambda found, wanted: ScaleTimes(1.0, 1.0))
    monkeypatch.setattr(restart, "times_of", lambda found, wanted: ScaleTimes(1.0, 1.0))
    monkeypatch.setattr(circus_client, "CircusClient", box.client)
    monkeypatch.setattr(deployments, "find_deployment", lambda namespace: box.found)
    monkeypatch.setattr(connections, "connect_store", lambda: box.store)
    launch = replace(LAUNCH, graph=GRAPH, config=OLD, runtime_dir=tmp_path)
    (tmp_path / LAUNCH_FILE).write_text(launch.to_json())
    return box


def reload_of(box: Box, timeout_s: float | None = None) -> Reloading:
    return Reloading(box.found, GRAPH, Reload(NEW, "a.yaml", before=OLD), timeout_s)


async def test_every_process_that_reads_a_setting_has_the_new_one_afterwards(box: Box) -> None:
    await reload_of(box).run({"max_prefill_queue_size": "5"}, [DECODE, FRONTEND])
    assert box.started == ["ns_VllmWorker", "ns_VllmWorker_1", "ns_Frontend"]
    assert box.seen == [NEW, NEW, NEW]
    item = await box.store.get(LIVE_KEY)
    assert item and item.value == "5"
    assert last_reload(box.directory) == Reload(NEW, "a.yaml")


async def test_when_a_new_worker_fails_all_have_the_settings_of_before_again(box: Box) -> None:
    await box.store.put(LIVE_KEY, "3")
    box.fails = lambda name: name == "ns_VllmWorker_1" and box.started.count(name) == 1
    with pytest.raises(PermanentError, match="the new settings do not work: 1 of 2 decode workers ready"):
        await reload_of(box).run({"max_prefill_queue_size": "5"}, [DECODE, FRONTEND])
    assert box.started == ["ns_VllmWorker", "ns_VllmWorker_1", "ns_VllmWorker"]
    assert box.seen == [OLD, OLD, OLD]
    item = await box.store.get(LIVE_KEY)
    assert item and item.value == "3"
    last = last_reload(box.directory)
    assert last and (last.config, last.before) == (OLD, None)


async def test_a_frontend_that_does_not_come_back_is_told_and_goes_back_too(box: Box) -> None:
    box.fails = lambda name: name == "ns_Frontend"
    with pytest.raises(PermanentError, match="nothing has taken the place of ns_Frontend within 0 s"):
        await reload_of(box, 0.0).run({}, [FRONTEND])
    last = last_reload(box.directory)
    assert last and last.config == OLD


async def test_an_interrupted_reload_leaves_the_settings_of_before(
    box: Box, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> bool:
        raise asyncio.CancelledError

    box.fails = interrupted
    with pytest.raises(asyncio.CancelledError):
        await reload_of(box).run({"max_prefill_queue_size": "5"}, [DECODE])
    last = last_reload(box.directory)
    assert last and (last.config, last.before) == (OLD, None)
    assert await box.store.get(LIVE_KEY) is None
    assert "Interrupted" in capsys.readouterr().err


async def test_two_reloads_do_not_go_on_at_once(box: Box) -> None:
    with (
        alone(box.found, "upgrade"),
        pytest.raises(DeploymentError, match="another reload or upgrade of ns goes on"),
    ):
        await reload_of(box).run({}, [])
    await reload_of(box).run({}, [])
