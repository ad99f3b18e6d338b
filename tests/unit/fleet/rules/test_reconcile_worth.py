"""Of workers that are alike those leave first whose caches have served least."""

from __future__ import annotations

from dataclasses import replace

from dynaplan.fleet.rules.reconcile import reconcile
from dynaplan.graph.lifecycle import Worker
from tests.unit.fleet.rules.graphs import (
    BACKOFF,
    DRAINING,
    READY,
    STARTING,
    box,
    decode,
    graph,
    prefill,
    worker,
)

THREE = tuple(worker("VllmWorker" + (f"_{n}" if n else ""), gpus=(n,)) for n in range(3))


def leaving(fleet: tuple[Worker, ...], wanted: int, worth: dict[str, int]) -> dict[str, str]:
    """The workers that leave, without their namespace, and why."""
    named = {f"dynamo_{name}": tokens for name, tokens in worth.items()}
    after = reconcile(graph(decode()), fleet, {"VllmWorker": wanted}, box(4), {}, 100.0, worth=named)
    told = {each.name: each.reason for each in after.fleet if each.state is DRAINING}
    return {name.removeprefix("dynamo_"): why for name, why in (told | dict(after.removed)).items()}


def test_the_worker_whose_cache_served_least_leaves_and_the_reason_says_so() -> None:
    worth = {"VllmWorker": 500_000, "VllmWorker_1": 12_300, "VllmWorker_2": 1_200_000}
    told = leaving(THREE, 2, worth)
    assert told == {
        "VllmWorker_1": (
            "2 of 3 VllmWorker wanted; its cache served the least, 12 k tokens in about 10 minutes"
        )
    }


def test_one_that_served_nothing_leaves_before_one_that_did_and_equals_by_their_index() -> None:
    assert list(leaving(THREE, 1, {"VllmWorker_2": 9})) == ["VllmWorker", "VllmWorker_1"]
    assert leaving(THREE, 2, {"VllmWorker": 9})["VllmWorker_2"].endswith(
        "the least, 0 tokens in about 10 minutes"
    )


def test_without_a_router_that_knows_caches_nothing_changes() -> None:
    assert leaving(THREE, 2, {}) == {"VllmWorker_2": "2 of 3 VllmWorker wanted"}
    assert leaving(THREE, 2, dict.fromkeys(("VllmWorker", "VllmWorker_1", "VllmWorker_2"), 0)) == leaving(
        THREE, 2, {}
    )


def test_workers_that_serve_nobody_leave_before_any_ready_one_whatever_their_caches_served() -> None:
    fleet = (*THREE, worker("VllmWorker_3", STARTING, gpus=(3,)))
    worth = {"VllmWorker": 5, "VllmWorker_3": 1_000_000}
    assert leaving(fleet, 3, worth) == {"VllmWorker_3": "3 of 4 VllmWorker wanted"}
    crashed = replace(THREE[0], state=BACKOFF, retry_at_s=200.0)
    assert list(leaving((crashed, *THREE[1:]), 2, {"VllmWorker": 9, "VllmWorker_1": 1})) == ["VllmWorker"]


def test_where_all_leave_no_cache_is_the_reason() -> None:
    assert set(leaving(THREE, 0, {"VllmWorker": 5}).values()) == {"0 of 3 VllmWorker wanted"}


def test_each_component_is_judged_by_its_own_caches() -> None:
    fleet = (worker("PrefillWorker", READY, (0,)), worker("PrefillWorker_1", READY, (1,)), *THREE[2:])
    worth = {"dynamo_PrefillWorker_1": 10, "dynamo_VllmWorker_2": 1}
    wanted = {"VllmWorker": 1, "PrefillWorker": 1}
    after = reconcile(graph(decode(), prefill()), fleet, wanted, box(4), {}, 100.0, worth=worth)
    assert [each.name for each in after.fleet if each.state is DRAINING] == ["dynamo_PrefillWorker"]
