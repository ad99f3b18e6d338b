"""Frontends that are replaced on a person's word: another is ready before the old one leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynaplan.fleet.rules.reconcile import OPERATOR_RESTART, Fleet, reconcile, renewable
from dynaplan.graph.lifecycle import Role, Worker, WorkerState
from dynaplan.graph.model import ServiceSpec
from tests.unit.fleet.rules.graphs import BACKOFF, DRAINING, FAILED, READY, STARTING, box, graph, worker

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
