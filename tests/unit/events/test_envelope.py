"""The form of events on the wire: the bytes that Dynamo 1.6.1 sent are read, and written alike."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaplan.events.wires import Envelope, envelope_bytes, payload_reader, read_envelope, written

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
    assert read_envelope(envelope_bytes(envelope)) == envelope


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
    assert read_envelope(envelope_bytes(envelope)) == envelope


@given(st.binary(max_size=80) | ENVELOPES.map(envelope_bytes), st.data())
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
    payload = written(Load("w", [1, 2**64 - 1]))
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
        written(object())
    with pytest.raises(ValueError, match="Path"):
        payload_reader(Path)(written("x"))
