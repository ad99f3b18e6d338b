"""Messages by which vLLM and SGLang report what their KV caches store and remove.

A message has three frames: a topic, a sequence number (64 bits, big endian, from 0 for each engine), and a
msgpack payload ``[unix_s, [events], data_parallel_rank]``. vLLM's events are maps with their kind under
``type``, SGLang's (and older vLLM's) arrays that begin with it. What is not known of an event is ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dynaplan.events.wire_formats import payload_reader
from dynaplan.util.documents import shown

FRAMES = 3
SEQUENCE_BYTES = 8
END_OF_REPLAY = b"\xff" * SEQUENCE_BYTES
"""The sequence number that ends the answer of an engine's replay socket."""

EngineHash = int | bytes
"""An engine's own name of a block: a number, of either sign, or a digest."""

_ARRAYS = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("extra_keys", "group_idx", "kv_cache_spec_kind"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
"""The fields of events that are arrays, in order."""

FULL_ATTENTION = "full_attention"
IN_THE_ENGINE = (None, "GPU")
"""The places of blocks that the engine computes with; vLLM says GPU on a CPU too."""

_read = payload_reader(object)


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Blocks that follow ``parent`` (None: they begin a prompt) and hold these tokens, ``block_tokens`` each.

    ``is_plain``: nothing but the tokens decides about them: no adapter, image, salt. ``group`` is the group
    of layers that they are of, ``is_full`` says that its attention is full, as far as the engine reports.
    """

    hashes: tuple[EngineHash, ...]
    parent: EngineHash | None
    tokens: tuple[int, ...]
    block_tokens: int
    is_plain: bool = True
    group: int = 0
    is_full: bool = True


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks, of one group of layers, that the engine has evicted from its cache."""

    hashes: tuple[EngineHash, ...]
    group: int = 0


@dataclass(frozen=True, slots=True)
class BlocksCleared:
    """All blocks are gone, as after a reset of the engine's prefix cache."""


EngineEvent = BlocksStored | BlocksRemoved | BlocksCleared


def sequence_of(frames: Sequence[bytes]) -> int:
    """Return the sequence number of a message; raises ValueError."""
    if len(frames) != FRAMES or len(frames[1]) != SEQUENCE_BYTES:
        raise ValueError(
            f"it has {len(frames)} frames: expected {FRAMES}, the second of {SEQUENCE_BYTES} bytes"
        )
    return int.from_bytes(frames[1], "big")


def read_engine_events(payload: bytes) -> list[EngineEvent]:
    """Read the events of a message that concern the engine's own memory; raises ValueError, and nothing else.

    Left out are blocks that another medium keeps, or another machine.
    """
    batch = _read(payload)
    if not isinstance(batch, list) or len(batch) < 2 or not isinstance(batch[1], list):
        raise ValueError(f"it is {shown(batch)}: expected a time and a list of events")
    read = (_event(each) for each in batch[1])
    return [event for event in read if event is not None]


def _event(value: Any) -> EngineEvent | None:
    fields = _fields(value)
    kind = fields.get("type")
    if kind == "AllBlocksCleared":
        return BlocksCleared()
    if kind not in ("BlockStored", "BlockRemoved") or not _is_here(fields):
        return None
    hashes, group = _hashes(fields.get("block_hashes")), fields.get("group_idx") or 0
    if type(group) is not int:
        raise ValueError(f"'group_idx' is {shown(group)}: expected a whole number")
    if kind == "BlockRemoved":
        return BlocksRemoved(hashes, group)
    return _stored(fields, hashes, group)


def _fields(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    if isinstance(value, list) and value and isinstance(value[0], str):
        kind, *rest = value
        return {"type": kind, **dict(zip(_ARRAYS.get(kind, ()), rest, strict=False))}
    raise ValueError(f"it has {shown(value)}: expected an event")


def _is_here(fields: dict[str, Any]) -> bool:
    return fields.get("medium") in IN_THE_ENGINE and fields.get("locality") in (None, "LOCAL")


def _stored(fields: dict[str, Any], hashes: tuple[EngineHash, ...], group: int) -> BlocksStored:
    tokens, size = fields.get("token_ids"), fields.get("block_size")
    if not isinstance(tokens, list) or not set(map(type, tokens)) <= {int}:
        raise ValueError(f"'token_ids' is {shown(tokens)}: expected whole numbers")
    if type(size) is not int or size < 1 or len(tokens) != size * len(hashes):
        raise ValueError(f"it has {len(tokens)} tokens, {len(hashes)} blocks, and block_size {shown(size)}")
    if tokens and not (min(tokens) >= 0 and max(tokens) < 2**32):
        raise ValueError("'token_ids' has a number that is no token id")
    parent = fields.get("parent_block_hash")
    if parent is not None:
        (parent,) = _hashes([parent])
    is_full = fields.get("kv_cache_spec_kind") in (None, FULL_ATTENTION)
    return BlocksStored(hashes, parent, tuple(tokens), size, _is_plain(fields), group, is_full)


def _is_plain(fields: dict[str, Any]) -> bool:
    keys = fields.get("extra_keys")
    has_keys = any(key is not None for key in keys) if isinstance(keys, list) else keys is not None
    return fields.get("lora_id") is None and fields.get("lora_name") is None and not has_keys


def _hashes(value: Any) -> tuple[EngineHash, ...]:
    if not isinstance(value, list) or not set(map(type, value)) <= {int, bytes}:
        raise ValueError(f"'block_hashes' is {shown(value)}: expected numbers or digests")
    return tuple(value)
