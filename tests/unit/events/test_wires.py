"""How events are written over NATS: in the seed's form, and in the original's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaplan.events.subjects import Event, Subject, matches
from dynaplan.events.wires import (
    Envelope,
    EventWire,
    OriginalWire,
    SeedWire,
    envelope_bytes,
    event_of,
    message_id,
    parse_message_id,
)

SUBJECT = Subject("vllm-agg", "backend", "kv_cache_update")
OTHER = Subject("vllm-agg", "backend", "load")


def test_the_seeds_form_is_the_payload_under_its_subject() -> None:
    wire = SeedWire()
    assert wire.subject(SUBJECT) == "vllm-agg.backend.kv_cache_update"
    assert wire.message(Envelope(7, 3, 0, "kv_cache_update", b"\x00x")) == b"\x00x"
    assert wire.event(str(SUBJECT), b"x", "1f-3") == Event(str(SUBJECT), b"x", 0x1F, 3)
    assert wire.event(str(SUBJECT), b"x", "") == Event(str(SUBJECT), b"x")


def test_the_originals_form_has_its_subjects_and_an_envelope() -> None:
    wire = OriginalWire()
    assert wire.subject(SUBJECT) == "namespace.vllm-agg.component.backend.endpoint.generate.kv-events"
    assert wire.subject(OTHER) == "namespace.vllm-agg.component.backend.endpoint.generate.load"
    data = wire.message(Envelope(7, 3, 0, "kv-events", b"x"))
    assert wire.event(wire.subject(SUBJECT), data, "") == Event(str(SUBJECT), b"x", 7, 3)
    short = "namespace.vllm-agg.component.backend.load"
    assert wire.event(short, data, "") == Event(str(OTHER), b"x", 7, 3)
    assert wire.event("a.b", data, "") == Event("a.b", b"x", 7, 3)
    with pytest.raises(ValueError, match=r"."):
        wire.event(wire.subject(SUBJECT), b"no envelope", "")


@pytest.mark.parametrize(
    ("pattern", "heard"),
    [
        ("vllm-agg.backend.kv_cache_update", {SUBJECT}),
        ("vllm-agg.*.kv_cache_update", {SUBJECT}),
        ("vllm-agg.backend.*", {SUBJECT, OTHER}),
        ("vllm-agg.>", {SUBJECT, OTHER}),
        (">", {SUBJECT, OTHER}),
        ("*.*.load", {OTHER}),
        ("vllm-agg.backend", set()),
    ],
)
@pytest.mark.parametrize("wire", [SeedWire(), OriginalWire()])
def test_patterns_hear_the_same_in_both_forms(wire: EventWire, pattern: str, heard: set[Subject]) -> None:
    written = wire.patterns(pattern)
    found = {each for each in (SUBJECT, OTHER) if any(matches(one, wire.subject(each)) for one in written)}
    assert found == heard


def test_an_event_of_the_original_has_our_name() -> None:
    assert [event_of("kv-events"), event_of("kv_metrics")] == ["kv_cache_update", "kv_metrics"]
    assert envelope_bytes(Envelope(1, 2, 3, "t", b""))[:1] == b"\x85"


@given(st.integers(1, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_an_id_is_read_as_it_was_written(publisher: int, sequence: int) -> None:
    assert parse_message_id(message_id(publisher, sequence)) == (publisher, sequence)


@pytest.mark.parametrize(
    "text", ["", "x", "1f", "zz-1", "1--3", "1ffffffffffffffff-1", "1-99999999999999999999"]
)
def test_another_programs_id_is_none_of_ours(text: str) -> None:
    assert parse_message_id(text) == (0, 0)
