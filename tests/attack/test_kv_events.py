"""No KV event that somebody publishes breaks a frontend: whatever the payload is, it is read or refused."""

from __future__ import annotations

from contextlib import suppress

from hypothesis import given
from hypothesis import strategies as st

from dynaplan.core.events.envelope import payload_reader, written
from dynaplan.domain.wire.kv_events import (
    LARGEST_HASH,
    Cleared,
    KvEvent,
    Removed,
    Stored,
    kv_payload,
    read_kv_payload,
)
from tests.attack.fuzzing import anything, bytes_of, mutated, total

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
        value = payload_reader(object)(bytes_of(written(kv_payload(EVENTS)), data.draw))
        assert is_events(read_kv_payload(value))
