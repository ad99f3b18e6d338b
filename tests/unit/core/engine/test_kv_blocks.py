from __future__ import annotations

import pytest

from dynaplan.core.engine.kv_blocks import KvBlocks


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


def test_a_block_whose_hash_is_known_stays_private() -> None:
    blocks = KvBlocks(2)
    blocks.take(2)
    assert blocks.publish(7)
    assert not blocks.publish(7)
