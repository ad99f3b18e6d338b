"""What an upgrade looks at before it touches anything."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynaplan.cli import restart, upgrade
from dynaplan.cli.detach import PROGRAM
from dynaplan.cli.reload import reload_lock
from dynaplan.cli.upgrade import Upgrade, check_configuration, check_version
from dynaplan.fleet import deployments
from dynaplan.fleet.reattach.versions import VERSION_FILE, RunningServe, Version, own_version
from dynaplan.graph.lifecycle import Role, Worker, WorkerState
from dynaplan.process.heartbeats import PLUGIN_HEARTBEAT, HeartbeatFiles
from dynaplan.process.identity import ProcessIdentity
from dynaplan.store import connections
from dynaplan.store.memory import MemoryStore
from dynaplan.util.clock import SystemClock
from dynaplan.util.errors import ConfigError, DeploymentError, GraphError, PermanentError, TemporaryError
from tests.unit.fleet.test_launch import LAUNCH

REPOSITORY = str(Path(__file__).parents[3])
OF_AGG = replace(
    LAUNCH, graph=replace(LAUNCH.graph, identifier="graphs.agg:Frontend", working_dir=REPOSITORY)
)


def test_settings_that_this_version_does_not_know_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    check_configuration(replace(OF_AGG, config={"Frontend": {"router": "kv"}}))
    assert Path.cwd() == Path("/")
    with pytest.raises(ConfigError, match="routr"):
        check_configuration(replace(OF_AGG, config={"Frontend": {"routr": "kv"}}))
    assert Path.cwd() == Path("/")


def test_a_graph_that_this_environment_cannot_import_is_refused() -> None:
    graph = replace(OF_AGG.graph, identifier="graphs.nowhere:Frontend")
    with pytest.raises(GraphError):
        check_configuration(replace(OF_AGG, graph=graph))


OWN, BEFORE = own_version(), Version("0.0.1", "/old/python", "/old")
OLD = RunningServe(11, 100, BEFORE)
NEW = RunningServe(12, 200, OWN, since=200)
ALWAYS_OWN = RunningServe(11, 100, OWN)
SUPERVISOR = ProcessIdentity(10, 90, "boot")


class Box:
    """A deployment that does at once what it is told; ``successor`` is the ``serve`` that comes next."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.programs: list[Any] = []
        self.renewed: list[str] = []
        self.fails = ""
        self.is_gone = False
        self.successor: RunningServe | None = NEW
        self.plugin_started_at, self.now = 201, 210
        self.workers = tuple(
            Worker(name, name, role, WorkerState.READY, pid=20 + number, started_at=110)
            for number, (name, role) in enumerate(
                (("planner", Role.PLANNER), ("decode", Role.DECODE), ("frontend", Role.FRONTEND))
            )
        )
        self.write(OLD)

    def write(self, version: RunningServe) -> None:
        (self.directory / VERSION_FILE).write_text(json.dumps(asdict(version)))

    @property
    def found(self) -> Any:
        facts = {"namespace": "ns", "workers": self.workers, "runtime_dir": self.directory}
        return SimpleNamespace(**facts, arbiter=SUPERVISOR, document={"environment": {}})

    def take_over(self, runtime_dir: Path, running: RunningServe, program: Any, path: str | None) -> None:
        assert runtime_dir == self.directory
        if self.is_gone:
            raise ProcessLookupError(f"serve, process {running.pid}, has ended")
        self.programs.append(program)
        if self.successor:
            self.write(self.successor)

    def read(self, name: str) -> Any:
        assert name == PLUGIN_HEARTBEAT
        process = ProcessIdentity(13, self.plugin_started_at, "boot")
        return SimpleNamespace(is_alive=True, process=process)

    def replace(self, old: Worker) -> str:
        if old.name == self.fails:
            raise PermanentError(f"no new worker took the place of {old.name}")
        self.renewed.append(old.name)
        self.workers = tuple(
            replace(each, started_at=self.now, pid=each.pid + 100) if each.name == old.name else each
            for each in self.workers
        )
        return old.name


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Box:
    box, store = Box(tmp_path), MemoryStore(SystemClock())

    class Restart:
        starts_new_first = True

        def __init__(self, store: Any, namespace: str, old: Worker, timeout_s: float | None) -> None:
            self.old = old

        async def run(self, gpu_wait_s: float) -> str:
            return box.replace(self.old)

    async def restart_process(found: Any, old: Worker, timeout_s: float | None) -> str:
        return box.replace(old)

    async def closed() -> None:
        return None

    monkeypatch.setattr(store, "close", closed)
    monkeypatch.setattr(restart, "WorkerRestart", Restart)
    monkeypatch.setattr(restart, "restart_process", restart_process)
    monkeypatch.setattr(upgrade, "TAKE_OVER_TIMEOUT_S", 0.3)
    monkeypatch.setattr(upgrade, "PLUGIN_TIMEOUT_S", 0.3)
    monkeypatch.setattr(upgrade, "take_over", box.take_over)
    monkeypatch.setattr(deployments, "find_deployment", lambda namespace: box.found)
    monkeypatch.setattr(connections, "connect_store", lambda: store)
    monkeypatch.setattr(HeartbeatFiles, "of", lambda directory: box)
    return box


async def test_serve_is_replaced_then_frontends_then_workers_then_the_rest(
    box: Box, capsys: pytest.CaptureFixture[str]
) -> None:
    await Upgrade(box.found, OLD).run()
    assert box.programs == [PROGRAM]
    assert box.renewed == ["frontend", "decode", "planner"]
    assert "serve and 3 workers" in capsys.readouterr().out


async def test_an_upgrade_that_was_interrupted_goes_on_with_the_workers_that_are_left(box: Box) -> None:
    box.replace(box.workers[0])
    await Upgrade(box.found, NEW).run()
    assert box.programs == []
    assert box.renewed == ["planner", "frontend", "decode"]


async def test_going_back_renews_every_worker(box: Box) -> None:
    box.successor = RunningServe(13, 300, OWN, since=300)
    box.replace(box.workers[2])
    box.plugin_started_at, box.now = 301, 310
    await Upgrade(box.found, RunningServe(12, 200, BEFORE, since=200)).run()
    assert box.renewed == ["frontend", "frontend", "decode", "planner"]


async def test_force_replaces_serve_and_every_worker_of_the_same_version(box: Box) -> None:
    box.successor = replace(ALWAYS_OWN, pid=12, started_at=200)
    await Upgrade(box.found, ALWAYS_OWN).run(is_forced=True)
    assert len(box.programs) == 1
    assert box.renewed == ["frontend", "decode", "planner"]


async def test_a_version_that_does_not_come_up_touches_no_worker(box: Box) -> None:
    box.successor = replace(OLD, pid=13, started_at=300)
    with pytest.raises(PermanentError, match=r"did not come up: dynaplan 0\.0\.1 \(/old/python\) goes on"):
        await Upgrade(box.found, OLD).run()
    assert box.renewed == []


async def test_no_serve_and_no_fleet_plugin_are_waited_for_without_end(box: Box) -> None:
    box.plugin_started_at = 150
    with pytest.raises(PermanentError, match="fleet plugin has not answered"):
        await Upgrade(box.found, OLD).run()
    box.write(OLD)
    box.successor = None
    with pytest.raises(TemporaryError, match="no serve has come"):
        await Upgrade(box.found, OLD).run()
    assert box.renewed == []


async def test_a_worker_that_does_not_start_ends_it_and_what_is_left_is_named(box: Box) -> None:
    box.fails = "decode"
    with pytest.raises(PermanentError, match="of the old one still decode, planner: no new worker"):
        await Upgrade(box.found, OLD).run()
    assert box.renewed == ["frontend"]


async def test_a_serve_that_is_gone_is_not_replaced(box: Box) -> None:
    box.is_gone = True
    with pytest.raises(DeploymentError, match="cannot be replaced: serve, process 11, has ended"):
        await Upgrade(box.found, OLD).run()


async def test_two_upgrades_do_not_go_on_at_once(box: Box) -> None:
    with reload_lock(box.found), pytest.raises(DeploymentError, match="is in progress"):
        await Upgrade(box.found, OLD).run()
    assert box.programs == []


def test_what_runs_is_replaced_unless_nothing_would_change(box: Box) -> None:
    assert check_version(box.found, force=False) == OLD
    box.write(ALWAYS_OWN)
    with pytest.raises(DeploymentError, match="already"):
        check_version(box.found, force=False)
    assert check_version(box.found, force=True).pid == 11
    box.write(NEW)
    assert check_version(box.found, force=False) == NEW


def test_without_a_supervisor_or_a_known_version_or_as_another_user_it_is_refused(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    box.write(replace(OLD, pid=SUPERVISOR.pid))
    with pytest.raises(DeploymentError, match="no supervisor"):
        check_version(box.found, force=False)
    (box.directory / VERSION_FILE).unlink()
    with pytest.raises(DeploymentError, match="a version that cannot be upgraded"):
        check_version(box.found, force=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31)
    with pytest.raises(DeploymentError, match="Run this as that user"):
        check_version(box.found, force=False)
