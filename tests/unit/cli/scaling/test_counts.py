"""Counts and holds in the store: one transaction, tried again when somebody else was faster."""

from __future__ import annotations

import time

import pytest

from dynaplan.cli.scaling.counts import held_in, left_out_gpus, published_fleet, write_counts
from dynaplan.fleet.holds import Hold, RoleHolds
from dynaplan.fleet.store_keys import DesiredCounts
from dynaplan.graph.lifecycle import Role
from dynaplan.store.memory import MemoryStore
from dynaplan.util.errors import TemporaryError
from tests.fakes.clock import LoopClock

AT_2 = RoleHolds(decode=Hold(2, 2))


@pytest.fixture
async def store() -> MemoryStore:
    store = MemoryStore(LoopClock())
    for name, value in {"num_decode_workers": "1", "decision_id": "3", "scaled_decision_id": "7"}.items():
        await store.put(f"v1/ns/planner/{name}", value)
    return store


async def value(store: MemoryStore, name: str) -> str:
    item = await store.get(f"v1/ns/planner/{name}")
    return item.value if item else ""


async def test_counts_and_holds_are_written_together_above_every_id(store: MemoryStore) -> None:
    written = await write_counts(store, "ns", lambda now, holds: ({Role.DECODE: 2}, AT_2))
    assert (written.decision_id, written.before, written.holds) == (8, RoleHolds(), AT_2)
    assert written.counts == DesiredCounts(-1, 2, 8, 7)
    assert await value(store, "num_decode_workers") == "2"
    assert RoleHolds.from_text(await value(store, "holds")) == AT_2


async def test_a_release_is_no_new_decision_and_leaves_an_empty_value(store: MemoryStore) -> None:
    await store.put("v1/ns/planner/holds", AT_2.to_text())
    written = await write_counts(store, "ns", lambda now, holds: ({}, RoleHolds()))
    assert written.before == AT_2
    assert await value(store, "holds") == "{}"
    assert await value(store, "decision_id") == "3"


async def test_holds_that_are_over_or_cannot_be_read_count_as_none(store: MemoryStore) -> None:
    for text in ('{"decode": 7}', RoleHolds(decode=Hold(2, until_s=time.time() - 1)).to_text()):
        await store.put("v1/ns/planner/holds", text)
        written = await write_counts(store, "ns", lambda now, holds: ({Role.DECODE: 2}, holds))
        assert written.before == RoleHolds()
        assert await value(store, "holds") == "{}"


async def test_a_hold_made_meanwhile_is_seen_by_the_next_attempt(store: MemoryStore) -> None:
    seen = []

    def change(now: DesiredCounts, holds: RoleHolds) -> tuple[dict[Role, int], RoleHolds]:
        seen.append(holds)
        return {Role.DECODE: 3}, holds

    commit = store.commit

    async def overtaken(transaction):
        store.commit = commit
        await store.put("v1/ns/planner/holds", AT_2.to_text())
        return await commit(transaction)

    store.commit = overtaken
    await write_counts(store, "ns", change)
    assert seen == [RoleHolds(), AT_2]


async def test_it_gives_up_when_the_counts_change_all_the_time(store: MemoryStore) -> None:
    async def never(_):
        return False

    store.commit = never
    with pytest.raises(TemporaryError, match="somebody else"):
        await write_counts(store, "ns", lambda now, holds: ({Role.DECODE: 3}, holds))


async def test_the_published_fleet_is_read_and_a_spoilt_one_is_none(store: MemoryStore) -> None:
    assert await published_fleet(store, "ns") is None
    await store.put("v1/ns/fleet", "[]")
    assert await published_fleet(store, "ns") is None
    await store.put("v1/ns/fleet", '{"gpus_total": 8}')
    fleet = await published_fleet(store, "ns")
    assert fleet
    assert fleet.gpus_total == 8


async def test_gpus_that_are_left_out_are_read_with_the_reason(store: MemoryStore) -> None:
    for text, lines in (
        ("[]", ()),
        ('{"gpus_left_out": 5}', ()),
        ('{"gpus_left_out": ["GPU 2: x"]}', ("GPU 2: x",)),
    ):
        await store.put("v1/ns/fleet", text)
        assert await left_out_gpus(store, "ns") == lines


def test_the_statefile_tells_holds_when_the_store_does_not_answer() -> None:
    assert held_in({}) == RoleHolds()
    assert held_in({"planner_keys": {"holds": AT_2.to_text()}}) == AT_2
    assert held_in({"planner_keys": {"holds": 7}}) == RoleHolds()
