"""Which deployment gives a GPU to which other, and why."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dynaplan.fleet.gpus import GpuPool, GpuShare
from dynaplan.fleet.rules.gpu_sharing import after, kept_back, outlook, published, right, transfer
from tests.unit.fleet.rules.graphs import (
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

BOX = frozenset("abcd")


def share(name: str, held: str, lacks: int = 0, ready: int | None = None, **more: object) -> GpuShare:
    """A deployment with single-GPU workers, all ready, on these GPUs of the box, that lacks some."""
    number = len(held) if ready is None else ready
    known = GpuShare(name, ord(name[0]), 0, 0, BOX, pools=(GpuPool("W", 1, number),), held=frozenset(held))
    wants = len(held) + min(lacks, 1)
    return replace(known, **{"wants": wants, "wants_in_all": len(held) + lacks, **more})  # type: ignore[arg-type]


def claimed(*shares: GpuShare) -> frozenset[str]:
    return frozenset().union(*(each.held for each in shares))


def step(*shares: GpuShare) -> tuple[str, str, str] | None:
    """The giver, the taker and the reason."""
    found = transfer(shares, claimed(*shares))
    return found and (found.giver.namespace, found.taker.namespace, found.why)


def test_the_higher_priority_gets_a_gpu_of_the_lower_one() -> None:
    one, two = share("one", "abc"), share("two", "d", 1, priority=5)
    assert step(one, two) == ("one", "two", "deployment 'two' needs its GPU (gpu-priority 5 over 0)")
    assert outlook(two, (one, two), BOX) == "deployment 'one' is to give one (gpu-priority 5 over 0)"


def test_nobody_gives_to_an_equal_or_to_one_that_lacks_nothing() -> None:
    one, two = share("one", "abc"), share("two", "d", 1)
    assert step(one, two) is None
    assert outlook(two, (one, two), BOX) == (
        "deployment 'one' gives none: its gpu-priority is 0, this one's 0"
    )
    assert step(one, share("two", "d", priority=5)) is None
    assert outlook(one, (one, two), BOX) == ""
    assert outlook(two, (two,), BOX) == ""


def test_below_its_reserve_a_lower_one_gets_a_gpu_of_a_higher_one_that_has_more_than_its_own() -> None:
    one, two = share("one", "abc", priority=5, reserved=2), share("two", "d", 1, reserved=2)
    assert step(one, two) == (
        "one",
        "two",
        "deployment 'two' needs its GPU (it has 1 of its reserved-gpus 2)",
    )
    assert step(replace(one, reserved=3), two) is None
    assert step(one, replace(two, reserved=1)) is None


def test_a_giver_keeps_its_reserve_and_a_ready_worker_of_each_component() -> None:
    two = share("two", "d", 1, priority=5)
    assert step(share("one", "abc", reserved=3), two) is None
    assert step(share("one", "abc", ready=1), two) is None
    pools = (GpuPool("D", 1, 1), GpuPool("P", 1, 2))
    one = share("one", "abc", pools=pools)
    found = transfer((one, two), BOX)
    assert found
    assert found.pool == pools[1]
    assert after(found) == replace(one, pools=(pools[0], GpuPool("P", 1, 1)), promised=1)
    full = share("one", "abc", reserved=3)
    assert outlook(two, (full, two), BOX) == (
        "deployment 'one' gives none: it keeps reserved-gpus 3 and a ready worker of each kind"
    )


def test_one_worker_at_a_time_is_on_its_way() -> None:
    one, two = share("one", "abc"), share("two", "d", 2, priority=5)
    for going in (replace(one, promised=1), replace(one, leaving=frozenset("a"))):
        assert step(going, two) is None
        assert outlook(two, (going, two), BOX) == "a worker of deployment 'one' drains, to give its GPU"
    assert step(replace(one, leaving=frozenset("d")), two), "what it holds no more is not on its way"


def test_a_free_gpu_is_used_first_unless_the_taker_cannot_use_it() -> None:
    one, two = share("one", "ab"), share("two", "d", 1, priority=5)
    assert step(one, two) is None
    assert outlook(two, (one, two), claimed(one, two)) == ""
    assert step(one, replace(two, left_out=frozenset("c")))


def test_nobody_gives_what_would_not_be_enough() -> None:
    one = share("one", "abc", reserved=2)
    big = share("two", "d", priority=5, wants=3, wants_in_all=3)
    assert step(one, big) is None
    assert step(replace(one, reserved=1), big)


def test_the_lowest_priority_gives_first_and_the_best_right_gets_first() -> None:
    low, middle = share("low", "a", ready=2), share("middle", "bc", priority=1)
    low = replace(low, held=frozenset("ax"), visible=BOX)
    high, higher = share("high", "d", 1, priority=5), share("very", "", 1, priority=6)
    found = step(middle, low, high, higher)
    assert found
    assert found[:2] == ("low", "very")
    owed = share("owed", "", 1, reserved=1)
    found = step(middle, low, replace(high, wants=1), higher, owed)
    assert found
    assert found[:2] == ("low", "owed")


def test_a_free_gpu_is_kept_for_the_better_right() -> None:
    one, two = share("one", "ab", 2), share("two", "c", 1, priority=5)
    kept = kept_back(one, (one, two), claimed(one, two))
    assert (kept.number, kept.visible) == (1, BOX)
    assert kept.why == "kept for deployment 'two' (gpu-priority 5 over 0)"
    assert kept_back(two, (one, two), claimed(one, two)).number == 0
    assert kept_back(replace(one, priority=5), (one, two), claimed(one, two)).number == 0, "first come"
    owed = replace(two, priority=0, reserved=2)
    assert kept_back(one, (one, owed), BOX - {"d"}).why == (
        "kept for deployment 'two' (it has 1 of its reserved-gpus 2)"
    )
    apart = replace(two, visible=frozenset("xyz"))
    assert kept_back(one, (one, apart), claimed(one, apart)).number == 0


def test_gpus_that_the_taker_may_not_use_are_not_given() -> None:
    one, two = share("one", "abc", visible=BOX | {"x"}), share("two", "d", 1, priority=5)
    assert right(two, one) == ""
    assert step(one, two) is None
    assert outlook(two, (one, two), BOX) == (
        "deployment 'one' gives none: it may use GPUs that this one may not"
    )


def said(fleet: tuple[object, ...], wanted: int, failing: tuple[str, ...] = (), gpus: float = 1) -> GpuShare:
    spec = graph(decode(gpus=gpus), prefill())
    inventory = box(4)
    held = frozenset(inventory[index].uuid for each in fleet for index in each.gpus)  # type: ignore[attr-defined]
    base = GpuShare("ns", 1, 0, 0, frozenset(gpu.uuid for gpu in inventory), held=held)
    desired = {"VllmWorker": wanted, "PrefillWorker": 0}
    return published(base, spec, fleet, desired, inventory, failing)  # type: ignore[arg-type]


def test_it_publishes_what_it_lacks_and_what_leaves() -> None:
    ready, other = worker("VllmWorker", READY, gpus=(0,)), worker("VllmWorker_1", STARTING, gpus=(1,))
    enough = said((ready, other), 2)
    assert (enough.needs, enough.wants, enough.wants_in_all, enough.coming) == (0, 2, 2, 0)
    assert enough.pools[0] == GpuPool("VllmWorker", 1, 1)
    assert (said((ready,), 3).needs, said((ready,), 3).wants_in_all) == (1, 3)
    leaves = worker("VllmWorker_1", DRAINING, gpus=(1,))
    going = said((ready, leaves), 3)
    assert (going.needs, going.wants_in_all, going.coming) == (0, 3, 1)
    assert said((ready, leaves), 1).wants == 1, "nothing is missing when its GPU is given back"


def test_a_component_that_fails_asks_for_nothing_and_a_fraction_joins_a_gpu_of_its_own() -> None:
    failed = worker("VllmWorker", FAILED)
    assert said((failed,), 2).needs == 1
    assert said((failed,), 2, ("VllmWorker",)).needs == 0
    half = replace(worker("VllmWorker", READY, gpus=(0,)), gpu_share=0.5)
    assert said((half,), 2, gpus=0.5).needs == 0
    assert said((half, replace(half, name="ns_VllmWorker_1")), 3, gpus=0.5).needs == 1


@pytest.mark.parametrize(
    "spoilt", [{"pools": 1}, {"pools": [1]}, {"wants": -1}, {"visible": [1]}, {"pid": "x"}]
)
def test_what_is_published_is_read_again_and_nonsense_is_refused(spoilt: dict[str, object]) -> None:
    before = share("one", "abc", 1, leaving=frozenset("a"), left_out=frozenset("d"))
    record = before.to_record()
    assert GpuShare.from_record(record, frozenset("abc")) == before
    with pytest.raises(ValueError, match="'"):
        GpuShare.from_record({**record, **spoilt}, frozenset())
