"""What a new fleet plugin takes over from the statefile. That it writes it is shown with the keeper."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from dynaplan.domain.lifecycle import Role, Worker, WorkerState
from dynaplan.supervisor.fleet.document import present
from tests.fakes.circus import FakeCircus, FakeProcesses


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
