"""The form of events on the wire: the bytes that Dynamo 1.6.1 sent are read, and written alike."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaplan.events.envelope import (
    Envelope,
    envelope_bytes,
    frames_of,
    payload_reader,
    read_envelope,
    read_frames,
    written,
)

RECORDED = [
    [bytes.fromhex(frame) for frame in json.loads(line)]
    for line in Path("tests/fixtures/events/dynamo_1_6_1.zmq.jsonl").read_text().splitlines()
]
NUMBERS = st.integers(0, 2**64 - 1)
ENVELOPES = st.builds(Envelope, NUMBERS, NUMBERS, NUMBERS, st.text(max_size=20), st.binary(max_size=100))


@pytest.mark.parametrize("frames", RECORDED)
def test_what_dynamo_sent_is_read_and_written_alike(frames: list[bytes]) -> None:
    envelope = read_frames(frames)
    assert envelope.topic.encode() == frames[0]
    assert envelope.publisher_id == int.from_bytes(frames[1])
    assert envelope.sequence == int.from_bytes(frames[2])
    again = frames_of(envelope)
    assert again[:3] == frames[:3]
    # Dynamo's writer takes 8 bytes for a number that would fit fewer; every reader takes both.
    assert read_frames(again) == envelope


def test_the_recorded_kv_events_say_what_was_published() -> None:
    read = payload_reader(list)
    events = [read(read_frames(frames).payload)[0] for frames in RECORDED if frames[0] == b"kv-events"]
    assert [event["event"]["event_id"] for event in events] == [1, 2, 3, 4]
    stored = [event["event"]["data"]["stored"] for event in events[:3]]
    assert [each["blocks"][0]["block_hash"] for each in stored] == [11, 12, 13]
    assert [each["parent_hash"] for each in stored] == [None, 11, 12]
    assert events[3]["event"]["data"] == {"removed": {"block_hashes": [11]}}


@given(ENVELOPES)
def test_an_envelope_is_read_as_it_was_written(envelope: Envelope) -> None:
    assert read_frames(frames_of(envelope)) == envelope
    assert read_envelope(envelope_bytes(envelope)) == envelope


@given(st.lists(st.binary(max_size=80), max_size=6) | ENVELOPES.map(frames_of), st.data())
def test_reading_frames_does_not_raise_anything_but_value_errors(
    frames: list[bytes], data: st.DataObject
) -> None:
    if frames:
        at = data.draw(st.integers(0, len(frames) - 1))
        cut = data.draw(st.integers(0, len(frames[at])))
        frames[at] = frames[at][:cut] + data.draw(st.binary(max_size=4)) + frames[at][cut + 1 :]
    try:
        read_frames(frames)
    except ValueError:
        pass


@pytest.mark.parametrize(
    ("frames", "fault"),
    [
        ([], "it has 0 frames: expected 4"),
        ([b"", b"", b"", b"abc"], "its last frame has 3 bytes"),
        ([b"", b"", b"", b"\x02\0\0\0\0"], "its head says version 2"),
        ([b"", b"", b"", b"\x01\0\0\0\x09abc"], "and 9 bytes"),
        ([b"", b"", b"", b"\x01\0\0\0\x01\xc1"], "invalid"),
    ],
)
def test_a_fault_of_a_message_is_named(frames: list[bytes], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        read_frames(frames)


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
