"""How events are written over NATS: in the seed's form, and in the original's.

The form of events on the wire: the bytes that Dynamo 1.6.1 sent are read, and written alike.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaplan.events.subjects import Event, Subject, matches
from dynaplan.events.wire_formats import (
    DynamoFormat,
    Envelope,
    PlainFormat,
    WireFormat,
    encode_payload,
    message_id,
    parse_message_id,
    payload_reader,
    read_envelope,
)

SUBJECT = Subject("vllm-agg", "backend", "kv_cache_update")
OTHER = Subject("vllm-agg", "backend", "load")


def test_the_seeds_form_is_the_payload_under_its_subject() -> None:
    wire = PlainFormat()
    assert wire.subject(SUBJECT) == "vllm-agg.backend.kv_cache_update"
    assert wire.message(Envelope(7, 3, 0, "kv_cache_update", b"\x00x")) == b"\x00x"
    assert wire.event(str(SUBJECT), b"x", "1f-3") == Event(str(SUBJECT), b"x", 0x1F, 3)
    assert wire.event(str(SUBJECT), b"x", "") == Event(str(SUBJECT), b"x")


def test_the_originals_form_has_its_subjects_and_an_envelope() -> None:
    wire = DynamoFormat()
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
@pytest.mark.parametrize("wire", [PlainFormat(), DynamoFormat()])
def test_patterns_hear_the_same_in_both_forms(wire: WireFormat, pattern: str, heard: set[Subject]) -> None:
    written = wire.patterns(pattern)
    found = {each for each in (SUBJECT, OTHER) if any(matches(one, wire.subject(each)) for one in written)}
    assert found == heard


def test_an_envelope_is_a_map() -> None:
    assert encode_payload(Envelope(1, 2, 3, "t", b""))[:1] == b"\x85"


@given(st.integers(1, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_an_id_is_read_as_it_was_written(publisher: int, sequence: int) -> None:
    assert parse_message_id(message_id(publisher, sequence)) == (publisher, sequence)


@pytest.mark.parametrize(
    "text", ["", "x", "1f", "zz-1", "1--3", "1ffffffffffffffff-1", "1-99999999999999999999"]
)
def test_another_programs_id_is_none_of_ours(text: str) -> None:
    assert parse_message_id(text) == (0, 0)


ZMQ_HEAD_BYTES = 5
"""Over ZMQ a message is a topic, the publisher's id, a sequence number, and an envelope behind a head."""

RECORDED = [
    [bytes.fromhex(frame) for frame in json.loads(line)]
    for line in Path("tests/fixtures/events/dynamo_1_6_1.zmq.jsonl").read_text().splitlines()
]
NUMBERS = st.integers(0, 2**64 - 1)
ENVELOPES = st.builds(Envelope, NUMBERS, NUMBERS, NUMBERS, st.text(max_size=20), st.binary(max_size=100))


def envelope_of(frames: list[bytes]) -> Envelope:
    return read_envelope(frames[-1][ZMQ_HEAD_BYTES:])


@pytest.mark.parametrize("frames", RECORDED)
def test_what_dynamo_sent_is_read_and_written_alike(frames: list[bytes]) -> None:
    envelope = envelope_of(frames)
    assert envelope.topic.encode() == frames[0]
    assert envelope.publisher_id == int.from_bytes(frames[1])
    assert envelope.sequence == int.from_bytes(frames[2])
    # Dynamo's writer takes 8 bytes for a number that would fit fewer; every reader takes both.
    assert read_envelope(encode_payload(envelope)) == envelope


def test_the_recorded_kv_events_say_what_was_published() -> None:
    read = payload_reader(list)
    events = [read(envelope_of(frames).payload)[0] for frames in RECORDED if frames[0] == b"kv-events"]
    assert [event["event"]["event_id"] for event in events] == [1, 2, 3, 4]
    stored = [event["event"]["data"]["stored"] for event in events[:3]]
    assert [each["blocks"][0]["block_hash"] for each in stored] == [11, 12, 13]
    assert [each["parent_hash"] for each in stored] == [None, 11, 12]
    assert events[3]["event"]["data"] == {"removed": {"block_hashes": [11]}}


@given(ENVELOPES)
def test_an_envelope_is_read_as_it_was_written(envelope: Envelope) -> None:
    assert read_envelope(encode_payload(envelope)) == envelope


@given(st.binary(max_size=80) | ENVELOPES.map(encode_payload), st.data())
def test_reading_an_envelope_does_not_raise_anything_but_value_errors(
    message: bytes, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(message)))
    try:
        read_envelope(message[:cut] + data.draw(st.binary(max_size=4)) + message[cut + 1 :])
    except ValueError:
        pass


def test_a_fault_of_an_envelope_is_named() -> None:
    with pytest.raises(ValueError, match="invalid"):
        read_envelope(b"\xc1")


@dataclass
class Load:
    worker: str
    blocks: list[int]
    usage: float | None = None


def test_a_dataclass_travels_as_a_map() -> None:
    payload = encode_payload(Load("w", [1, 2**64 - 1]))
    assert payload_reader(Load)(payload) == Load("w", [1, 2**64 - 1])
    assert payload_reader(dict)(payload) == {"worker": "w", "blocks": [1, 2**64 - 1], "usage": None}


@given(st.binary(max_size=50))
def test_reading_a_payload_does_not_raise_anything_but_value_errors(payload: bytes) -> None:
    for kind in (Load, dict, list, str, int):
        try:
            payload_reader(kind)(payload)
        except ValueError:
            pass


@pytest.mark.parametrize("payload", [b"\x91" * 100_000, b"\xa1\xff", b"\xc4", b""])
def test_what_is_too_deep_or_no_text_or_cut_is_no_payload(payload: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        payload_reader(object)(payload)


def test_what_has_no_form_is_refused_at_once() -> None:
    with pytest.raises(TypeError):
        encode_payload(object())
    with pytest.raises(ValueError, match="Path"):
        payload_reader(Path)(encode_payload("x"))
