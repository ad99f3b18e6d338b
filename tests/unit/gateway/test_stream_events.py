"""An engine's failure found in its stream, whatever the network makes of the stream."""

from __future__ import annotations

import json
from typing import cast

import aiohttp
import pytest

from dynaplan.gateway.stream_events import WholeLines, failure_in, is_aborted

TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
DONE = b"data: [DONE]\n\n"
ABORTS = [
    b'data: {"choices":[{"index":0,"delta":{"content":""},"finish_reason":"abort"}]}\n\n',
    b'data: {"choices": [{"index": 0, "text": "", "finish_reason": "abort"}]}\n\n',
]
ERROR = b'data: {"error": {"message": "cannot go on", "type": "Internal", "code": 500}}\n\n'


class Arriving:
    """Of a response's body as it arrives: one piece for each call."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.content = self
        self._pieces = pieces

    async def readany(self) -> bytes:
        return self._pieces.pop(0) if self._pieces else b""


def lines_of(*pieces: bytes) -> WholeLines:
    return WholeLines(cast(aiohttp.ClientResponse, Arriving(list(pieces))))


async def read_all(lines: WholeLines) -> list[bytes]:
    read = []
    while piece := await lines.read():
        read.append(piece)
    return read


async def test_bytes_pass_as_they_come_when_they_end_with_a_line() -> None:
    assert await read_all(lines_of(TOKEN, TOKEN + TOKEN, DONE)) == [TOKEN, TOKEN + TOKEN, DONE]


@pytest.mark.parametrize("size", [1, 2, 7, 50, 1000])
async def test_however_a_stream_is_cut_it_passes_in_whole_lines_and_complete(size: int) -> None:
    stream = TOKEN + ABORTS[0] + TOKEN + DONE
    read = await read_all(lines_of(*(stream[at : at + size] for at in range(0, len(stream), size))))
    assert b"".join(read) == stream
    assert all(piece.endswith(b"\n") for piece in read)
    assert any(failure_in(piece) for piece in read)


async def test_the_end_of_a_stream_passes_without_a_line_end_too() -> None:
    assert await read_all(lines_of(TOKEN + b"data: [DO", b"NE]")) == [TOKEN, b"data: [DONE]"]


@pytest.mark.parametrize("abort", ABORTS)
def test_an_abort_is_a_failure_after_the_events_before_it(abort: bytes) -> None:
    failure = failure_in(TOKEN + TOKEN + abort + DONE)
    assert failure
    assert (failure.good, failure.event, failure.is_clients_fault) == (TOKEN + TOKEN, b"", False)


def test_an_error_event_is_a_failure_to_pass_on() -> None:
    failure = failure_in(TOKEN + ERROR + DONE)
    assert failure
    assert (failure.good, failure.event, failure.status) == (TOKEN, ERROR, 500)


@pytest.mark.parametrize(
    ("event", "status"),
    [
        (b'data: {"error":{"message":"too long","code":400}}\n\n', 400),
        (b'data: {"object":"error","message":"too long","code":400}\n\n', 400),
        (b'data: {"error":{"message":"too long","code":"odd"}}\n\n', 500),
        (b'data: {"error":"too long"}\n\n', 500),
        (b'data: {"error"\n\n', 500),
    ],
)
def test_an_error_event_says_whose_fault_it_is(event: bytes, status: int) -> None:
    failure = failure_in(event)
    assert failure
    assert failure.status == status
    assert failure.to_api_error().status == (400 if status == 400 else 502)


@pytest.mark.parametrize(
    "text", ['"finish_reason":"abort"', 'data: {"error": {}}', '\ndata: {"error": {}}', '"abort" "error"']
)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_a_text_that_looks_like_a_failure_is_none(text: str, separators: tuple[str, str]) -> None:
    choice = {"delta": {"content": text}, "finish_reason": None}
    event = b"data: " + json.dumps({"choices": [choice]}, separators=separators).encode() + b"\n\n"
    assert failure_in(TOKEN + event) is None
    assert not is_aborted(event)


def test_a_whole_answer_is_aborted_when_one_of_its_choices_is() -> None:
    choices = [{"text": "a", "finish_reason": "stop"}, {"text": "b", "finish_reason": "abort"}]
    assert is_aborted(json.dumps({"choices": choices}).encode())
    assert not is_aborted(json.dumps({"choices": choices[:1]}).encode())
