"""KV events as they travel, and the blocks that a worker knows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaplan.engines.kv_events import (
    EVENT_ID_HEADER,
    INSTANCE_ID_HEADER,
    LARGEST_HASH,
    BlockChange,
    CachedBlocks,
    CacheSnapshot,
    Cleared,
    KvEvent,
    Removed,
    Stored,
    kv_payload,
    read_kv_payload,
)

STORED = KvEvent(7587, 0, Stored(None, (LARGEST_HASH, 12), (LARGEST_HASH, 3)))

numbers = st.integers(0, LARGEST_HASH)
blocks = st.lists(st.tuples(numbers, numbers), max_size=4)


def stored(parent: int | None, pairs: list[tuple[int, int]]) -> Stored:
    return Stored(parent, tuple(one for one, _ in pairs), tuple(own for _, own in pairs))


changes: st.SearchStrategy[BlockChange] = (
    st.builds(stored, st.none() | numbers, blocks)
    | st.builds(Removed, st.lists(numbers, max_size=4).map(tuple))
    | st.just(Cleared())
)


@given(st.lists(st.builds(KvEvent, numbers, numbers, changes), max_size=4))
def test_events_are_read_as_they_were_written(events: list[KvEvent]) -> None:
    assert list(read_kv_payload(kv_payload(events))) == events


def test_the_payload_is_the_originals() -> None:
    assert kv_payload([STORED]) == [
        {
            "worker_id": 7587,
            "storage_tier": "device",
            "residency_domain": "worker",
            "event": {
                "event_id": 0,
                "data": {
                    "stored": {
                        "parent_hash": None,
                        "start_position": None,
                        "blocks": [
                            {"block_hash": LARGEST_HASH, "tokens_hash": LARGEST_HASH, "mm_extra_info": None},
                            {"block_hash": 12, "tokens_hash": 3, "mm_extra_info": None},
                        ],
                    }
                },
                "dp_rank": 0,
            },
        }
    ]
    assert KvEvent(1, 2, Removed((3,))).document()["event"]["data"] == {"removed": {"block_hashes": [3]}}
    assert KvEvent(1, 2, Cleared()).document()["event"]["data"] == "cleared"


def damaged(*path: str | int, value: Any) -> Any:
    """Return the payload of a stored event with that value at the end of the path."""
    payload: Any = kv_payload([STORED])
    at = payload
    for step in path[:-1]:
        at = at[step]
    at[path[-1]] = value
    return payload


@pytest.mark.parametrize(
    ("payload", "fault"),
    [
        ({}, "expected a list of events"),
        ([7], "expected an object with 'event'"),
        (damaged(0, "worker_id", value="7"), "expected whole numbers"),
        (damaged(0, "worker_id", value=True), "expected whole numbers"),
        (damaged(0, "event", "event_id", value=-1), "expected numbers from 0 to"),
        (damaged(0, "event", "event_id", value=2**64), "expected numbers from 0 to"),
        (damaged(0, "event", "data", value="gone"), "expected an object with 'stored'"),
        (damaged(0, "event", "data", value={"removed": {"block_hashes": 7}}), "expected a list of hashes"),
        (damaged(0, "event", "data", "stored", "blocks", value={}), "'blocks' is {}: expected a list"),
        (damaged(0, "event", "data", "stored", "blocks", 0, "block_hash", value=None), "whole numbers"),
    ],
)
def test_what_is_no_event_is_refused_with_its_fault(payload: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        read_kv_payload(payload)


@given(st.integers(0, 2**63 - 1), st.integers(-1, 2**63 - 1), st.lists(numbers, max_size=4).map(tuple))
def test_a_snapshot_is_read_as_it_was_written(worker: int, event: int, hashes: tuple[int, ...]) -> None:
    snapshot = CacheSnapshot(worker, event, hashes)
    assert CacheSnapshot.of(snapshot.headers(), snapshot.body()) == snapshot


def test_a_snapshots_body_is_its_hashes_as_little_endian_numbers() -> None:
    assert CacheSnapshot(7, -1, (1, 2**63)).body().hex() == "0100000000000000" + "0000000000000080"


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({INSTANCE_ID_HEADER: "7"}, b""),
        ({INSTANCE_ID_HEADER: "x", EVENT_ID_HEADER: "0"}, b""),
        ({INSTANCE_ID_HEADER: "7", EVENT_ID_HEADER: "-2"}, b""),
        ({INSTANCE_ID_HEADER: "7", EVENT_ID_HEADER: "0"}, b"1234567"),
    ],
)
def test_what_is_no_snapshot_is_refused(headers: dict[str, str], body: bytes) -> None:
    with pytest.raises(ValueError, match="expected numbers, and 8 bytes per block"):
        CacheSnapshot.of(headers, body)


CHAIN = Stored(None, (1, 2, 3), (1, 20, 30))


def test_events_are_numbered_from_0_without_gaps() -> None:
    blocks = CachedBlocks()
    assert blocks.events(7, [CHAIN, Removed((3,))]) == [
        KvEvent(7, 0, CHAIN),
        KvEvent(7, 1, Removed((3,))),
    ]
    assert blocks.events(7, [Cleared()]) == [KvEvent(7, 2, Cleared())]


def test_a_snapshot_has_what_is_cached_after_the_last_event() -> None:
    blocks = CachedBlocks()
    assert blocks.snapshot(7) == CacheSnapshot(7, -1, ())
    blocks.events(7, [CHAIN, Removed((2, 9))])
    assert blocks.snapshot(7) == CacheSnapshot(7, 1, (1, 3))
    blocks.events(7, [Cleared()])
    assert blocks.snapshot(7) == CacheSnapshot(7, 2, ())


def test_a_worker_without_an_instance_id_has_blocks_and_no_events() -> None:
    blocks = CachedBlocks()
    assert blocks.events(0, [CHAIN]) == []
    assert len(blocks) == 3
    assert blocks.snapshot(7) == CacheSnapshot(7, -1, (1, 2, 3))


def test_under_another_instance_id_numbers_begin_again_and_blocks_stay() -> None:
    blocks = CachedBlocks()
    blocks.events(7, [CHAIN, Cleared(), CHAIN])
    assert blocks.snapshot(8) == CacheSnapshot(8, -1, (1, 2, 3))
    assert blocks.events(8, [Removed((1,))]) == [KvEvent(8, 0, Removed((1,)))]
