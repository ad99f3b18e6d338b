from __future__ import annotations

import pytest

from dynaplan.graph.lifecycle import LIFECYCLE, Role, Worker, WorkerState, worker_name
from dynaplan.util.errors import IllegalTransition


def worker(state: WorkerState) -> Worker:
    return Worker(name="ns_VllmWorker_1", component="VllmWorker", role=Role.DECODE, state=state)


@pytest.mark.parametrize("end", WorkerState)
@pytest.mark.parametrize("start", WorkerState)
def test_a_worker_moves_along_the_table_and_not_otherwise(start: WorkerState, end: WorkerState) -> None:
    if end in LIFECYCLE[start]:
        assert worker(start).moved(end, 5.0).state is end
        return
    with pytest.raises(IllegalTransition):
        worker(start).moved(end, 5.0)


def test_an_illegal_move_tells_the_history_that_led_to_it() -> None:
    ready = worker(WorkerState.STARTING).moved(WorkerState.READY, 1.5, "it registered")
    with pytest.raises(IllegalTransition, match=r"starting -> ready: it registered"):
        ready.moved(WorkerState.READY, 2.0, "again")


@pytest.mark.parametrize("index", [0, 1, 12])
def test_the_index_is_read_from_the_name_that_it_is_part_of(index: int) -> None:
    made = Worker(name=worker_name("ns", "VllmWorker", index), component="VllmWorker", role=Role.DECODE)
    assert made.index == index
