"""KV events: the blocks that a worker's engine has stored and removed, as they travel to the frontends.

A payload is a list of events of one worker, in order, each as Dynamo 1.6 has it::

    {"worker_id": 7587, "storage_tier": "device", "residency_domain": "worker", "event":
        {"event_id": 0, "dp_rank": 0, "data":
            {"stored": {"parent_hash": null, "start_position": null, "blocks":
                [{"block_hash": 1, "tokens_hash": 1, "mm_extra_info": null}]}}}}

``data`` may also be ``{"removed": {"block_hashes": [1]}}``, or ``"cleared"``. Hashes are those of
``dynaplan.engines.timing_model.kv_blocks``. A worker numbers its events from 0; a number that is skipped
is an event that was lost.

A worker also reports all its blocks at once: ``GET /kv_blocks`` answers with their chained hashes as
little-endian 64-bit numbers, and with the number of its last event (-1 before the first) and its instance id
in headers.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dynaplan.util.documents import shown, whole_number

TOPIC = "kv_cache_update"
"""The name of the event: its subject is ``{namespace}.{component}.kv_cache_update``."""

CARD_KEY = "kv_events"
"""The key of a worker's card that says that it publishes: ``{"block_tokens": 16}``."""

FOLLOWS = "follows_kv_events"
"""The key of a frontend's card that says that it routes by what workers publish: true."""

SNAPSHOT_PATH = "/kv_blocks"
EVENT_ID_HEADER = "X-Event-Id"
INSTANCE_ID_HEADER = "X-Instance-Id"

LARGEST_HASH = 2**64 - 1
HASH_BYTES = 8

CLEARED = "cleared"


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks of one chain that are in the cache now.

    ``hashes`` are chained, ``own_hashes`` each block's own; ``parent`` is the chained hash of the block
    before the first, None where there is none.
    """

    parent: int | None
    hashes: tuple[int, ...]
    own_hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Removed:
    """Blocks, by their chained hashes, that were evicted from the cache."""

    hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """The whole cache is empty now."""


BlockChange = Stored | Removed | Cleared


@dataclass(frozen=True, slots=True)
class KvEvent:
    """One change of one worker's cache. ``worker_id`` is its instance id."""

    worker_id: int
    event_id: int
    change: BlockChange

    def document(self) -> dict[str, Any]:
        return {
            "worker_id": self.worker_id,
            "storage_tier": "device",
            "residency_domain": "worker",
            "event": {"event_id": self.event_id, "data": _data(self.change), "dp_rank": 0},
        }

    @classmethod
    def of(cls, document: object) -> KvEvent:
        """Read one event of a payload; raises ValueError for an invalid one."""
        event = _field(document, "event")
        worker_id, event_id = _field(document, "worker_id"), _field(event, "event_id")
        return cls(_number(worker_id), _number(event_id), _change(_field(event, "data")))


@dataclass(frozen=True, slots=True)
class CacheSnapshot:
    """All blocks that a worker holds after its event with that number, in the order they were stored in."""

    worker_id: int
    event_id: int
    hashes: Collection[int]

    def headers(self) -> dict[str, str]:
        return {EVENT_ID_HEADER: str(self.event_id), INSTANCE_ID_HEADER: str(self.worker_id)}

    def body(self) -> bytes:
        return struct.pack(f"<{len(self.hashes)}Q", *self.hashes)

    @classmethod
    def of(cls, headers: Mapping[str, str], body: bytes) -> CacheSnapshot:
        """Read an answer; raises ValueError for an invalid one."""
        worker_id, event_id = (
            whole_number(headers.get(name, "")) for name in (INSTANCE_ID_HEADER, EVENT_ID_HEADER)
        )
        if worker_id is None or event_id is None or event_id < -1 or len(body) % HASH_BYTES:
            raise ValueError(
                f"it has event {event_id}, instance {worker_id} and {len(body)} bytes: expected numbers, "
                f"and {HASH_BYTES} bytes per block"
            )
        return cls(worker_id, event_id, struct.unpack(f"<{len(body) // HASH_BYTES}Q", body))


def kv_payload(events: Iterable[KvEvent]) -> list[dict[str, Any]]:
    return [event.document() for event in events]


def read_kv_payload(payload: object) -> tuple[KvEvent, ...]:
    """Read the payload of one message; raises ValueError, and nothing else."""
    if not isinstance(payload, list):
        raise ValueError(f"it is {shown(payload)}: expected a list of events")
    return tuple(map(KvEvent.of, payload))


def _data(change: BlockChange) -> Any:
    match change:
        case Stored(parent, hashes, own_hashes):
            blocks = [
                {"block_hash": chained, "tokens_hash": own, "mm_extra_info": None}
                for chained, own in zip(hashes, own_hashes, strict=True)
            ]
            return {"stored": {"parent_hash": parent, "start_position": None, "blocks": blocks}}
        case Removed(hashes):
            return {"removed": {"block_hashes": list(hashes)}}
    return CLEARED


def _change(data: object) -> BlockChange:
    if data == CLEARED:
        return Cleared()
    if isinstance(data, dict) and "removed" in data:
        return Removed(_numbers(_field(data["removed"], "block_hashes")))
    stored = _field(data, "stored")
    parent, blocks = _field(stored, "parent_hash"), _field(stored, "blocks")
    if not isinstance(blocks, list):
        raise ValueError(f"'blocks' is {shown(blocks)}: expected a list")
    return Stored(
        None if parent is None else _number(parent),
        _numbers([_field(block, "block_hash") for block in blocks]),
        _numbers([_field(block, "tokens_hash") for block in blocks]),
    )


def _field(document: object, name: str) -> Any:
    if not isinstance(document, dict) or name not in document:
        raise ValueError(f"it has {shown(document)}: expected an object with '{name}'")
    return document[name]


def _number(value: object) -> int:
    return _numbers([value])[0]


def _numbers(values: object) -> tuple[int, ...]:
    """Return the numbers of a list, each of 64 bits without a sign."""
    if not isinstance(values, list):
        raise ValueError(f"it has {shown(values)}: expected a list of hashes")
    if not set(map(type, values)) <= {int}:
        raise ValueError(f"it has {shown(values)}: expected whole numbers")
    if values and not (min(values) >= 0 and max(values) <= LARGEST_HASH):
        raise ValueError(f"it has {shown(values)}: expected numbers from 0 to {LARGEST_HASH}")
    return tuple(values)


class CachedBlocks:
    """Takes changes over, and numbers the events that tell of them.

    ``worker_id`` is the worker's instance id, 0 while it has none: then there are no events. Under another
    id the numbers begin with 0 again; what is cached stays.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, None] = {}
        self._worker_id = 0
        self._next_event = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def events(self, worker_id: int, changes: Sequence[BlockChange]) -> list[KvEvent]:
        """Take the changes over; return the events that tell of them."""
        self._belong_to(worker_id)
        for change in changes:
            self._apply(change)
        if not worker_id:
            return []
        first = self._next_event
        self._next_event += len(changes)
        return [KvEvent(worker_id, number, change) for number, change in enumerate(changes, first)]

    def snapshot(self, worker_id: int) -> CacheSnapshot:
        self._belong_to(worker_id)
        return CacheSnapshot(worker_id, self._next_event - 1, tuple(self._blocks))

    def _belong_to(self, worker_id: int) -> None:
        if worker_id != self._worker_id:
            self._worker_id, self._next_event = worker_id, 0

    def _apply(self, change: BlockChange) -> None:
        match change:
            case Stored(_, hashes, _):
                self._blocks.update(dict.fromkeys(hashes))
            case Removed(hashes):
                for block in hashes:
                    self._blocks.pop(block, None)
            case _:
                self._blocks.clear()
