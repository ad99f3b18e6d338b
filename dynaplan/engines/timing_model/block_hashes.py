"""Hashes of a prompt's KV blocks that are equal in every process, and in Dynamo's.

A block's own hash is XXH3 (64 bits, seed 1337) over its token ids as little-endian 32-bit numbers. Two
prompts may hold equal blocks after different beginnings, and an engine can reuse a block only together with
all before it. So blocks are known by chained hashes: the first block's is its own; a later one's is XXH3 over
the chained hash before it and its own, as two little-endian 64-bit numbers. Equal chained hashes mean equal
beginnings, and a prompt's cached part is found by looking its chain up, block by block.

Source: ``ai-dynamo-runtime`` 1.6.1, ``compute_block_hash_for_seq``, whose numbers the tests hold.
A text that is guessed can be tried against them: these hashes are to stay within the deployment.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

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
    """Return the chained hashes of a prompt's full blocks."""
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
