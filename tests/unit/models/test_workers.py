"""Models as the fleet has them: a model is in its worker's state, and a plan becomes workers and places."""

from __future__ import annotations

import math

import pytest

from dynaplan.contract.model_keys import NO_ORDER, ModelDemand, ModelOrder
from dynaplan.fleet.rules.reconcile import reconcile
from dynaplan.graph.lifecycle import Role, Worker, WorkerState
from dynaplan.graph.model import GraphSpec, ServiceSpec
from dynaplan.models.model import HOST, NOTHING_LEARNT, Learnt, Load, ModelState, Plan, Unload
from dynaplan.models.workers import (
    Moment,
    desired_models,
    model_status,
    workers_of,
)
from tests.unit.fleet.rules.graphs import box

NOW = Moment(1000.0, 1_800_000_000.0)
GRAPH = GraphSpec(
    "dynaplan.components:Frontend",
    "/srv",
    "ns",
    tuple(ServiceSpec(name, Role.DECODE, gpus=1, model=name, shares_memory=True) for name in ("a", "b")),
)
COMPONENTS = {"a": "a", "b": "b"}


def worker(component: str, state: WorkerState, **fields: object) -> Worker:
    made = Worker(f"ns_{component}", component, Role.DECODE, state, gpus=(0,), memory_bytes=5, since_s=900.0)
    return Worker(**{**vars(made), **fields})


@pytest.mark.parametrize(
    ("state", "model"),
    [
        (WorkerState.STARTING, ModelState.LOADING),
        (WorkerState.BACKOFF, ModelState.LOADING),
        (WorkerState.READY, ModelState.READY),
        (WorkerState.DRAINING, ModelState.DRAINING),
        (WorkerState.FAILED, ModelState.FAILED),
    ],
)
def test_a_model_is_in_the_state_of_its_worker(state: WorkerState, model: ModelState) -> None:
    assert model_status("a", worker("a", state), None, NO_ORDER, NOTHING_LEARNT, NOW).state is model


def test_a_worker_that_stays_decides_before_one_that_leaves() -> None:
    fleet = [worker("a", WorkerState.DRAINING), worker("a", WorkerState.STARTING, name="ns_a_1")]
    assert [each.name for each in workers_of("a", fleet)] == ["ns_a_1", "ns_a"]
    assert workers_of("b", fleet) == []


def test_the_wall_clock_of_frontends_becomes_the_clock_of_workers() -> None:
    demand = ModelDemand(2, NOW.unix_s - 7, 1, NOW.unix_s - 3, 60.0)
    status = model_status("a", None, demand, NO_ORDER, NOTHING_LEARNT, NOW)
    assert (status.waiting, status.oldest_arrival_s, status.in_flight, status.last_use_s) == (
        2,
        993.0,
        1,
        997.0,
    )
    assert model_status("a", None, None, NO_ORDER, NOTHING_LEARNT, NOW).oldest_arrival_s == math.inf


def test_an_order_to_load_is_done_once_the_model_was_ready_or_it_was_taken_back() -> None:
    asked = ModelOrder(load_unix_s=NOW.unix_s - 5)

    def asked_s(order: ModelOrder, learnt: Learnt = NOTHING_LEARNT) -> float | None:
        return model_status("a", None, None, order, learnt, NOW).load_asked_s

    assert asked_s(asked) == 995.0
    assert asked_s(asked, Learnt(ready_unix_s=NOW.unix_s - 1)) is None
    assert asked_s(ModelOrder(NOW.unix_s - 5, NOW.unix_s - 1)) is None


def test_an_order_to_unload_is_for_the_worker_that_was_there() -> None:
    order = ModelOrder(unload_unix_s=NOW.unix_s - 50)

    def is_asked(since_s: float) -> bool:
        ready = worker("a", WorkerState.READY, since_s=since_s)
        return model_status("a", ready, None, order, NOTHING_LEARNT, NOW).unload_asked

    assert is_asked(900.0)
    assert not is_asked(960.0)


def test_a_plan_places_workers_and_without_an_action_a_model_stays() -> None:
    fleet = (worker("a", WorkerState.READY),)
    assert desired_models(Plan(), COMPONENTS, fleet).workers == {"a": 1, "b": 0}
    made = desired_models(Plan((Unload("a", "idle"), Load("b", (0,), 7, "asked"))), COMPONENTS, fleet)
    assert made.workers == {"a": 0, "b": 1}
    assert made.placements == {"b": Load("b", (0,), 7, "asked")}
    host = desired_models(Plan((Load("b", (HOST,), 7, "asked"),)), COMPONENTS, ())
    assert host.placements["b"].gpus == ()
    assert made.without({0}).placements == {}


def test_two_models_share_a_gpu_and_the_reason_is_written_on_each() -> None:
    fleet = (worker("a", WorkerState.READY),)
    models = desired_models(Plan((Load("b", (0,), 7, "1 request waiting"),)), COMPONENTS, fleet)
    after = reconcile(GRAPH, fleet, {}, box(1), {}, 1000.0, models=models)
    placed = {each.name: (each.gpus, each.memory_bytes, each.reason) for each in after.fleet}
    assert placed == {"ns_a": ((0,), 5, ""), "ns_b": ((0,), 7, "1 request waiting")}
    models = desired_models(Plan((Unload("a", "idle for 9 s"),)), COMPONENTS, after.fleet)
    after = reconcile(GRAPH, after.fleet, {}, box(1), {}, 1001.0, models=models)
    assert {each.name: each.state.value for each in after.fleet} == {"ns_a": "draining", "ns_b": "starting"}
    assert next(each.reason for each in after.fleet if each.name == "ns_a") == "idle for 9 s"


def test_a_failed_model_is_tried_again_where_it_is_placed_and_not_by_itself() -> None:
    failed = worker("a", WorkerState.FAILED, gpus=(), memory_bytes=0, retry_at_s=950.0)
    waits = desired_models(Plan(), COMPONENTS, (failed,))
    assert reconcile(GRAPH, (failed,), {}, box(1), {}, 1000.0, True, models=waits).fleet == (failed,)
    again = desired_models(Plan((Load("a", (0,), 5, "tried again"),)), COMPONENTS, (failed,))
    (tried,) = reconcile(GRAPH, (failed,), {}, box(1), {}, 1000.0, models=again).fleet
    assert (tried.state, tried.gpus) == (WorkerState.STARTING, (0,))


def test_a_further_worker_is_started_beside_the_first_and_the_one_that_the_plan_names_leaves() -> None:
    first, second = worker("a", WorkerState.READY), worker("a", WorkerState.READY, name="ns_a_1", gpus=(1,))
    models = desired_models(Plan((Load("a (worker 2)", (1,), 5, "busy"),)), COMPONENTS, (first,))
    assert models.workers["a"] == 2
    after = reconcile(GRAPH, (first,), {}, box(2), {}, 1.0, models=models)
    assert [(each.name, each.gpus, each.memory_bytes) for each in after.fleet] == [
        ("ns_a", (0,), 5),
        ("ns_a_1", (1,), 5),
    ]
    assert reconcile(GRAPH, after.fleet, {}, box(2), {}, 1.0, models=models).fleet == after.fleet
    gone = desired_models(Plan((Unload("a (worker 2)", "not needed"),)), COMPONENTS, (first, second))
    left = reconcile(GRAPH, (first, second), {}, box(2), {}, 1.0, models=gone).fleet
    assert [each.state for each in left] == [WorkerState.READY, WorkerState.DRAINING]
    assert left[1].reason == "not needed"
    both = (Unload("a", "makes room"),)
    assert desired_models(Plan(both), COMPONENTS, (first, second)).leaving == {"ns_a": "makes room"}


def test_a_ready_worker_decides_the_models_state_before_one_that_is_started_again() -> None:
    fleet = [worker("a", WorkerState.BACKOFF), worker("a", WorkerState.READY, name="ns_a_1")]
    assert [each.name for each in workers_of("a", fleet)] == ["ns_a_1", "ns_a"]


def test_prefill_workers_are_a_pool_of_their_own_service_and_number_from_one() -> None:
    components = {"a": "a", "a (prefill)": "a-prefill"}
    first = worker("a", WorkerState.READY)
    made = desired_models(Plan((Load("a (prefill)", (1,), 3, "asked"),)), components, (first,))
    assert made.workers == {"a": 1, "a-prefill": 1}
    assert made.placements == {"a-prefill": Load("a (prefill)", (1,), 3, "asked")}
    one = worker("a-prefill", WorkerState.READY)
    more = desired_models(Plan((Load("a (prefill) (worker 2)", (0,), 3, "x"),)), components, (first, one))
    assert more.workers == {"a": 1, "a-prefill": 2}
    both = Plan((Unload("a", "idle"), Unload("a (prefill)", "it has no decode worker")))
    left = desired_models(both, components, (first, one))
    assert left.leaving == {"ns_a": "idle", "ns_a-prefill": "it has no decode worker"}
