"""The paged KV cache of one engine: hashes of its blocks, and the blocks in use.

A block is either private to one request, or published under the hash of the tokens it holds and all
before it; published blocks are shared. A published block that no request uses any more stays findable
until its place is needed: the one unused for longest goes first. Blocks have no ids: only their number
and their hashes matter.

The hashes are equal in every process, and in Dynamo's. A block's own hash is XXH3 (64 bits, seed 1337) over
its token ids as little-endian 32-bit numbers. Two prompts may hold equal blocks after different beginnings,
and an engine can reuse a block only together with all before it. So blocks are known by chained hashes: the
first block's is its own; a later one's is XXH3 over the chained hash before it and its own, as two
little-endian 64-bit numbers. Equal chained hashes mean equal beginnings, and a prompt's cached part is found
by looking its chain up, block by block.

Source: ``ai-dynamo-runtime`` 1.6.1, ``compute_block_hash_for_seq``, whose numbers the tests hold.
A text that is guessed can be tried against them: these hashes are to stay within the deployment.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

import xxhash

SEED = 1337
TOKEN_BYTES = 4

_digest = xxhash.xxh3_64_intdigest
_pair = struct.Struct("<QQ").pack


def own_hashes(tokens: Sequence[int], block_tokens: int) -> list[int]:
    """Return one hash per full block of the token ids, each over its own tokens alone.

    Raises struct.error for an id that is negative or needs more than 32 bits.
    """
    return _own_hashes(struct.pack(f"<{len(tokens)}I", *tokens), block_tokens)


def chained(own: Sequence[int], parent: int | None = None) -> list[int]:
    """Return the chained hashes of blocks with these own hashes; ``parent`` is the one before the first."""
    hashes = []
    for each in own:
        parent = each if parent is None else _digest(_pair(parent, each), SEED)
        hashes.append(parent)
    return hashes


def block_hashes(tokens: Sequence[int], block_tokens: int) -> list[int]:
    return chained(own_hashes(tokens, block_tokens))


def packed_block_hashes(packed: bytes, block_tokens: int, parent: int | None = None) -> list[int]:
    """Return the chained hashes of full blocks; their ids are packed into 32 bits each.

    ``parent`` is the chained hash of the block before the first, None at the beginning of a prompt.
    """
    return chained(_own_hashes(packed, block_tokens), parent)


def _own_hashes(packed: bytes, block_tokens: int) -> list[int]:
    step = block_tokens * TOKEN_BYTES
    ends = range(step, len(packed) + 1, step)
    return [_digest(packed[end - step : end], SEED) for end in ends]


class BlockListener(Protocol):
    """Hears of every published block that becomes findable, or is not any more."""

    def stored(self, block: int) -> None:
        """Note that a block with this hash is published; those before it in its chain are already."""
        ...

    def removed(self, block: int) -> None:
        """Note that the block with this hash was evicted."""
        ...


class KvBlocks:
    """Counts blocks. Requests refer to ``used`` ones; ``free`` can be taken: empty, or published and unused.

    The listener hears of blocks in the order in which they are published, and lose their places.
    """

    __slots__ = ("_idle", "_listener", "_users", "free", "total")

    def __init__(self, total: int, listener: BlockListener | None = None) -> None:
        self.total = total
        self.free = total
        self._listener = listener
        self._users: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def used(self) -> int:
        return self.total - self.free

    def matching(self, hashes: Sequence[int]) -> int:
        """Return the number of hashes, from the first on without a gap, that are published."""
        users = self._users
        for index, block in enumerate(hashes):
            if block not in users:
                return index
        return len(hashes)

    def idle_among(self, hashes: Iterable[int]) -> int:
        """Return the number of these published blocks that no request uses: sharing takes them from
        ``free``."""
        return sum(block in self._idle for block in hashes)

    def share(self, hashes: Iterable[int]) -> None:
        for block in hashes:
            if self._users[block] == 0:
                del self._idle[block]
                self.free -= 1
            self._users[block] += 1

    def take(self, count: int) -> None:
        """Use ``count`` more blocks privately, evicting idle ones.

        Raises ValueError for more than are ``free``.
        """
        if count > self.free:
            raise ValueError(f"{count} KV blocks asked for, {self.free} free")
        self.free -= count
        while self._idle and len(self._idle) > self.free:
            block, _ = self._idle.popitem(last=False)
            del self._users[block]
            if self._listener is not None:
                self._listener.removed(block)

    def publish(self, block: int) -> bool:
        """Make a private block findable by its hash; False, and it stays private, when the hash is known."""
        if block in self._users:
            return False
        self._users[block] = 1
        if self._listener is not None:
            self._listener.stored(block)
        return True

    def release(self, private: int, shared: Sequence[int]) -> None:
        """Give blocks back. The end of a chain becomes idle first, so that its beginning lives longest."""
        self.free += private
        for block in reversed(shared):
            self._users[block] -= 1
            if self._users[block] == 0:
                self._idle[block] = None
                self.free += 1
