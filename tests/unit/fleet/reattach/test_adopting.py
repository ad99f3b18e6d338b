"""What a ``serve`` that was started again adopts, what it ends, and what it leaves alone.

The link and the processes are fakes: the supervisor's answers are those of ``process/supervisor.py``, and
``kill_group`` only writes down what it was asked to end.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dynaplan.fleet.launch import RELOADED_FILE, Launch, Reload
from dynaplan.fleet.plugin.document import new_document
from dynaplan.fleet.preparation import Preparation
from dynaplan.fleet.reattach.adopting import DEPLOYMENT, adopt_deployment, save_handover
from dynaplan.fleet.reattach.processes import SupervisedFleet
from dynaplan.fleet.rules.statefile import with_fleet
from dynaplan.graph.lifecycle import Role, Worker, WorkerState
from dynaplan.process.identity import ProcessIdentity
from dynaplan.process.supervisor_link import SupervisorState
from tests.unit.fleet.test_launch import LAUNCH

SUPERVISOR = ProcessIdentity(os.getpid(), 77, "this-boot")
FRONTEND = Worker("ns_Frontend", "Frontend", Role.FRONTEND, pid=501, state=WorkerState.READY)
DECODE = Worker("ns_VllmWorker", "VllmWorker", Role.DECODE, gpus=(0,), pid=502, state=WorkerState.READY)
STRANGER = 999
"""The pid that a worker had once, and that is another program's now."""


class KeepingLink:
    """A link to a supervisor that has these processes, by name; ``dropped`` is what it need not keep any
    more."""

    def __init__(self, pids: dict[str, int]) -> None:
        self.supervisor_pid, self.is_trial = SUPERVISOR.pid, False
        self.pids = pids
        self.kept: dict[str, int] = {}
        self.dropped: list[str] = []
        self.paths: list[Path] | None = None
        self.on_end: Callable[[int, int], None] = lambda pid, status: None

    def hello(self) -> SupervisorState:
        return SupervisorState(self.pids, self.kept, 1.0)

    def keep_text(self, name: str, text: bytes) -> None:
        if name in self.kept:
            os.close(self.kept[name])
        self.kept[name] = os.memfd_create(name)
        os.write(self.kept[name], text)

    def drop(self, name: str) -> None:
        self.dropped.append(name)

    def remove_at_the_end(
        self,
        paths: list[Path],
        if_empty: list[Path] | None = None,
        marked: list[tuple[Path, str]] | None = None,
    ) -> None:
        self.paths = paths


class Box:
    """A deployment on the disk, and what was done to processes since."""

    def __init__(self, directory: Path) -> None:
        self.launch = replace(
            LAUNCH,
            graph=replace(LAUNCH.graph, working_dir=str(directory)),
            arbiter=SUPERVISOR,
            runtime_dir=directory / "run",
            log_dir=directory,
            statefile=directory / "ns.json",
            scratch_dir=directory / "scratch",
            address_dir=directory / "run",
        )
        self.launch.runtime_dir.mkdir()
        self.ended: list[int] = []
        self.stack = ExitStack()
        self.link = KeepingLink({FRONTEND.name: FRONTEND.pid, DECODE.name: DECODE.pid})
        self.write(FRONTEND, DECODE)

    def write(self, *workers: Worker, arbiter: ProcessIdentity = SUPERVISOR) -> None:
        document = with_fleet(new_document(replace(self.launch, arbiter=arbiter)), workers)
        self.launch.statefile.write_text(json.dumps(document))

    def leave(self, launch: Launch | None = None) -> None:
        """Have the supervisor keep what the ``serve`` before leaves to the next."""
        fleet = SupervisedFleet(self.link, {}, (), {})  # type: ignore[arg-type]
        save_handover(Preparation(launch or self.launch, (), (), True, (), supervised_fleet=fleet), False)

    def adopt_deployment(self) -> Preparation | None:
        found = adopt_deployment(self.link, self.stack)  # type: ignore[arg-type]
        return found[0] if found else None

    def processes(self) -> Any:
        def kill_group(pid: int, started_at: int, waits_s: float = 0.0) -> tuple[int, ...]:
            self.ended.append(pid)
            return (pid,)

        known = {SUPERVISOR.pid: SUPERVISOR}
        return SimpleNamespace(kill_group=kill_group, identify=lambda pid: 1, identity_of=known.__getitem__)


@pytest.fixture
def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Box]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("dynaplan.fleet.reattach.adopting.log_to", lambda path: None)
    made, environment = Box(tmp_path), dict(os.environ)
    monkeypatch.setattr("dynaplan.fleet.reattach.adopting.process_table", made.processes())
    yield made
    os.environ.clear()
    os.environ.update(environment)
    for descriptor in made.link.kept.values():
        if DEPLOYMENT not in made.link.dropped:
            os.close(descriptor)


def test_what_the_supervisor_has_and_the_statefile_knows_is_adopted(box: Box) -> None:
    box.leave()
    found = box.adopt_deployment()
    assert found
    assert found.launch == box.launch
    assert [each.name for each in found.workers] == [FRONTEND.name, DECODE.name]
    assert found.supervised_fleet
    assert found.supervised_fleet.adoptable == box.link.pids
    assert box.ended == []


def test_a_process_that_the_statefile_does_not_know_is_ended(box: Box) -> None:
    box.leave()
    box.write(FRONTEND)
    found = box.adopt_deployment()
    assert found and found.supervised_fleet
    assert found.supervised_fleet.adoptable == {FRONTEND.name: FRONTEND.pid}
    assert box.ended == [DECODE.pid]


def test_a_pid_that_is_another_programs_by_now_is_neither_adopted_nor_ended(box: Box) -> None:
    box.leave()
    gone = replace(DECODE, name="ns_VllmWorker_1", gpus=(1,), pid=STRANGER)
    box.write(FRONTEND, replace(DECODE, pid=STRANGER), gone)
    found = box.adopt_deployment()
    assert found and found.supervised_fleet
    # Its own child, which nothing else can have the pid of, is what the supervisor says it is.
    assert found.supervised_fleet.adoptable == box.link.pids
    assert [each.name for each in found.workers] == [FRONTEND.name, DECODE.name]
    assert box.ended == []


def other_boot(box: Box) -> None:
    box.write(FRONTEND, replace(DECODE, pid=STRANGER), arbiter=replace(SUPERVISOR, boot_id="before"))


def other_arbiter(box: Box) -> None:
    box.write(FRONTEND, replace(DECODE, pid=STRANGER), arbiter=replace(SUPERVISOR, started_at=1))


def kept_of_another_supervisor(box: Box) -> None:
    box.leave(replace(box.launch, arbiter=replace(SUPERVISOR, started_at=1)))


def kept_text_is_torn(box: Box) -> None:
    box.link.keep_text(DEPLOYMENT, b'{"launch": ')


def statefile_is_gone(box: Box) -> None:
    box.launch.statefile.unlink()


def statefile_is_torn(box: Box) -> None:
    box.launch.statefile.write_text('{"namespace": "ns')


def directory_is_gone(box: Box) -> None:
    box.launch.runtime_dir.rmdir()


@pytest.mark.parametrize(
    "change",
    [
        other_boot,
        other_arbiter,
        kept_of_another_supervisor,
        kept_text_is_torn,
        statefile_is_gone,
        statefile_is_torn,
        directory_is_gone,
    ],
    ids=lambda change: change.__name__,
)
def test_what_does_not_fit_is_no_deployment_and_only_the_holders_own_processes_are_ended(
    box: Box, change: Callable[[Box], None]
) -> None:
    box.leave()
    change(box)
    assert box.adopt_deployment() is None
    assert box.ended == [FRONTEND.pid, DECODE.pid]
    assert box.link.dropped == [DEPLOYMENT]
    assert box.link.paths == []


def test_where_nothing_was_kept_nothing_is_adopted(box: Box) -> None:
    assert box.adopt_deployment() is None
    assert box.ended == [FRONTEND.pid, DECODE.pid]


def test_the_settings_of_the_last_reload_count_and_no_file_of_the_users(box: Box) -> None:
    file = box.launch.log_dir / "changed.yaml"
    file.write_text("Frontend: [this is no section\n")
    box.leave(replace(box.launch, config_file=str(file)))
    reloaded = {"Common": {"model": "another/model"}}
    (box.launch.runtime_dir / RELOADED_FILE).write_text(Reload(reloaded, str(file)).to_json())
    found = box.adopt_deployment()
    assert found
    assert found.launch.config == reloaded


def test_the_environment_is_the_one_of_before(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYNAPLAN_WORKER_TOKEN", "kept")
    box.leave()
    monkeypatch.setenv("DYNAPLAN_WORKER_TOKEN", "changed meanwhile")
    monkeypatch.setenv("DYN_NEW", "1")
    assert box.adopt_deployment()
    assert os.environ["DYNAPLAN_WORKER_TOKEN"] == "kept"
    assert "DYN_NEW" not in os.environ


def test_the_files_to_remove_without_serve_are_named(box: Box) -> None:
    box.leave()
    assert box.link.paths
    assert {box.launch.statefile, box.launch.runtime_dir, box.launch.scratch_dir} <= set(box.link.paths)
