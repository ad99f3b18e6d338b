"""Reserved GPUs: workers leave them, after others in their places where there is a GPU for one."""

from __future__ import annotations

from dynaplan.fleet.rules.reconcile import Fleet, Reconciled, reconcile
from dynaplan.graph.lifecycle import Worker
from tests.unit.fleet.rules.graphs import (
    BACKOFF,
    DRAINING,
    FAILED,
    READY,
    STARTING,
    box,
    decode,
    graph,
    prefill,
    worker,
)

WHY = "reserved by alice until noon"
RESERVED = {1: WHY}


def after(fleet: Fleet, wanted: int = 2, gpus: int = 3) -> Reconciled:
    desired = {"VllmWorker": wanted}
    return reconcile(graph(decode()), fleet, desired, box(gpus), RESERVED, 5.0, reserved=RESERVED)


def states(found: Reconciled) -> dict[str, str]:
    return {each.name.removeprefix("dynamo_"): each.state.value for each in found.fleet}


BOTH = (worker("VllmWorker", gpus=(0,)), worker("VllmWorker_1", gpus=(1,)))


def test_another_is_started_first_where_a_gpu_is_free_and_nothing_leaves_before_it_is_ready() -> None:
    first = after(BOTH)
    assert states(first) == {"VllmWorker": "ready", "VllmWorker_1": "ready", "VllmWorker_2": "starting"}
    assert first.fleet[2].gpus == (2,)
    assert after(first.fleet).fleet == first.fleet


def test_the_worker_leaves_once_the_other_is_ready_and_says_why() -> None:
    leaving = after((*BOTH, worker("VllmWorker_2", READY, (2,)))).fleet[1]
    assert (leaving.state, leaving.reason) == (DRAINING, f"GPU 1 is {WHY}")


def test_it_leaves_at_once_where_no_gpu_is_free_and_nothing_is_started_on_the_reserved_one() -> None:
    found = after(BOTH, gpus=2)
    assert states(found) == {"VllmWorker": "ready", "VllmWorker_1": "draining"}
    assert "draining: dynamo_VllmWorker_1" in after(found.fleet, gpus=2).waiting["VllmWorker"]
    empty = after((BOTH[0],), gpus=2)
    assert states(empty) == {"VllmWorker": "ready"}
    assert f"GPU 1: {WHY}" in empty.waiting["VllmWorker"]


def test_it_leaves_when_the_other_has_failed_or_is_not_wanted() -> None:
    assert after((*BOTH, worker("VllmWorker_2", FAILED))).fleet[1].state is DRAINING
    assert states(after(BOTH, wanted=1)) == {"VllmWorker": "ready", "VllmWorker_1": "draining"}


def test_a_worker_that_answers_nothing_yet_leaves_at_once() -> None:
    starting = (BOTH[0], worker("VllmWorker_1", STARTING, (1,)))
    assert after(starting).fleet[1].state is DRAINING
    crashed = (BOTH[0], worker("VllmWorker_1", BACKOFF, (1,)))
    assert after(crashed).removed == {"dynamo_VllmWorker_1": f"GPU 1 is {WHY}"}


def test_a_worker_of_several_gpus_leaves_all_of_them() -> None:
    wide: tuple[Worker, ...] = (worker("VllmWorker", gpus=(0, 1)),)
    found = reconcile(
        graph(decode(gpus=2), prefill()),
        wide,
        {"VllmWorker": 1, "PrefillWorker": 0},
        box(2),
        RESERVED,
        5.0,
        reserved=RESERVED,
    )
    assert found.fleet[0].state is DRAINING
