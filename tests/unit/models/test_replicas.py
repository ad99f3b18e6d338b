"""Further workers of a model: by its requests, in free memory, and never before a model without any."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynaplan.models.model import Constraints, ModelState, ModelStatus
from dynaplan.models.rules.draft import SHRINK_AFTER_S
from dynaplan.models.rules.replicas import as_replica, replica_name, wanted_workers
from tests.unit.models.box import GIB, NOW_S, Box, gpus, in_state, model, ready, said, wanted

MANY = {"max_workers": 3, "requests_per_worker": 4}
SECOND = replica_name("a", 2)


def further(name: str = SECOND, on: int = 1, of: str = "a", **changes: object) -> ModelStatus:
    return ready(name, on, replica_of=of, **{"in_flight": 1, "last_use_s": NOW_S, **changes})


@pytest.mark.parametrize(("requests", "workers"), [(0, 1), (4, 1), (5, 2), (12, 3), (90, 3)])
def test_a_model_wants_a_worker_for_so_many_requests_each_up_to_its_most(requests: int, workers: int) -> None:
    assert wanted_workers(model(10, **MANY), requests) == workers


def test_a_further_worker_is_started_where_there_is_room() -> None:
    box = Box(gpus(16, 16), a=model(10, **MANY))
    plan = box.plan(ready("a", in_flight=5))
    assert [each.why for each in plan.actions] == ["5 requests for 1 worker; there is room"]
    assert said(plan.actions) == [f"Load {SECOND}"]
    assert plan.actions[0].devices == (1,)  # type: ignore[union-attr]
    assert box.actions(ready("a", in_flight=4)) == []
    assert said(box.actions(ready("a", in_flight=3, waiting=2))) == [f"Load {SECOND}"]


def test_a_model_of_one_worker_at_most_gets_no_other() -> None:
    assert Box(gpus(40), a=model(10)).actions(ready("a", in_flight=500)) == []


def test_one_that_loads_counts_and_a_third_is_started_for_yet_more() -> None:
    box = Box(gpus(40), a=model(10, **MANY))
    loading = in_state(SECOND, ModelState.LOADING, replica_of="a")
    assert box.actions(ready("a", in_flight=8), loading) == []
    assert said(box.actions(ready("a", in_flight=9), loading)) == ["Load a (worker 3)"]


def test_without_room_it_is_told_and_no_model_leaves_for_it() -> None:
    box = Box(gpus(16), a=model(10, **MANY), b=model(5))
    plan = box.plan(ready("a", in_flight=9), ready("b", last_use_s=0))
    assert plan.actions == ()
    assert plan.trail[-1].why == "9 requests for 1 worker, and there is no room"


def test_it_waits_for_memory_that_is_being_given_back() -> None:
    box = Box(gpus(20), a=model(10, **MANY), b=model(10))
    plan = box.plan(ready("a", in_flight=9), in_state("b", ModelState.DRAINING))
    assert plan.actions == ()
    assert plan.trail[-1].why == "9 requests for 1 worker; waits for the memory of b"


def test_one_that_failed_is_tried_again_in_its_time() -> None:
    box = Box(gpus(40), a=model(10, **MANY))
    failed = ModelStatus(SECOND, ModelState.FAILED, replica_of="a", retry_at_s=NOW_S + 5)
    assert box.actions(ready("a", in_flight=9), failed) == []
    assert said(box.actions(ready("a", in_flight=9), replace(failed, retry_at_s=NOW_S))) == [f"Load {SECOND}"]


def test_what_may_not_be_beside_the_model_keeps_further_workers_away() -> None:
    apart = Constraints(together=(frozenset("a"), frozenset("b")))
    box = Box(gpus(40), apart, a=model(10, **MANY), b=model(10))
    plan = box.plan(ready("a", in_flight=9), ready("b"))
    assert plan.actions == ()
    assert "may not be beside it" in plan.trail[-1].why
    assert said(box.actions(ready("a", in_flight=9))) == [f"Load {SECOND}"]
    leaving = box.actions(ready("a", in_flight=0), further(in_flight=0), wanted("b"))
    assert said(leaving) == ["Unload a", f"Unload {SECOND}"] or said(leaving) == [
        f"Unload {SECOND}",
        "Unload a",
    ]


def test_it_leaves_at_once_for_a_model_that_has_no_worker_and_the_model_goes_on() -> None:
    box = Box(gpus(10, 10), a=model(10, is_pinned=True, **MANY), b=model(10))
    plan = box.plan(ready("a", in_flight=9), further(), wanted("b"))
    assert said(plan.actions) == [f"Unload {SECOND}"]
    assert plan.actions[0].why == "makes room for b: other workers of a go on"


def test_an_idle_model_leaves_before_a_further_worker_that_answers() -> None:
    box = Box(gpus(10, 10, 10), a=model(10, **MANY), b=model(10), c=model(10))
    assert said(box.actions(ready("a", in_flight=9), further(), ready("c", 2), wanted("b"))) == ["Unload c"]


def test_it_leaves_when_requests_have_not_wanted_it_for_a_while() -> None:
    box = Box(gpus(10, 10), a=model(10, ttl_s=0, **MANY))
    rests = further(in_flight=0, last_use_s=NOW_S - SHRINK_AFTER_S + 1)
    plan = box.plan(ready("a"), rests)
    assert (plan.actions, plan.next_at_s) == ((), NOW_S + 1)
    assert said(box.actions(ready("a"), rests, now_s=NOW_S + 1)) == [f"Unload {SECOND}"]


def test_what_has_left_the_configuration_goes_with_its_further_workers() -> None:
    assert said(Box(gpus(20)).actions(ready("a"), further())) == ["Unload a", f"Unload {SECOND}"]


def test_memory_passes_to_the_model_that_has_more_to_do_for_each_worker() -> None:
    box = Box(gpus(10, 10, 10), a=model(10, **MANY), b=model(10, **MANY))
    others = further("b (worker 2)", 2, of="b")
    plan = box.plan(ready("a", in_flight=9), ready("b", 1, in_flight=8), others)
    assert said(plan.actions) == ["Unload b (worker 2)"]
    assert plan.actions[0].why == f"makes room for {SECOND}: b needs it less"
    told = [each.why for each in plan.trail if each.model == SECOND]
    assert told == ["9 requests for 1 worker; waits for the memory of b (worker 2)"]


def test_it_does_not_pass_where_the_other_would_then_lack_it_as_much_and_so_not_back() -> None:
    box = Box(gpus(10, 10, 10), a=model(10, **MANY), b=model(10, **MANY))
    others = further("b (worker 2)", 2, of="b")
    assert box.actions(ready("a", in_flight=8), ready("b", 1, in_flight=8), others) == []


def test_priority_weighs_what_is_lost() -> None:
    box = Box(gpus(10, 10, 10), a=model(10, priority=2, **MANY), b=model(10, **MANY))
    others = further("b (worker 2)", 2, of="b")
    assert said(box.actions(ready("a", in_flight=5), ready("b", 1, in_flight=8), others)) == [
        "Unload b (worker 2)"
    ]


def test_a_model_whose_turn_is_over_does_not_grow() -> None:
    box = Box(gpus(10, 5), a=model(10, **MANY), b=model(10))
    plan = box.plan(ready("a", in_flight=9), wanted("b", for_s=1))
    assert [each.model for each in plan.trail] == ["b"]


def test_a_further_worker_is_asked_for_nothing_of_its_own() -> None:
    first = ready("a", in_flight=9, waiting=3, load_asked_s=1.0, keep_alive_s=5.0)
    made = as_replica(replace(first, name="x", placed_on=(1,)), SECOND, first, is_wanted=True)
    assert (made.name, made.replica_of, made.in_flight, made.waiting) == (SECOND, "a", 1, 0)
    assert (made.load_asked_s, made.keep_alive_s, made.placed_on) == (None, None, (1,))
    assert as_replica(first, SECOND, first, is_wanted=False).in_flight == 0


def test_what_a_worker_that_has_gone_still_holds_is_not_given_away() -> None:
    box = Box(gpus(20), a=model(10, **MANY))
    gone = in_state("a (gone)", ModelState.DRAINING, replica_of="a", held_bytes={0: 10 * GIB})
    assert box.actions(ready("a", in_flight=9), gone) == []


def test_a_planner_says_how_many_workers_its_model_wants_whatever_its_requests_are() -> None:
    box = Box(gpus(16, 16), a=model(10, **MANY))
    plan = box.plan(ready("a", in_flight=1, planned_workers=2))
    assert said(plan.actions) == [f"Load {SECOND}"]
    assert plan.actions[0].why == "its planner wants 2 workers, and it has 1; there is room"
    assert box.actions(ready("a", in_flight=90, planned_workers=1)) == []


def test_what_a_planner_does_not_want_any_more_leaves_at_once_the_last_first() -> None:
    box = Box(gpus(40), a=model(10, **MANY))
    third = further(replica_name("a", 3), 0)
    plan = box.plan(ready("a", in_flight=90, planned_workers=2), further(on=0), third)
    assert said(plan.actions) == ["Unload a (worker 3)"]
    assert plan.actions[0].why == "its planner wants 2 workers"


def test_a_planner_keeps_no_model_that_is_idle_beyond_its_ttl_and_lets_it_not_grow() -> None:
    box = Box(gpus(16, 16), a=model(10, ttl_s=50, **MANY))
    assert said(box.actions(ready("a", planned_workers=2))) == ["Unload a"]
    both = box.actions(ready("a", planned_workers=1), further(in_flight=0))
    assert said(both) == [f"Unload {SECOND}", "Unload a"]


def test_between_planners_memory_passes_to_the_model_that_lacks_more_and_not_back() -> None:
    box = Box(gpus(16, 16, 16), a=model(10, **MANY), b=model(10, **MANY))
    a, more = ready("a", in_flight=1, planned_workers=2), further()
    lacking = box.plan(a, more, ready("b", 2, in_flight=1, planned_workers=3))
    assert said(lacking.actions) == [f"Unload {SECOND}"]
    assert box.actions(a, more, ready("b", 2, in_flight=1, planned_workers=2)) == []
    assert box.actions(replace(a, planned_workers=3), more, ready("b", 2, planned_workers=3)) == []
