"""From the fleet that is to the fleet that is wanted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dynaplan.fleet.rules.reconcile import (
    OPERATOR_RESTART,
    REMOVALS,
    Fleet,
    Reconciled,
    Removal,
    reconcile,
    removals_in,
    renewable,
    replaced,
)
from dynaplan.graph.lifecycle import Role, Worker, WorkerState
from dynaplan.graph.model import GraphSpec, ServiceSpec
from tests.unit.fleet.rules.graphs import (
    BACKOFF,
    DRAINING,
    FAILED,
    READY,
    STARTING,
    STOPPED,
    box,
    decode,
    graph,
    prefill,
    worker,
)

NOBODY: dict[int, str] = {}
DISAGG = graph(decode(), prefill())

Steps = list[tuple[str, str]]


def result_of(
    fleet: tuple[Worker, ...],
    desired: dict[str, int],
    spec: GraphSpec = DISAGG,
    gpus: int = 4,
    **more: object,
) -> Reconciled:
    return reconcile(spec, fleet, desired, box(gpus), NOBODY, 100.0, **more)  # type: ignore[arg-type]


def steps(fleet: tuple[Worker, ...], desired: dict[str, int], *more: object, **named: object) -> Steps:
    """Each step of reconciling, in a word and with the worker's name without its namespace."""
    after = result_of(fleet, desired, *more, **named)  # type: ignore[arg-type]
    return [(step, worker.name[7:]) for step, worker in after.steps(fleet)]


def test_the_start_of_a_graph_is_a_scale_up_from_nothing() -> None:
    assert steps((), {}) == [("start", "VllmWorker"), ("start", "PrefillWorker")]
    assert [started.gpus for started in result_of((), {}).fleet] == [(0,), (1,)]


def test_a_new_worker_takes_the_lowest_free_name_and_the_gpus_that_its_service_asks_for() -> None:
    fleet = (worker("VllmWorker", gpus=(0, 1)), worker("VllmWorker_2", gpus=(2, 3)))
    after = result_of(fleet, {"VllmWorker": 4}, graph(decode(gpus=2)), gpus=8)
    assert [(started.name, started.gpus) for started in after.started(fleet)] == [
        ("dynamo_VllmWorker_1", (4, 5)),
        ("dynamo_VllmWorker_3", (6, 7)),
    ]


def test_the_base_worker_comes_back_first() -> None:
    fleet = (worker("VllmWorker_1", gpus=(0,)),)
    assert steps(fleet, {"VllmWorker": 2}, graph(decode())) == [("start", "VllmWorker")]


def test_the_highest_index_leaves_first_counted_as_a_number() -> None:
    fleet = tuple(worker("VllmWorker" + (f"_{n}" if n else ""), gpus=(n,)) for n in range(11))
    assert steps(fleet, {"VllmWorker": 9}, graph(decode()), gpus=11) == [
        ("drain", "VllmWorker_9"),
        ("drain", "VllmWorker_10"),
    ]


def test_those_that_serve_nobody_leave_before_those_that_do() -> None:
    fleet = (
        worker("VllmWorker", FAILED),
        worker("VllmWorker_1", BACKOFF, gpus=(1,)),
        worker("VllmWorker_2", STARTING, gpus=(2,)),
        worker("VllmWorker_3", READY, gpus=(3,)),
        worker("VllmWorker_4", READY, gpus=(4,)),
    )
    spec = graph(decode())
    assert steps(fleet, {"VllmWorker": 4}, spec)[0] == ("remove", "VllmWorker")
    assert steps(fleet, {"VllmWorker": 3}, spec) == [
        ("remove", "VllmWorker"),
        ("remove", "VllmWorker_1"),
    ]
    assert steps(fleet, {"VllmWorker": 1}, spec) == [
        ("remove", "VllmWorker"),
        ("remove", "VllmWorker_1"),
        ("drain", "VllmWorker_2"),
        ("drain", "VllmWorker_4"),
    ]


def test_drains_come_before_starts_and_their_gpus_are_waited_for() -> None:
    fleet = (worker("VllmWorker", gpus=(0,)), worker("VllmWorker_1", gpus=(1,)))
    after = result_of(fleet, {"VllmWorker": 1, "PrefillWorker": 1}, gpus=2)
    assert [(step, worker.name) for step, worker in after.steps(fleet)] == [("drain", "dynamo_VllmWorker_1")]
    assert after.waiting.keys() == {"PrefillWorker"}
    assert "draining: dynamo_VllmWorker_1" in after.waiting["PrefillWorker"]


def test_a_draining_worker_neither_counts_nor_gives_its_name_or_gpus_away() -> None:
    fleet = (worker("VllmWorker", DRAINING, gpus=(0,)),)
    (started,) = result_of(fleet, {"VllmWorker": 1}, graph(decode())).started(fleet)
    assert (started.name, started.gpus) == ("dynamo_VllmWorker_1", (1,))


def test_a_crashed_worker_is_restarted_when_it_is_due_and_not_replaced_before() -> None:
    waiting = replace(worker("VllmWorker", BACKOFF, gpus=(0,)), retry_at_s=100.5)
    assert steps((waiting,), {}, graph(decode())) == []
    due = (replace(waiting, retry_at_s=100.0),)
    assert steps(due, {}, graph(decode())) == [("restart", "VllmWorker")]
    (restarted,) = result_of(due, {}, graph(decode())).fleet
    assert (restarted.state, restarted.gpus) == (STARTING, (0,))


def test_a_failed_worker_is_not_replaced_for_ever() -> None:
    assert steps((worker("VllmWorker", FAILED),), {"VllmWorker": 1}, graph(decode())) == []


def test_a_failed_worker_is_replaced_when_the_desired_count_is_written_anew() -> None:
    failed = replace(worker("VllmWorker", FAILED), restarts_s=(1.0,) * 5)
    after = result_of((failed,), {"VllmWorker": 1}, graph(decode()), retry_failed=True)
    assert after.removed == {"dynamo_VllmWorker": "failed, tried again"}
    (started,) = after.started((failed,))
    assert (started.name, started.state, started.restarts_s) == ("dynamo_VllmWorker", STARTING, ())


def test_a_worker_that_is_gone_is_removed_and_its_name_and_gpus_used_again() -> None:
    gone = worker("VllmWorker", STOPPED, gpus=(0,))
    assert steps((gone,), {"VllmWorker": 1}, graph(decode()), gpus=1) == [
        ("remove", "VllmWorker"),
        ("start", "VllmWorker"),
    ]


def test_a_component_can_go_to_zero_and_come_back() -> None:
    fleet = (worker("VllmWorker", gpus=(0,)),)
    assert steps(fleet, {"VllmWorker": 0}, graph(decode())) == [("drain", "VllmWorker")]
    assert steps((), {"VllmWorker": 1}, graph(decode())) == [("start", "VllmWorker")]


def test_counts_that_are_not_set_are_those_of_the_graph() -> None:
    assert steps((), {"VllmWorker": -1, "PrefillWorker": 0}, graph(decode(2), prefill(3))) == [
        ("start", "VllmWorker"),
        ("start", "VllmWorker_1"),
    ]


def test_names_of_different_services_never_meet() -> None:
    spec = graph(ServiceSpec("Worker", Role.SERVICE, 3), ServiceSpec("worker_1", Role.SERVICE, 1))
    names = [started.name for started in result_of((), {}, spec).fleet]
    assert names == ["dynamo_Worker", "dynamo_Worker_2", "dynamo_Worker_3", "dynamo_worker_1"]


def test_services_in_the_process_of_another_have_no_worker() -> None:
    router = ServiceSpec("Router", Role.SERVICE, in_process_of="Frontend")
    assert steps((), {}, graph(router, ServiceSpec("Frontend", Role.FRONTEND))) == [("start", "Frontend")]


def test_a_worker_of_no_service_of_the_graph_is_drained() -> None:
    stranger = Worker("dynamo_Old", "Old", Role.SERVICE, READY)
    assert steps((stranger,), {}, graph()) == [("drain", "Old")]


def test_reconciling_its_own_result_changes_nothing() -> None:
    fleet = (
        worker("VllmWorker", STOPPED),
        worker("VllmWorker_1", BACKOFF, gpus=(1,)),
        worker("PrefillWorker", FAILED),
    )
    for desired in ({"VllmWorker": 3, "PrefillWorker": 1}, {"VllmWorker": 0}, {"VllmWorker": 9}):
        after = result_of(fleet, desired)
        assert result_of(after.fleet, desired) == replace(after, removed={})


def test_the_result_is_what_to_write_down_before_acting() -> None:
    fleet = (worker("VllmWorker", FAILED), worker("PrefillWorker", gpus=(1,)))
    after = result_of(fleet, {"VllmWorker": 0, "PrefillWorker": 0})
    assert [(each.name, each.state) for each in after.fleet] == [("dynamo_PrefillWorker", DRAINING)]


def test_a_failed_worker_is_replaced_when_its_time_has_come_and_its_failures_are_remembered() -> None:
    failed = replace(worker("VllmWorker", FAILED), failures=2, retry_at_s=100.0)
    after = result_of((failed,), {"VllmWorker": 1}, graph(decode()))
    assert [(each.state, each.failures) for each in after.fleet] == [(STARTING, 2)]
    too_early = replace(failed, retry_at_s=100.1)
    assert result_of((too_early,), {"VllmWorker": 1}, graph(decode())).fleet == (too_early,)


def test_failures_are_forgotten_when_counts_are_asked_for_anew() -> None:
    failed = replace(worker("VllmWorker", FAILED), failures=2, retry_at_s=100.0)
    after = result_of((failed,), {"VllmWorker": 1}, graph(decode()), retry_failed=True)
    assert [each.failures for each in after.fleet] == [0]


def test_a_worker_to_replace_leaves_after_its_requests_and_another_takes_its_place() -> None:
    fleet = (worker("VllmWorker", gpus=(0,)), worker("VllmWorker_1", gpus=(1,)))
    spec = graph(decode())
    after = reconcile(
        spec, replaced(fleet, {"dynamo_VllmWorker"}, 5.0), {"VllmWorker": 2}, box(3), frozenset(), 5.0
    )
    states = {each.name: each.state for each in after.fleet}
    assert states == {
        "dynamo_VllmWorker": DRAINING,
        "dynamo_VllmWorker_1": READY,
        "dynamo_VllmWorker_2": STARTING,
    }
    assert after.fleet[0].reason == "told to by circusctl restart"


def test_a_failed_worker_to_replace_is_tried_again_and_one_that_is_leaving_is_as_it_was() -> None:
    fleet = (worker("VllmWorker", FAILED), worker("VllmWorker_1", DRAINING), worker("VllmWorker_2", BACKOFF))
    names = {each.name for each in fleet}
    assert [each.state for each in replaced(fleet, names, 5.0)] == [STOPPED, DRAINING, BACKOFF]


def test_the_worker_that_is_named_leaves_first_and_only_where_one_is_too_many() -> None:
    fleet = (
        worker("VllmWorker", gpus=(0,)),
        worker("VllmWorker_1", gpus=(1,)),
        worker("PrefillWorker", gpus=(2,)),
    )
    first = {"leave_first": "dynamo_VllmWorker"}
    assert steps(fleet, {"VllmWorker": 1}, **first) == [("drain", "VllmWorker")]
    assert steps(fleet, {"VllmWorker": 2}, **first) == []
    assert steps(fleet, {"VllmWorker": 1}, leave_first="dynamo_gone") == [("drain", "VllmWorker_1")]


THREE = tuple(worker("VllmWorker" + (f"_{n}" if n else ""), gpus=(n,)) for n in range(3))


def leaving(fleet: tuple[Worker, ...], wanted: int) -> dict[str, str]:
    """The workers that leave, without their namespace, and why."""
    after = reconcile(graph(decode()), fleet, {"VllmWorker": wanted}, box(4), {}, 100.0)
    told = {each.name: each.reason for each in after.fleet if each.state is DRAINING}
    return {name.removeprefix("dynamo_"): why for name, why in (told | dict(after.removed)).items()}


def test_of_ready_workers_the_highest_number_leaves() -> None:
    assert leaving(THREE, 2) == {"VllmWorker_2": "2 of 3 VllmWorker wanted"}


def test_workers_that_serve_nobody_leave_before_any_ready_one() -> None:
    fleet = (*THREE, worker("VllmWorker_3", STARTING, gpus=(3,)))
    assert leaving(fleet, 3) == {"VllmWorker_3": "3 of 4 VllmWorker wanted"}
    crashed = replace(THREE[0], state=BACKOFF, retry_at_s=200.0)
    assert list(leaving((crashed, *THREE[1:]), 2)) == ["VllmWorker"]


OLD = Worker("dynamo_Frontend", "Frontend", Role.FRONTEND, READY)
NEW = replace(OLD, name="dynamo_Frontend_1")


def after(fleet: Fleet, workers: int = 1) -> Fleet:
    spec = graph(ServiceSpec("Frontend", Role.FRONTEND, workers, 0))
    return reconcile(spec, fleet, {}, box(1), {}, 5.0, renewed=renewable(fleet, {OLD.name})[1]).fleet


def states(fleet: Fleet) -> dict[str, WorkerState]:
    return {each.name.removeprefix("dynamo_"): each.state for each in fleet}


def test_the_old_one_stays_until_the_new_one_is_ready_and_then_leaves_with_the_reason() -> None:
    begun = after((OLD,))
    assert states(begun) == {"Frontend": READY, "Frontend_1": STARTING}
    assert after(begun) == begun
    old, new = after((OLD, NEW))
    assert (old.state, old.reason, new.state) == (DRAINING, OPERATOR_RESTART, READY)


def test_of_two_only_the_named_one_is_replaced() -> None:
    begun = after((OLD, NEW), workers=2)
    assert states(begun) == {"Frontend": READY, "Frontend_1": READY, "Frontend_2": STARTING}
    ready = (*begun[:2], replace(begun[2], state=READY))
    assert states(after(ready, workers=2)) == {"Frontend": DRAINING, "Frontend_1": READY, "Frontend_2": READY}


@pytest.mark.parametrize("state", [BACKOFF, FAILED])
def test_when_the_new_one_crashes_the_old_one_stays_and_the_new_one_is_forgotten(state: WorkerState) -> None:
    fleet = (OLD, replace(NEW, state=state))
    assert renewable(fleet, {OLD.name}) == (set(), set())
    assert states(after(fleet)) == {"Frontend": READY}


@pytest.mark.parametrize(
    "old",
    [
        worker("VllmWorker", gpus=(0,)),
        replace(OLD, state=STARTING),
        Worker("dynamo_Planner", "Planner", Role.PLANNER, READY),
    ],
    ids=["it holds a GPU", "it is not ready", "two planners would decide"],
)
def test_others_leave_at_once(old: Worker) -> None:
    assert renewable((old,), {old.name, "dynamo_nobody"}) == ({old.name}, set())


WHY = "reserved by alice until noon"
RESERVED = {1: WHY}


def after_reserving(fleet: Fleet, wanted: int = 2, gpus: int = 3) -> Reconciled:
    desired = {"VllmWorker": wanted}
    return reconcile(graph(decode()), fleet, desired, box(gpus), RESERVED, 5.0, reserved=RESERVED)


def states_by_name(found: Reconciled) -> dict[str, str]:
    return {each.name.removeprefix("dynamo_"): each.state.value for each in found.fleet}


BOTH = (worker("VllmWorker", gpus=(0,)), worker("VllmWorker_1", gpus=(1,)))


def test_another_is_started_first_where_a_gpu_is_free_and_nothing_leaves_before_it_is_ready() -> None:
    first = after_reserving(BOTH)
    assert states_by_name(first) == {
        "VllmWorker": "ready",
        "VllmWorker_1": "ready",
        "VllmWorker_2": "starting",
    }
    assert first.fleet[2].gpus == (2,)
    assert after_reserving(first.fleet).fleet == first.fleet


def test_the_worker_leaves_once_the_other_is_ready_and_says_why() -> None:
    leaving = after_reserving((*BOTH, worker("VllmWorker_2", READY, (2,)))).fleet[1]
    assert (leaving.state, leaving.reason) == (DRAINING, f"GPU 1 is {WHY}")


def test_it_leaves_at_once_where_no_gpu_is_free_and_nothing_is_started_on_the_reserved_one() -> None:
    found = after_reserving(BOTH, gpus=2)
    assert states_by_name(found) == {"VllmWorker": "ready", "VllmWorker_1": "draining"}
    assert "draining: dynamo_VllmWorker_1" in after_reserving(found.fleet, gpus=2).waiting["VllmWorker"]
    empty = after_reserving((BOTH[0],), gpus=2)
    assert states_by_name(empty) == {"VllmWorker": "ready"}
    assert f"GPU 1: {WHY}" in empty.waiting["VllmWorker"]


def test_it_leaves_when_the_other_has_failed_or_is_not_wanted() -> None:
    assert after_reserving((*BOTH, worker("VllmWorker_2", FAILED))).fleet[1].state is DRAINING
    assert states_by_name(after_reserving(BOTH, wanted=1)) == {
        "VllmWorker": "ready",
        "VllmWorker_1": "draining",
    }


def test_a_worker_that_answers_nothing_yet_leaves_at_once() -> None:
    starting = (BOTH[0], worker("VllmWorker_1", STARTING, (1,)))
    assert after_reserving(starting).fleet[1].state is DRAINING
    crashed = (BOTH[0], worker("VllmWorker_1", BACKOFF, (1,)))
    assert after_reserving(crashed).removed == {"dynamo_VllmWorker_1": f"GPU 1 is {WHY}"}


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


ONE = Removal("ns_VllmWorker_1", 1_700_000_000.5, "1 of 2 VllmWorker wanted")


def test_what_is_published_is_read() -> None:
    assert removals_in({REMOVALS: [ONE.to_json()]}) == (ONE,)


@pytest.mark.parametrize("listed", [None, {}, "x", 5, [5], [{}], [{**ONE.to_json(), "why": 7}]])
def test_a_removal_that_cannot_be_read_is_left_out(listed: Any) -> None:
    assert removals_in({REMOVALS: listed}) == ()
