from __future__ import annotations

import pytest

from dynaplan.engines.timing_model.kv_blocks import KvBlocks


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
