"""Prefill workers of a model: they join it where there is room, and leave with it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynaplan.config.settings.models import prefill_pool_name
from dynaplan.models.model import Constraints, Load, ModelPolicy, ModelState, ModelStatus
from dynaplan.models.rules.replicas import as_replica, replica_name
from tests.unit.models.box import NOW_S, Box, gpus, in_state, model, ready, said, wanted

PREFILL = prefill_pool_name("a")
SECOND = replica_name(PREFILL, 2)


def pair(gb: float = 10, prefill_gb: float = 5, **changes: object) -> ModelPolicy:
    """A disaggregated model with one prefill worker; ``changes`` are those of the prefill workers."""
    return model(gb, prefill=model(prefill_gb, **changes), max_workers=3, requests_per_worker=4)


def prefill(name: str = PREFILL, on: int = 0, of: str = "a", **changes: object) -> ModelStatus:
    return ready(name, on, replica_of=of, is_prefill=True, **{"last_use_s": NOW_S, **changes})


def test_a_loaded_model_gets_a_prefill_worker_with_the_memory_that_one_needs() -> None:
    plan = Box(gpus(16), a=pair()).plan(ready("a"))
    assert plan.actions == (Load(PREFILL, (0,), 5 * 2**30, "a has no prefill worker; there is room"),)
    assert Box(gpus(16), a=pair()).actions(ready("a"), prefill()) == []


def test_it_starts_along_with_its_model_or_while_that_still_loads() -> None:
    box = Box(gpus(16), a=pair())
    assert box.actions() == []
    assert said(box.actions(wanted("a"))) == ["Load a", f"Load {PREFILL}"]
    loading = in_state("a", ModelState.LOADING, waiting=1, oldest_arrival_s=NOW_S)
    assert said(box.actions(loading)) == [f"Load {PREFILL}"]


def test_a_model_is_ready_without_it_where_there_is_no_room_and_others_stay() -> None:
    plan = Box(gpus(12, 4), a=pair(), b=model(4)).plan(ready("a"), ready("b", 1, last_use_s=0))
    assert plan.actions == ()
    assert plan.trail[-1].why == "a has no prefill worker, and there is no room"


@pytest.mark.parametrize("state", [ModelState.DRAINING, ModelState.UNLOADED, ModelState.FAILED])
def test_it_leaves_when_its_model_has_no_decode_worker_any_more(state: ModelState) -> None:
    gone = in_state("a", state, placed_on=(), retry_at_s=NOW_S + 9)
    plan = Box(gpus(40), a=pair()).plan(gone, prefill())
    assert said(plan.actions) == [f"Unload {PREFILL}"]
    assert plan.actions[0].why == "a has no decode worker any more"


def test_it_leaves_in_the_plan_in_which_its_model_does_idle_or_by_order() -> None:
    box = Box(gpus(40), a=replace(pair(), ttl_s=50))
    assert said(box.actions(ready("a"), prefill())) == ["Unload a", f"Unload {PREFILL}"]
    put_away = ready("a", unload_asked=True)
    assert said(box.actions(put_away, prefill())) == ["Unload a", f"Unload {PREFILL}"]
    starting = in_state(PREFILL, ModelState.LOADING, replica_of="a", is_prefill=True)
    assert said(box.actions(put_away, starting)) == ["Unload a", f"Unload {PREFILL}"]


def test_it_stays_while_a_decode_worker_is_left_or_the_crashed_one_comes_again() -> None:
    box = Box(gpus(60), a=pair())
    again = in_state("a", ModelState.LOADING, in_flight=1)
    assert box.actions(again, prefill()) == []
    failed = ModelStatus("a", ModelState.FAILED, waiting=1, oldest_arrival_s=NOW_S, retry_at_s=NOW_S)
    assert said(box.actions(failed, prefill())) == ["Load a"]
    assert said(Box(gpus(12), a=pair()).actions(wanted("a"))) == ["Load a"], "where both do not fit"


def test_it_leaves_at_once_for_a_model_that_has_no_worker_and_its_own_goes_on() -> None:
    box = Box(gpus(15), a=pair(), b=model(5))
    plan = box.plan(ready("a", in_flight=3, last_use_s=NOW_S), prefill(in_flight=1), wanted("b"))
    assert said(plan.actions) == [f"Unload {PREFILL}"]
    assert plan.actions[0].why == "makes room for b: a computes its prompts without it"


def test_of_an_idle_model_it_leaves_before_the_decode_worker_and_both_where_both_are_needed() -> None:
    box = Box(gpus(15), a=pair(), b=model(5), c=model(12))
    assert said(box.actions(ready("a"), prefill(), wanted("b"))) == [f"Unload {PREFILL}"]
    both = said(box.actions(ready("a"), prefill(), wanted("c")))
    assert both == [f"Unload {PREFILL}", "Unload a"]


def test_a_model_that_was_idle_for_longer_leaves_before_it() -> None:
    box = Box(gpus(25), a=pair(), b=model(5), c=model(10))
    idle = ready("c", last_use_s=NOW_S - 300)
    assert said(box.actions(ready("a"), prefill(), idle, wanted("b"))) == ["Unload c"]


def test_the_first_one_takes_the_memory_of_a_second_worker_and_never_that_of_another_first_one() -> None:
    box = Box(gpus(15), a=pair(), b=pair(5))
    second = ready(replica_name("b", 2), replica_of="b", in_flight=1, last_use_s=NOW_S)
    busy = ready("b", in_flight=9, placed_on=(9,))
    its_own = prefill(prefill_pool_name("b"), 9, "b", in_flight=1)
    plan = box.plan(ready("a", in_flight=1), busy, second, its_own)
    assert f"Unload {replica_name('b', 2)}" in said(plan.actions)
    first = prefill(prefill_pool_name("b"), 0, "b", in_flight=1)
    assert box.actions(ready("a", in_flight=1), ready("b", 9), first) == []


def test_further_ones_come_by_requests_up_to_their_most_and_leave_when_unwanted_for_a_while() -> None:
    box = Box(gpus(40), a=pair(max_workers=2, requests_per_worker=8))
    plan = box.plan(ready("a", in_flight=9, planned_workers=1), prefill())
    assert said(plan.actions) == [f"Load {SECOND}"]
    assert plan.actions[0].why == "9 requests for 1 prefill worker; there is room"
    rests = prefill(SECOND, in_flight=0, last_use_s=NOW_S - 60)
    assert said(box.actions(ready("a"), prefill(), rests)) == [f"Unload {SECOND}"]


def test_a_planner_says_how_many_of_each_are_wanted() -> None:
    box = Box(gpus(60), a=pair(max_workers=3))
    planned = ready("a", planned_workers=1, planned_prefill_workers=2)
    plan = box.plan(planned, prefill())
    assert said(plan.actions) == [f"Load {SECOND}"]
    assert plan.actions[0].why == "its planner wants 2 prefill workers, and it has 1; there is room"
    fewer = box.plan(replace(planned, planned_prefill_workers=1), prefill(), prefill(SECOND))
    assert said(fewer.actions) == [f"Unload {SECOND}"]
    assert fewer.actions[0].why == "its planner wants 1 prefill worker"
    none = box.plan(replace(planned, planned_prefill_workers=0), prefill())
    assert none.actions == (), "one is kept while its model is loaded"


def test_one_that_failed_is_tried_again_in_its_time() -> None:
    box = Box(gpus(40), a=pair())
    failed = ModelStatus(PREFILL, ModelState.FAILED, replica_of="a", is_prefill=True, retry_at_s=NOW_S + 5)
    assert box.actions(ready("a"), failed) == []
    assert said(box.actions(ready("a"), replace(failed, retry_at_s=NOW_S))) == [f"Load {PREFILL}"]


def test_what_may_not_be_beside_the_model_keeps_its_prefill_workers_away() -> None:
    apart = Constraints(together=(frozenset("a"), frozenset("b")))
    plan = Box(gpus(40), apart, a=pair(), b=model(10)).plan(ready("a"), ready("b"))
    assert plan.actions == ()
    assert "may not be beside it" in plan.trail[-1].why


def test_a_model_that_leaves_the_configuration_takes_its_prefill_workers_along() -> None:
    assert said(Box(gpus(20)).actions(ready("a"), prefill())) == ["Unload a", f"Unload {PREFILL}"]


def test_a_pinned_model_keeps_its_place_and_its_prefill_worker_gives_way() -> None:
    box = Box(gpus(15), a=replace(pair(), is_pinned=True), b=model(5))
    assert said(box.actions(ready("a"), prefill(), wanted("b"))) == [f"Unload {PREFILL}"]


def test_a_prefill_worker_is_told_from_a_decode_worker() -> None:
    first = ready("a", in_flight=9)
    made = as_replica(first, PREFILL, first, is_wanted=True, is_prefill=True)
    assert (made.name, made.replica_of, made.is_prefill) == (PREFILL, "a", True)
