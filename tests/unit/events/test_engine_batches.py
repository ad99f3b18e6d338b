"""Messages of engines about their KV blocks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dynaplan.events.engine_batches import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    read_engine_events,
    sequence_of,
)
from tests.fakes.kv_recordings import recorded

STORED: dict[str, Any] = {
    "type": "BlockStored",
    "block_hashes": [1, 2**64 - 1],
    "parent_block_hash": None,
    "token_ids": [1, 2, 3, 4],
    "block_size": 2,
    "lora_id": None,
    "medium": "GPU",
}


def payload(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1795348800.5, list(events), 0])


def test_vllms_messages_are_read() -> None:
    messages = recorded()
    assert [sequence_of(frames) for frames in messages] == list(range(len(messages)))
    events = [event for frames in messages for event in read_engine_events(frames[2])]
    assert {type(event) for event in events} == {BlocksStored, BlocksRemoved, BlocksCleared}
    assert all(
        event.block_tokens == 32 and event.is_plain for event in events if isinstance(event, BlocksStored)
    )


def test_events_are_maps_or_arrays_and_hashes_numbers_or_digests() -> None:
    assert read_engine_events(payload(STORED)) == [BlocksStored((1, 2**64 - 1), None, (1, 2, 3, 4), 2)]
    as_array = ["BlockStored", [b"digest"], -7, [1, 2], 2, None]
    assert read_engine_events(payload(as_array)) == [BlocksStored((b"digest",), -7, (1, 2), 2)]
    assert read_engine_events(payload(["BlockRemoved", [-7]])) == [BlocksRemoved((-7,))]
    assert read_engine_events(payload(["AllBlocksCleared"])) == [BlocksCleared()]


@pytest.mark.parametrize("field", [{"medium": "CPU"}, {"locality": "REMOTE"}, {"type": "BlockMoved"}])
def test_blocks_elsewhere_are_left_out(field: dict[str, Any]) -> None:
    assert read_engine_events(payload(STORED | field)) == []


@pytest.mark.parametrize(
    ("field", "group", "is_full"),
    [
        ({}, 0, True),
        ({"group_idx": 3, "kv_cache_spec_kind": "full_attention"}, 3, True),
        ({"group_idx": 1, "kv_cache_spec_kind": "sliding_window"}, 1, False),
    ],
)
def test_an_event_is_of_one_group_of_layers(field: dict[str, Any], group: int, is_full: bool) -> None:
    (event,) = read_engine_events(payload(STORED | field))
    assert isinstance(event, BlocksStored)
    assert (event.group, event.is_full) == (group, is_full)
    removed = {"type": "BlockRemoved", "block_hashes": [1], **field}
    assert read_engine_events(payload(removed)) == [BlocksRemoved((1,), group)]


@pytest.mark.parametrize(
    ("field", "is_plain"),
    [
        ({"lora_id": 1}, False),
        ({"lora_name": "poet"}, False),
        ({"extra_keys": [None, ["salt"]]}, False),
        ({"extra_keys": "salt"}, False),
        ({"extra_keys": [None, None]}, True),
    ],
)
def test_blocks_are_plain_when_only_tokens_decide_about_them(field: dict[str, Any], is_plain: bool) -> None:
    (event,) = read_engine_events(payload(STORED | field))
    assert isinstance(event, BlocksStored)
    assert event.is_plain is is_plain


@pytest.mark.parametrize(
    ("data", "fault"),
    [
        (b"\xc1", "MessagePack"),
        (msgspec.msgpack.encode({"a": 1}), "expected a time and a list"),
        (payload(7), "expected an event"),
        (payload(STORED | {"group_idx": "x"}), "'group_idx' is 'x'"),
        (payload(STORED | {"block_hashes": ["x"]}), "expected numbers or digests"),
        (payload(STORED | {"parent_block_hash": "x"}), "expected numbers or digests"),
        (payload(STORED | {"token_ids": "x"}), "expected whole numbers"),
        (payload(STORED | {"token_ids": [1, 2, 3, -4]}), "no token id"),
        (payload(STORED | {"block_size": 0}), "4 tokens, 2 blocks, and block_size 0"),
        (payload(STORED | {"block_size": 3}), "4 tokens, 2 blocks, and block_size 3"),
    ],
)
def test_what_is_no_message_is_refused(data: bytes, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        read_engine_events(data)


@pytest.mark.parametrize("frames", [[b"", bytes(8)], [b"", bytes(7), b""]])
def test_a_message_has_three_frames(frames: list[bytes]) -> None:
    with pytest.raises(ValueError, match="expected 3, the second of 8 bytes"):
        sequence_of(frames)
