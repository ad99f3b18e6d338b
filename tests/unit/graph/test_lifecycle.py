from __future__ import annotations

import pytest

from dynaplan.graph.lifecycle import (
    HOLDS_GPUS,
    LIFECYCLE,
    Role,
    Worker,
    WorkerEvent,
    WorkerState,
    worker_name,
)
from dynaplan.util.errors import IllegalTransition


def worker(state: WorkerState) -> Worker:
    return Worker(name="ns_VllmWorker_1", component="VllmWorker", role=Role.DECODE, state=state)


@pytest.mark.parametrize("event", WorkerEvent)
@pytest.mark.parametrize("start", WorkerState)
def test_a_worker_moves_along_the_table_and_not_otherwise(start: WorkerState, event: WorkerEvent) -> None:
    if event in LIFECYCLE[start]:
        assert worker(start).after(event, 5.0).state is LIFECYCLE[start][event]
        return
    with pytest.raises(IllegalTransition):
        worker(start).after(event, 5.0)


def test_a_worker_that_leaves_never_comes_back_and_its_gpus_are_its_own_until_it_is_gone() -> None:
    assert set(LIFECYCLE[WorkerState.DRAINING].values()) == {WorkerState.STOPPED}
    assert WorkerState.DRAINING in HOLDS_GPUS


def test_one_that_is_started_again_still_says_why_it_had_crashed() -> None:
    crashed = worker(WorkerState.READY).after(WorkerEvent.CRASHED, 1.0, "exit code 3")
    assert crashed.after(WorkerEvent.DELAY_OVER, 2.0).reason == "exit code 3"


def test_an_illegal_move_tells_the_history_that_led_to_it() -> None:
    ready = worker(WorkerState.STARTING).after(WorkerEvent.REGISTERED, 1.5, "it answered")
    with pytest.raises(
        IllegalTransition, match=r"DELAY_OVER while it is ready(?s:.*)starting -> ready: it answered"
    ):
        ready.after(WorkerEvent.DELAY_OVER, 2.0)


@pytest.mark.parametrize("index", [0, 1, 12])
def test_the_index_is_read_from_the_name_that_it_is_part_of(index: int) -> None:
    made = Worker(name=worker_name("ns", "VllmWorker", index), component="VllmWorker", role=Role.DECODE)
    assert made.index == index
