"""No KV event that somebody publishes breaks a frontend or a worker: it is read, or refused."""

from __future__ import annotations

from contextlib import suppress

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from dynaplan.engines.kv_events import (
    LARGEST_HASH,
    Cleared,
    KvEvent,
    Removed,
    Stored,
    kv_payload,
    read_kv_payload,
)
from dynaplan.engines.server.block_events import BlockTranslator
from dynaplan.events.engine_batches import read_engine_events
from dynaplan.events.wire_formats import encode_payload, payload_reader
from tests.attack.fuzzing import anything, bytes_of, mutated, total
from tests.fakes.kv_recordings import recorded

EVENTS = (
    KvEvent(7587, 0, Stored(None, (LARGEST_HASH, 12), (LARGEST_HASH, 3))),
    KvEvent(7587, 1, Removed((12,))),
    KvEvent(7587, 2, Cleared()),
)


def is_events(events: object) -> bool:
    return isinstance(events, tuple) and all(isinstance(each, KvEvent) for each in events)


@given(anything)
@total
def test_any_value_is_read_or_refused(payload: object) -> None:
    with suppress(ValueError):
        assert is_events(read_kv_payload(payload))


@given(st.data())
@total
def test_a_damaged_payload_is_read_or_refused(data: st.DataObject) -> None:
    with suppress(ValueError):
        assert is_events(read_kv_payload(mutated(kv_payload(EVENTS), data.draw)))


@given(st.data())
@total
def test_damaged_bytes_are_read_or_refused(data: st.DataObject) -> None:
    with suppress(ValueError):
        value = payload_reader(object)(bytes_of(encode_payload(kv_payload(EVENTS)), data.draw))
        assert is_events(read_kv_payload(value))


RECORDED = [frames[2] for frames in recorded()[:70]]


@given(st.data())
@total
def test_a_damaged_message_of_an_engine_is_translated_or_refused(data: st.DataObject) -> None:
    real = msgspec.msgpack.decode(data.draw(st.sampled_from(RECORDED)))
    with suppress(ValueError, OverflowError):
        payload = msgspec.msgpack.encode(mutated(real, data.draw))
        damaged = bytes_of(payload, data.draw) if data.draw(st.booleans()) else payload
        translation = BlockTranslator()
        for message in (RECORDED[0], damaged, RECORDED[1]):
            changes = translation.changes(read_engine_events(message))
            assert all(isinstance(change, Stored | Removed | Cleared) for change in changes)
