"""Asking a publisher for events: what is asked for, and how the answer ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dynaplan.events.envelope import Envelope, read_frames
from dynaplan.events.replay import ReplayBuffer
from dynaplan.events.replay_requests import BATCH, answers, read_end, request_bytes


def buffer(count: int) -> ReplayBuffer:
    made = ReplayBuffer(10_000, 10**6, 10**6)
    for number in range(count):
        made.append(Envelope(7, number, number, "topic", b""))
    return made


@pytest.mark.parametrize(
    ("first", "since_ms", "numbers"),
    [(3, None, [3, 4]), (None, 4, [4]), (None, None, []), (9, None, [])],
)
def test_the_answer_has_what_was_asked_for_and_its_end(
    first: int | None, since_ms: int | None, numbers: list[int]
) -> None:
    *events, end = answers(request_bytes(first, since_ms), buffer(5), 7)
    assert [read_frames(frames).sequence for frames in events] == numbers
    assert read_end(end) == (5, 5)
    assert all(read_end(frames) is None for frames in events)


def test_a_long_answer_comes_in_parts() -> None:
    kept = buffer(BATCH + 10)
    *events, end = answers(request_bytes(0, None), kept, 7)
    assert len(events) == BATCH
    assert read_end(end) == (BATCH, BATCH + 10)
    *events, end = answers(request_bytes(BATCH, None), kept, 7)
    assert len(events) == 10
    assert read_end(end) == (BATCH + 10, BATCH + 10)


@given(st.binary(max_size=40))
def test_a_request_does_not_raise_anything_but_a_value_error(request: bytes) -> None:
    try:
        answers(request, buffer(3), 7)
    except ValueError:
        pass


@given(st.lists(st.binary(max_size=10), max_size=5))
def test_reading_an_end_never_raises(frames: list[bytes]) -> None:
    assert read_end(frames) is None or len(frames) == 4
