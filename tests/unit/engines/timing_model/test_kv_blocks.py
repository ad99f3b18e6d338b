"""Hashes of KV blocks, and the blocks in use."""

from __future__ import annotations

import struct

import pytest
import xxhash

from dynaplan.engines.timing_model.kv_blocks import KvBlocks, block_hashes, chained, own_hashes

SEQUENCE = list(range(64))
DYNAMOS = [15310707395893867146, 15292316782987903195, 5532946206955930018, 14928757266181269122]
"""``compute_block_hash_for_seq(list(range(64)), 16)`` of ai-dynamo-runtime 1.6.1."""


def test_own_hashes_are_the_ones_that_dynamo_computes() -> None:
    assert own_hashes(SEQUENCE, 16) == DYNAMOS


def test_a_block_that_is_not_full_has_no_hash() -> None:
    assert own_hashes(SEQUENCE[:63], 16) == DYNAMOS[:3]
    assert own_hashes(SEQUENCE[:15], 16) == []


def test_the_first_chained_hash_is_the_blocks_own_and_a_later_one_covers_what_is_before_it() -> None:
    first, second, *_ = block_hashes(SEQUENCE, 16)
    assert first == DYNAMOS[0]
    assert second == xxhash.xxh3_64_intdigest(struct.pack("<QQ", first, DYNAMOS[1]), 1337)


def test_equal_blocks_after_different_beginnings_have_different_hashes() -> None:
    one = block_hashes([1] * 16 + [7] * 16, 16)
    other = block_hashes([2] * 16 + [7] * 16, 16)
    assert own_hashes([1] * 16 + [7] * 16, 16)[1] == own_hashes([2] * 16 + [7] * 16, 16)[1]
    assert one[1] != other[1]


def test_a_chain_can_be_continued() -> None:
    hashes = block_hashes(SEQUENCE, 16)
    assert chained(DYNAMOS[2:], hashes[1]) == hashes[2:]


@pytest.mark.parametrize("token", [-1, 2**32])
def test_what_is_no_token_id_is_refused(token: int) -> None:
    with pytest.raises(struct.error):
        own_hashes([token] * 16, 16)


def test_no_more_blocks_are_taken_than_are_free() -> None:
    blocks = KvBlocks(4)
    blocks.take(3)
    with pytest.raises(ValueError, match="2 KV blocks asked for, 1 free"):
        blocks.take(2)
    assert blocks.free == 1


def test_a_published_block_that_nobody_uses_is_free_until_its_place_is_taken() -> None:
    blocks = KvBlocks(2)
    blocks.take(1)
    assert blocks.publish(7)
    blocks.release(0, [7])
    assert (blocks.free, blocks.matching([7])) == (2, 1)
    blocks.take(2)
    assert (blocks.free, blocks.matching([7])) == (0, 0)


def test_a_published_block_is_in_use_until_its_last_user_gives_it_back() -> None:
    blocks = KvBlocks(2)
    blocks.take(1)
    blocks.publish(7)
    blocks.share([7])
    blocks.release(0, [7])
    assert blocks.used == 1
    blocks.release(0, [7])
    assert blocks.used == 0


def test_a_block_whose_hash_is_known_stays_private() -> None:
    blocks = KvBlocks(2)
    blocks.take(2)
    assert blocks.publish(7)
    assert not blocks.publish(7)


class Heard:
    def __init__(self) -> None:
        self.changes: list[tuple[str, int]] = []

    def stored(self, block: int) -> None:
        self.changes.append(("stored", block))

    def removed(self, block: int) -> None:
        self.changes.append(("removed", block))


def test_a_listener_hears_of_every_published_block_once_and_of_its_end() -> None:
    heard = Heard()
    blocks = KvBlocks(2, heard)
    blocks.take(2)
    assert blocks.publish(7)
    assert not blocks.publish(7)
    assert blocks.publish(8)
    blocks.release(0, [7, 8])
    blocks.share([7, 8])
    blocks.release(0, [7, 8])
    blocks.take(1)
    assert heard.changes == [("stored", 7), ("stored", 8), ("removed", 8)]
