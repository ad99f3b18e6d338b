"""What a new fleet plugin takes over from the statefile. That it writes it is shown with the reconciler."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from dynaplan.contract.gpus import Gpu
from dynaplan.fleet.launch import RELOADED_FILE, CurrentLaunch, Reload
from dynaplan.fleet.plugin.document import Statefile, present
from dynaplan.fleet.rules.statefile import Deployment, Document, fleet_of, initial, with_fleet
from dynaplan.graph.lifecycle import Role, Worker, WorkerState
from dynaplan.process.identity import ProcessIdentity
from dynaplan.util.errors import StatefileUnwritable
from tests.fakes.circus import FakeCircus, FakeProcesses
from tests.unit.fleet.plugin.box import GRAPH, Box


def worker(pid: int, state: WorkerState = WorkerState.READY) -> Worker:
    found = Worker("ns_VllmWorker", "VllmWorker", Role.DECODE, state, (1,), pid=pid, started_at=pid * 10)
    return replace(found, instance_id=7, url="http://127.0.0.1:7")


async def taken_over(written: Worker, **pids: int) -> Worker:
    circus = FakeCircus()
    circus.pids = pids
    [found] = await present([written], cast(Any, circus), FakeProcesses(circus))
    return found


async def test_a_worker_whose_new_process_could_not_be_written_down_has_that_one() -> None:
    found = await taken_over(worker(101), ns_VllmWorker=105)
    assert (found.pid, found.started_at, found.gpus) == (105, 1050, (1,))
    assert (found.state, found.instance_id, found.url) == (WorkerState.STARTING, 0, "")
    leaving = await taken_over(worker(101, WorkerState.DRAINING), ns_VllmWorker=105)
    assert (leaving.pid, leaving.state) == (105, WorkerState.DRAINING)


async def test_a_worker_that_runs_or_is_gone_is_as_it_was_written() -> None:
    for pids in ({"ns_VllmWorker": 101}, {"ns_VllmWorker": 0}, {}):
        assert await taken_over(worker(101), **pids) == worker(101)
    assert await taken_over(worker(0, WorkerState.BACKOFF), ns_VllmWorker=105) == worker(
        0, WorkerState.BACKOFF
    )


GPUS = tuple(Gpu(index, f"GPU-SIM-{index}") for index in range(4))
DEPLOYMENT = Deployment(GRAPH, GPUS, ProcessIdentity(1, 1, "boot"), "ipc:///none", {}, {}, {})


class Kept:
    """A statefile in memory; the disk can be full."""

    def __init__(self, *workers: Worker) -> None:
        self.document = with_fleet(initial(DEPLOYMENT), workers)
        self.is_full = False

    def read(self) -> Document:
        return self.document

    def write(self, document: Document) -> None:
        if self.is_full:
            raise StatefileUnwritable("no space left on device")
        self.document = document

    def remove(self) -> None:
        raise AssertionError


def test_who_has_ended_is_written_down_as_not_ready_before_anybody_is_asked(tmp_path: Path) -> None:
    circus = FakeCircus()
    circus.pids = {"ns_VllmWorker_1": 102}
    alive = replace(worker(102), name="ns_VllmWorker_1", gpus=(2,))
    kept = Kept(worker(101), alive)
    launches = CurrentLaunch(Box(tmp_path).launch)
    statefile = Statefile(kept, kept.document, launches, is_written=True)
    kept.is_full = True
    statefile.record_ends(FakeProcesses(circus), 50.0)
    assert fleet_of(kept.document) == statefile.workers == (worker(101), alive)
    kept.is_full = False
    statefile.record_ends(FakeProcesses(circus), 51.0)
    gone, still = fleet_of(kept.document)
    assert (gone.state, gone.pid, gone.gpus, gone.since_s) == (WorkerState.STARTING, 101, (1,), 51.0)
    assert still == alive
    before = kept.document
    statefile.record_ends(FakeProcesses(circus), 52.0)
    assert kept.document is before


def test_what_is_in_the_file_is_known_and_a_reload_is_written_with_the_workers(tmp_path: Path) -> None:
    launch = Box(tmp_path).launch
    kept = Kept(worker(101))
    statefile = Statefile(kept, kept.document, CurrentLaunch(launch), is_written=False)
    workers = {each.name: each for each in statefile.workers}
    assert not statefile.has(workers), "made anew, and not written yet"
    statefile.record(workers.values())
    assert statefile.has(workers)
    assert not statefile.has({})
    config = {"VllmWorker": {"model": "another/model"}}
    (tmp_path / RELOADED_FILE).write_text(Reload(config).to_json())
    statefile.record(workers.values())
    assert "another/model" in json.dumps(kept.document)
