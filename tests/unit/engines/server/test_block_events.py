"""An engine's names of blocks become hashes that every process computes alike."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from dynaplan.engines.kv_events import BlockChange, CachedBlocks, Cleared, Removed, Stored
from dynaplan.engines.server.block_events import BlockTranslator
from dynaplan.engines.timing_model.kv_blocks import block_hashes, own_hashes
from dynaplan.events.engine_batches import (
    BlocksCleared,
    BlocksRemoved,
    BlocksStored,
    EngineEvent,
    read_engine_events,
)
from tests.fakes.kv_recordings import recorded

TOKENS = tuple(range(8))
HASHES = tuple(block_hashes(TOKENS, 2))
OWN = tuple(own_hashes(TOKENS, 2))


def blocks(first: int, last: int, parent: int | None = None, **more: bool) -> BlocksStored:
    """The engine's blocks of these places, which it calls by -1, -2 ..."""
    names = tuple(-place - 1 for place in range(first, last))
    return BlocksStored(names, parent, TOKENS[2 * first : 2 * last], 2, **more)


def test_stored_blocks_are_chained_to_the_ones_before() -> None:
    translation = BlockTranslator()
    assert translation.changes([blocks(0, 2)]) == [Stored(None, HASHES[:2], OWN[:2])]
    assert translation.changes([blocks(2, 4, -2)]) == [Stored(HASHES[1], HASHES[2:], OWN[2:])]
    assert translation.changes([BlocksRemoved((-4, -3))]) == [Removed((HASHES[3], HASHES[2]))]


def test_a_block_with_several_copies_is_removed_with_the_last() -> None:
    translation = BlockTranslator()
    translation.changes([blocks(0, 2)])
    assert translation.changes([blocks(0, 2)]) == []
    assert translation.changes([blocks(1, 3, -1)]) == [Stored(HASHES[1], HASHES[2:3], OWN[2:3])]
    assert translation.changes([BlocksRemoved((-1, -2))]) == []
    assert translation.changes([BlocksRemoved((-2,)), BlocksRemoved((-2,))]) == [Removed((HASHES[1],))]


def test_what_does_not_follow_a_known_block_is_left_out() -> None:
    translation = BlockTranslator()
    assert translation.changes([blocks(2, 4, -2)]) == []
    assert translation.skipped == 2


def test_blocks_that_not_only_tokens_decide_about_are_left_out_with_all_that_follow() -> None:
    translation = BlockTranslator()
    assert translation.changes([blocks(0, 1, is_plain=False), blocks(1, 2, -1)]) == []
    assert translation.changes([BlocksRemoved((-1, -2))]) == []


def test_of_several_groups_the_first_with_full_attention_is_followed() -> None:
    translation = BlockTranslator()
    window = BlocksStored((-1,), None, TOKENS[:2], 2, group=0, is_full=False)
    full = BlocksStored((-1,), None, TOKENS[:2], 2, group=1)
    assert translation.changes([window, full]) == [Stored(None, HASHES[:1], OWN[:1])]
    assert translation.changes([BlocksStored((-1,), None, TOKENS[:2], 2, group=2)]) == []
    assert translation.changes([BlocksRemoved((-1,), 0), BlocksRemoved((-1,), 2)]) == []
    assert translation.changes([BlocksRemoved((-1,), 1)]) == [Removed(HASHES[:1])]


def test_blocks_of_another_size_are_left_out() -> None:
    translation = BlockTranslator()
    translation.changes([blocks(0, 1)])
    assert translation.changes([BlocksStored((5,), None, (1, 2, 3), 3)]) == []
    assert translation.block_tokens == 2


def test_a_cleared_cache_holds_nothing_and_knows_no_names() -> None:
    translation = BlockTranslator()
    assert translation.changes([blocks(0, 1), BlocksCleared()])[1] == Cleared()
    assert translation.changes([blocks(1, 2, -1)]) == []


def replayed(messages: Iterable[list[bytes]]) -> tuple[CachedBlocks, dict[int, int]]:
    """What the translation of the messages leaves, and the engine's own blocks with their chained hashes."""
    translation, cached = BlockTranslator(), CachedBlocks()
    held: dict[int, int] = {}
    for _, _, payload in messages:
        events: list[EngineEvent] = read_engine_events(payload)
        changes: list[BlockChange] = translation.changes(events)
        cached.events(7, changes)
        for event in msgspec.msgpack.decode(payload)[1]:
            match event["type"]:
                case "BlockStored":
                    parent = event["parent_block_hash"]
                    before = () if parent is None else (held[parent],)
                    chain = list(before)
                    size = event["block_size"]
                    for place, name in enumerate(event["block_hashes"]):
                        own = own_hashes(event["token_ids"][place * size : (place + 1) * size], size)
                        chain.append(_chained(chain, own[0]))
                        held[name] = chain[-1]
                case "BlockRemoved":
                    for name in event["block_hashes"]:
                        del held[name]
                case _:
                    held.clear()
    assert translation.skipped == 0
    return cached, held


def _chained(before: list[int], own: int) -> int:
    from dynaplan.engines.timing_model.kv_blocks import chained

    return chained([own], before[-1] if before else None)[0]


def test_after_a_recording_of_vllm_the_same_blocks_are_cached() -> None:
    messages = recorded()
    for count in (50, 61, 200, len(messages)):
        cached, held = replayed(messages[:count])
        assert set(cached.snapshot(7).hashes) == set(held.values())
        assert 0 <= len(cached) <= 100


def test_prefill_and_decode_workers_that_hold_a_block_have_one_hash_for_it() -> None:
    prefill, decode = (replayed(recorded("disagg", topic))[0] for topic in (b"kv@prefill", b"kv@decode"))
    assert set(prefill.snapshot(7).hashes) & set(decode.snapshot(8).hashes)
