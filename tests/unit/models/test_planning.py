from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import pytest

from dynaplan.models.model import (
    HOST,
    Constraints,
    Device,
    Learnt,
    Load,
    ModelPolicies,
    ModelPolicy,
    ModelsObservation,
    ModelState,
    ModelStatus,
    Refuse,
    Sleep,
    SleepLevel,
    Unload,
    Wake,
)
from dynaplan.models.rules.planning import plan
from tests.unit.models.box import GIB, NOW_S, Box, gpus, in_state, model, ready, said, wanted


def test_nothing_is_loaded_that_nobody_wants() -> None:
    assert Box(gpus(24), a=model(10)).actions() == []


def test_a_wanted_model_is_loaded_where_there_is_room_and_least_is_left() -> None:
    (load,) = Box(gpus(24, 12, 40), a=model(10)).actions(wanted("a"))
    assert load == Load("a", (1,), 10 * GIB, "1 request waiting; there is room")


def test_two_models_are_not_placed_on_the_same_memory_in_one_plan() -> None:
    box = Box(gpus(16, 16), a=model(10), b=model(10), c=model(10))
    loads = [each for each in box.actions(wanted("a"), wanted("b"), wanted("c")) if isinstance(each, Load)]
    assert sorted(each.devices for each in loads) == [(0,), (1,)]


def test_a_model_that_loads_counts_with_all_that_it_will_need() -> None:
    loading = in_state("a", ModelState.LOADING, held_bytes={0: GIB}, waiting=1, oldest_arrival_s=NOW_S)
    assert Box(gpus(16), a=model(10), b=model(10)).actions(loading, wanted("b")) == []


def test_many_callers_make_one_load() -> None:
    assert said(Box(gpus(24), a=model(10)).actions(wanted("a", requests=50))) == ["Load a"]
    loading = in_state("a", ModelState.LOADING, waiting=50, oldest_arrival_s=NOW_S)
    assert Box(gpus(24), a=model(10)).actions(loading) == []


def test_a_worker_of_two_gpus_gets_two() -> None:
    (load,) = Box(gpus(24, 8, 24), a=model(10, devices=2)).actions(wanted("a"))
    assert isinstance(load, Load)
    assert load.devices == (0, 2)


def test_a_model_is_loaded_into_the_hosts_memory_on_a_box_without_gpus() -> None:
    (load,) = Box((Device(HOST, 64 * GIB),), a=model(10, devices=0)).actions(wanted("a"))
    assert isinstance(load, Load)
    assert load.devices == (HOST,)


# Who leaves


def test_an_idle_model_leaves_at_once_for_one_that_is_wanted() -> None:
    box = Box(gpus(16), a=model(10), b=model(10))
    (action,) = box.actions(ready("a"), wanted("b"))
    assert action == Unload("a", "makes room for b: idle for 100 s; a load takes 10 s, priority 1")


def test_the_next_model_is_loaded_only_when_the_memory_is_free() -> None:
    box = Box(gpus(16), a=model(10), b=model(10))
    planned = box.plan(in_state("a", ModelState.DRAINING), wanted("b"))
    assert planned.actions == ()
    assert [step.why for step in planned.trail] == ["waits until a has given its memory back"]
    late = Box(gpus(16, foreign=(10,)), a=model(10), b=model(10))
    assert "Load b" not in said(late.actions(wanted("b")))
    assert said(box.actions(wanted("b"))) == ["Load b"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"last_use_s": NOW_S - 300}, "b"),
        ({"learnt": Learnt(load_s=2.0)}, "b"),
        ({}, "a"),
    ],
    ids=["longest idle", "quickest to have back", "the first of equals"],
)
def test_of_idle_models_the_one_that_is_worth_least_leaves(changes: dict[str, Any], expected: str) -> None:
    box = Box(gpus(24), a=model(10), b=model(10), c=model(10))
    assert said(box.actions(ready("a"), ready("b", **changes), wanted("c"))) == [f"Unload {expected}"]


def test_a_higher_priority_stays() -> None:
    box = Box(gpus(24), a=model(10, priority=2.0), b=model(10), c=model(10))
    older = ready("a", last_use_s=NOW_S - 150)
    assert said(box.actions(older, ready("b"), wanted("c"))) == ["Unload b"]


def test_as_few_leave_as_make_room() -> None:
    """LocalAI PR 9527: the small embedder went although that made no room."""
    box = Box(gpus(24), small=model(1), chat=model(13), big=model(20))
    small = ready("small", last_use_s=NOW_S - 400)
    assert said(box.actions(small, ready("chat"), wanted("big"))) == ["Unload chat"]


def test_nobody_leaves_one_gpu_in_vain_when_another_leaves_both() -> None:
    box = Box(gpus(10, 8), small=model(4), wide=model(6, devices=2), c=model(4, devices=2))
    small = ready("small", last_use_s=NOW_S - 400)
    assert said(box.actions(small, ready("wide", on=(0, 1)), wanted("c"))) == ["Unload wide"]


def test_only_who_is_on_the_right_gpu_leaves() -> None:
    box = Box(gpus(24, 8), a=model(20), b=model(6), c=model(10))
    other = ready("b", on=1, last_use_s=NOW_S - 400)
    assert said(box.actions(ready("a"), other, wanted("c"))) == ["Unload a"]


@pytest.mark.parametrize(
    ("settings", "status"),
    [
        (model(10, is_pinned=True), ready("a")),
        (model(10, min_stay_s=600.0), ready("a")),
        (model(10), ready("a", in_flight=1)),
        (model(10), ready("a", since_s=NOW_S - 1, waiting=3, oldest_arrival_s=NOW_S - 20)),
        (model(10), in_state("a", ModelState.LOADING, waiting=1, oldest_arrival_s=NOW_S)),
    ],
    ids=["pinned", "min-stay", "answers", "has not admitted who waited", "loads for somebody"],
)
def test_these_do_not_leave_for_a_fresh_request(settings: ModelPolicy, status: ModelStatus) -> None:
    actions = Box(gpus(16), a=settings, b=model(10)).actions(status, wanted("b"))
    assert [each for each in actions if not isinstance(each, Refuse)] == []


def test_a_load_that_nobody_waits_for_is_given_up_for_one_that_is_wanted() -> None:
    box = Box(gpus(16), a=model(10), b=model(10))
    abandoned = in_state("a", ModelState.LOADING)
    assert said(box.actions(abandoned, wanted("b"))) == ["Unload a"]
    assert box.actions(abandoned) == []


def test_a_load_past_its_timeout_that_nobody_waits_for_ends_and_one_that_is_waited_for_goes_on() -> None:
    box = Box(gpus(80), a=model(50, load_timeout_s=60.0))
    loading = in_state("a", ModelState.LOADING, since_s=NOW_S - 60)
    (action,) = box.actions(loading)
    assert said([action]) == ["Unload a"]
    assert "loading for 60 s (load-timeout), and nobody waits for it" in action.why
    assert box.actions(replace(loading, waiting=1, oldest_arrival_s=NOW_S)) == []
    assert box.actions(replace(loading, load_asked_s=NOW_S - 60)) == []
    assert box.plan(replace(loading, since_s=NOW_S - 50)).next_at_s == NOW_S + 10


def test_a_load_that_does_not_end_makes_room_for_a_model_that_is_overdue() -> None:
    box = Box(gpus(16), a=model(10, load_timeout_s=60.0), b=model(10))
    hung = in_state("a", ModelState.LOADING, since_s=NOW_S - 60, waiting=1, oldest_arrival_s=NOW_S - 1)
    assert box.plan(hung).next_at_s == NOW_S + 59
    assert box.actions(hung, wanted("b")) == []
    assert said(box.actions(hung, wanted("b", for_s=30))) == ["Unload a"]
    young = in_state("a", ModelState.LOADING, since_s=NOW_S - 59, waiting=1, oldest_arrival_s=NOW_S)
    planned = box.plan(young, wanted("b", for_s=30))
    assert (planned.actions, planned.next_at_s) == ((), NOW_S + 1)


# Turns


def test_a_busy_model_leaves_when_another_has_waited_for_three_of_its_load_times() -> None:
    box = Box(gpus(16), a=model(10), b=model(10))
    busy = ready("a", in_flight=2)
    before = box.plan(busy, wanted("b", for_s=29))
    assert before.actions == ()
    assert before.next_at_s == NOW_S + 1
    assert before.trail[-1].why == "a answers 2 requests; its turn comes in 1 s"
    (action,) = box.actions(busy, wanted("b", for_s=30))
    assert action == Unload(
        "a", "makes room for b: answers 2 requests, but b has waited for 30 s (max-swap-wait)"
    )


def test_an_idle_model_leaves_before_a_busy_one() -> None:
    box = Box(gpus(24), a=model(10), b=model(10), c=model(10))
    assert said(box.actions(ready("a", in_flight=1), ready("b"), wanted("c", for_s=99))) == ["Unload b"]


def test_whoever_waited_for_a_load_is_admitted_before_the_model_leaves() -> None:
    box = Box(gpus(16), a=model(10), b=model(10))
    fresh = ready("a", since_s=NOW_S - 1, waiting=3, oldest_arrival_s=NOW_S - 20)
    assert box.actions(fresh, wanted("b", for_s=99)) == []
    assert said(box.actions(ready("a", since_s=NOW_S - 1, in_flight=3), wanted("b", for_s=99))) == [
        "Unload a"
    ]


def test_the_earliest_deadline_is_served_first() -> None:
    box = Box(gpus(16), a=model(10), b=model(10), c=model(10, estimate_load_s=2.0))
    for statuses, first in (
        ((wanted("b", for_s=5), wanted("a", for_s=4)), "b"),
        ((wanted("b", for_s=5), wanted("c", for_s=0)), "c"),
        ((wanted("b", for_s=25), wanted("c", for_s=0)), "b"),
    ):
        assert said(box.actions(*statuses)) == [f"Load {first}"]


def test_a_later_demand_does_not_move_into_the_room_that_an_earlier_one_waits_for() -> None:
    box = Box(gpus(16), a=model(10), b=model(12), c=model(6))
    planned = box.plan(ready("a", in_flight=1), wanted("b", for_s=29), wanted("c"))
    assert planned.actions == ()
    assert planned.trail[-1].why == "waits behind b"


def test_a_small_model_that_fits_beside_both_is_loaded_at_once() -> None:
    box = Box(gpus(16), a=model(10), b=model(12), c=model(3))
    assert said(box.actions(ready("a", in_flight=1), wanted("b", for_s=29), wanted("c"))) == ["Load c"]


def test_a_load_that_is_over_before_the_turn_comes_goes_ahead() -> None:
    box = Box(gpus(16), a=model(10), b=model(12), c=model(6, estimate_load_s=5.0, max_swap_wait_s=99.0))
    assert said(box.actions(ready("a", in_flight=1), wanted("b", for_s=10), wanted("c"))) == ["Load c"]
    stays = Box(gpus(16), a=model(10), b=model(12), c=model(6, min_stay_s=60.0, max_swap_wait_s=99.0))
    assert stays.actions(ready("a", in_flight=1), wanted("b", for_s=10), wanted("c")) == []


def test_the_owners_max_swap_wait_and_priority_set_the_deadline() -> None:
    busy = ready("a", in_flight=1)
    short = Box(gpus(16), a=model(10), b=model(10, max_swap_wait_s=5.0))
    assert said(short.actions(busy, wanted("b", for_s=5))) == ["Unload a"]
    urgent = Box(gpus(16), a=model(10), b=model(10, priority=3.0))
    assert said(urgent.actions(busy, wanted("b", for_s=10))) == ["Unload a"]


# Refusals


def refusal(box: Box, *statuses: ModelStatus) -> Refuse:
    (refused,) = (each for each in box.actions(*statuses) if isinstance(each, Refuse))
    return refused


def test_pinned_models_in_the_way_are_a_409_that_names_them() -> None:
    box = Box(gpus(16), a=model(10, is_pinned=True), b=model(10))
    refused = refusal(box, ready("a"), wanted("b"))
    assert (refused.status, refused.why) == (409, "there is no room for it beside a: pinned")


def test_a_model_that_is_larger_than_every_device_is_refused_for_good() -> None:
    refused = refusal(Box(gpus(16, 24), a=model(30)), wanted("a"))
    assert (refused.status, refused.retry_after_s) == (503, 0.0)
    assert refused.why == "it needs 30.0 GiB; it may have GPU 0 16.0 GiB, GPU 1 24.0 GiB"


def test_a_model_that_strangers_leave_no_room_for_may_come_again() -> None:
    refused = refusal(Box(gpus(24, foreign=(20,)), a=model(10)), wanted("a"))
    assert (refused.status, refused.retry_after_s) == (503, 30.0)
    assert refused.why == "it needs 10.0 GiB; other programs hold 20.0 GiB of 24.0 GiB of GPU 0"


def test_nobody_leaves_for_a_model_that_does_not_fit_even_then() -> None:
    box = Box(gpus(24, foreign=(18,)), a=model(5), b=model(10))
    assert said(box.actions(ready("a"), wanted("b"))) == ["Refuse b"]


def test_a_request_that_would_time_out_before_a_minimum_stay_ends_is_refused_with_the_rest_of_it() -> None:
    box = Box(gpus(16), a=model(10, min_stay_s=1400.0), b=model(10, load_timeout_s=600.0))
    refused = refusal(box, ready("a"), wanted("b"))
    assert (refused.status, refused.retry_after_s) == (503, 900.0)
    assert refused.arrived_until_s == NOW_S + 300


def test_whoever_has_waited_for_the_load_timeout_is_refused_and_nobody_later() -> None:
    box = Box(gpus(16), a=model(10, load_timeout_s=60.0))
    loading = in_state("a", ModelState.LOADING, waiting=2, oldest_arrival_s=NOW_S - 60, reason="starts")
    assert box.actions(loading) == [
        Refuse("a", 503, "it was not there within 60 s (load-timeout): starts", 10.0, NOW_S - 60)
    ]
    assert box.plan(wanted("a", for_s=20)).next_at_s == NOW_S + 40


def test_a_failed_load_tells_its_waiters_why_until_it_is_tried_again() -> None:
    box = Box(gpus(16), a=model(10))
    failed = wanted("a", state=ModelState.FAILED, reason="out of memory", retry_at_s=NOW_S + 30)
    assert box.actions(failed) == [Refuse("a", 503, "out of memory; tried again in 30 s", 30.0)]
    assert box.plan(failed).next_at_s == NOW_S + 30
    assert said(box.actions(failed, now_s=NOW_S + 30)) == ["Load a"]


def test_a_model_that_can_never_start_is_refused_without_a_time() -> None:
    failed = wanted("a", state=ModelState.FAILED, reason="no such file", retry_at_s=inf)
    refused = refusal(Box(gpus(16), a=model(10)), failed)
    assert (refused.why, refused.retry_after_s) == ("no such file; it can never start", 0.0)


def test_nobody_is_refused_where_nobody_waits_but_the_trail_says_it() -> None:
    planned = Box(gpus(16), a=model(30, is_pinned=True)).plan()
    assert planned.actions == ()
    assert [step.stage for step in planned.trail] == ["refuse"]


# The owner


def test_a_pinned_model_is_loaded_by_itself_and_never_put_away() -> None:
    box = Box(gpus(16), a=model(10, is_pinned=True, ttl_s=1.0))
    assert said(box.actions()) == ["Load a"]
    assert box.actions(ready("a")) == []


def test_the_owner_loads_and_unloads() -> None:
    box = Box(gpus(16), a=model(10))
    assert said(box.actions(ModelStatus("a", load_asked_s=NOW_S))) == ["Load a"]
    assert said(box.actions(ready("a", unload_asked=True, in_flight=3))) == ["Unload a"]
    assert box.actions(in_state("a", ModelState.DRAINING, unload_asked=True)) == []


def test_a_model_that_has_left_the_configuration_is_unloaded() -> None:
    assert said(Box(gpus(16), a=model(10)).actions(ready("old", in_flight=1))) == ["Unload old"]


# Idleness and sleep

LIGHT = SleepLevel("1", wake_s=0.5, kept_bytes=GIB, host_bytes=10 * GIB)
DEEP = SleepLevel("2", wake_s=3.0, kept_bytes=GIB // 2)


def test_an_idle_model_is_unloaded_after_its_ttl() -> None:
    box = Box(gpus(16), a=model(10, ttl_s=600.0))
    assert box.plan(ready("a")).next_at_s == NOW_S + 500
    (action,) = box.actions(ready("a"), now_s=NOW_S + 500)
    assert action == Unload("a", "idle for 600 s, longer than its ttl of 600 s")


@pytest.mark.parametrize(
    "status",
    [
        ready("a", in_flight=1),
        ready("a", waiting=1, oldest_arrival_s=NOW_S),
        in_state("a", ModelState.LOADING, since_s=NOW_S - 500),
        ready("a", keep_until_s=NOW_S + 1),
        ready("a", keep_alive_s=inf),
        ready("a", since_s=NOW_S - 5),
    ],
    ids=[
        "answers",
        "is waited for",
        "loads (llama-swap 289)",
        "kept by its owner",
        "kept alive",
        "just ready",
    ],
)
def test_a_ttl_does_not_end(status: ModelStatus) -> None:
    """llama-swap 289: a ttl ended a slow load."""
    assert Box(gpus(16), a=model(10, ttl_s=50.0)).actions(status) == []


def test_a_ttl_of_0_is_never_and_a_keep_alive_of_0_at_once() -> None:
    box = Box(gpus(16), a=model(10, ttl_s=0.0, sleep_levels=(DEEP,)))
    assert box.actions(ready("a"), now_s=NOW_S + 10**6) == []
    assert said(box.actions(ready("a", keep_alive_s=0.0))) == ["Unload a"]


def test_an_idle_model_sleeps_at_the_level_that_gains_most_and_is_unloaded_in_the_end() -> None:
    box = Box((*gpus(16), Device(HOST, 64 * GIB)), a=model(10, ttl_s=50.0, sleep_levels=(LIGHT, DEEP)))
    (action,) = box.actions(ready("a"))
    assert isinstance(action, Sleep)
    assert action.level == "1"
    sleeper = in_state("a", ModelState.ASLEEP, sleep_level="1")
    assert box.actions(sleeper) == []
    assert said(box.actions(sleeper, now_s=NOW_S + 49)) == ["Unload a"]


def test_power_saving_stops_a_model_that_would_sleep_and_one_that_sleeps_or_would_stay_ready() -> None:
    levels = {"ttl_s": 50.0, "sleep_levels": (DEEP,)}
    soon = Box(gpus(16), a=model(10, power_saving_after_s=100.0, **levels))
    (action,) = soon.actions(ready("a"))
    assert action == Unload("a", "nobody has asked for it for 100 s (power-saving-after)")
    late = Box(gpus(16), a=model(10, power_saving_after_s=120.0, **levels))
    assert said(late.actions(ready("a"))) == ["Sleep a"]
    sleeper = in_state("a", ModelState.ASLEEP, sleep_level="2", last_use_s=NOW_S - 100)
    assert late.plan(sleeper, now_s=NOW_S + 19).next_at_s == NOW_S + 20
    assert said(late.actions(sleeper, now_s=NOW_S + 20)) == ["Unload a"]
    never_idle = Box(gpus(16), a=model(10, ttl_s=0.0, power_saving_after_s=100.0))
    assert said(never_idle.actions(ready("a"))) == ["Unload a"]
    assert never_idle.actions(ready("a", keep_until_s=NOW_S + 1)) == []


def test_a_sleeper_that_was_never_used_is_stopped_so_long_after_it_fell_asleep() -> None:
    box = Box(gpus(16), a=model(10, ttl_s=50.0, power_saving_after_s=20.0, sleep_levels=(DEEP,)))
    sleeper = in_state("a", ModelState.ASLEEP, sleep_level="2")
    assert said(box.actions(sleeper, now_s=NOW_S + 18)) == []
    assert said(box.actions(sleeper, now_s=NOW_S + 19)) == ["Unload a"]


def test_a_level_for_which_the_host_has_no_room_is_not_taken() -> None:
    box = Box((*gpus(16), Device(HOST, 8 * GIB)), a=model(10, ttl_s=50.0, sleep_levels=(LIGHT, DEEP)))
    (action,) = box.actions(ready("a"))
    assert isinstance(action, Sleep)
    assert action.level == "2"


@pytest.mark.parametrize(("size", "expected"), [(15, "1"), (15.3, "2"), (15.9, "")])
def test_a_model_that_leaves_for_another_sleeps_when_that_makes_room_enough(
    size: float, expected: str
) -> None:
    box = Box((*gpus(16), Device(HOST, 64 * GIB)), a=model(10, sleep_levels=(LIGHT, DEEP)), b=model(size))
    (action,) = box.actions(ready("a"), wanted("b"))
    assert (action.level if isinstance(action, Sleep) else "") == expected


def test_a_sleeper_wakes_where_it_is_and_others_leave_for_that() -> None:
    box = Box(gpus(16, 16), a=model(10, sleep_levels=(DEEP,)), b=model(10))
    sleeper = in_state("a", ModelState.ASLEEP, sleep_level="2", waiting=1, oldest_arrival_s=NOW_S)
    (action,) = box.actions(sleeper)
    assert isinstance(action, Wake)
    assert said(box.actions(sleeper, ready("b", on=0))) == ["Unload b"]
    assert said(box.actions(sleeper, ready("b", on=1))) == ["Wake a"]


def test_a_sleeper_that_cannot_wake_where_it_is_is_loaded_anew_elsewhere() -> None:
    box = Box(gpus(16, 16), a=model(10, sleep_levels=(DEEP,)), b=model(10, is_pinned=True))
    sleeper = in_state("a", ModelState.ASLEEP, sleep_level="2", waiting=1, oldest_arrival_s=NOW_S)
    assert said(box.actions(sleeper, ready("b", on=0))) == ["Unload a"]


def test_a_sleep_or_a_waking_that_failed_stops_the_worker_and_says_why() -> None:
    box = Box(gpus(16), a=model(10, sleep_levels=(DEEP,)))
    failed = in_state("a", ModelState.ASLEEP, sleep_level="2", sleep_failure="the engine answered 500")
    (action,) = box.actions(failed)
    assert isinstance(action, Unload)
    assert action.why == "its sleep failed: the engine answered 500; it is stopped instead"


def test_a_sleep_whose_memory_has_not_come_back_is_failed_and_stopped() -> None:
    box = Box(gpus(16), a=model(10, sleep_levels=(DEEP,)))
    held = in_state("a", ModelState.ASLEEP, sleep_level="2", held_bytes={0: 4 * GIB})
    planned = box.plan(held)
    assert planned.actions == ()
    assert planned.next_at_s == NOW_S + 9
    (action,) = box.actions(held, now_s=NOW_S + 9)
    assert isinstance(action, Unload)
    assert "10 s later it still holds 4.0 GiB of GPU 0, where 0.5 GiB are usual" in action.why


def test_a_model_that_failed_to_sleep_is_not_put_to_sleep_again() -> None:
    box = Box(gpus(16), a=model(10, ttl_s=50.0, sleep_levels=(DEEP,)))
    assert said(box.actions(ready("a", has_failed_to_sleep=True))) == ["Unload a"]


# The owner's constraints


def test_whoever_may_not_be_loaded_beside_it_leaves_though_there_is_memory() -> None:
    swap = Constraints(leaves={"b": frozenset({"a"})})
    box = Box(gpus(64), swap, a=model(10), b=model(10), c=model(10))
    assert said(box.actions(ready("a"), ready("c"), wanted("b"))) == ["Unload a"]
    assert box.actions(in_state("a", ModelState.DRAINING), ready("c"), wanted("b")) == []
    assert box.actions(ready("a", in_flight=1), wanted("b")) == []
    assert said(box.actions(ready("a", in_flight=1), wanted("b", for_s=30))) == ["Unload a"]


def test_of_the_sets_that_may_be_loaded_together_the_one_that_costs_least_is_kept() -> None:
    sets = Constraints(together=(frozenset("ax"), frozenset("bx")))
    box = Box(gpus(64), sets, a=model(1, priority=5.0), b=model(1), x=model(1), y=model(1))
    assert said(box.actions(ready("a"), ready("b"), wanted("x"))) == ["Unload b"]
    assert said(box.actions(ready("a"), wanted("y"))) == ["Unload a"]


def test_two_that_may_not_be_loaded_together_take_turns() -> None:
    box = Box(gpus(64), Constraints(together=(frozenset("a"), frozenset("b"))), a=model(1), b=model(1))
    assert said(box.actions(wanted("a", for_s=2), wanted("b", for_s=1))) == ["Load a"]


def test_a_pinned_model_that_may_not_be_beside_it_is_a_409() -> None:
    box = Box(gpus(64), Constraints(leaves={"b": frozenset({"a"})}), a=model(1, is_pinned=True), b=model(1))
    assert refusal(box, ready("a"), wanted("b")).status == 409


def test_a_plan_can_be_made_of_nothing() -> None:
    assert plan(ModelsObservation(), ModelPolicies({}), 0.0).next_at_s == inf


def test_a_worker_that_starts_where_its_memory_was_given_to_another_is_stopped() -> None:
    box = Box(gpus(16, 16), a=model(10), b=model(10), c=model(10))
    again = in_state("b", ModelState.LOADING, since_s=NOW_S - 1)
    before = in_state("c", ModelState.LOADING, since_s=NOW_S - 5)
    actions = box.actions(ready("a"), again)
    assert said(actions) == ["Unload b"]
    assert "the memory of GPU 0 was given to another" in actions[0].why
    assert said(box.actions(before, again)) == ["Unload b"], "the one that started first goes on"
    assert box.actions(ready("a", on=1), again) == []
    stranger = Box(gpus(16, foreign=(12,)), b=model(10))
    assert stranger.actions(again) == [], "nothing is stopped for a stranger"
