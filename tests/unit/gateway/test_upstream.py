"""A stream of an engine, cut where lines end."""

from __future__ import annotations

from typing import Any, cast

import pytest

from dynaplan.gateway.engine_answers import find_failure
from dynaplan.gateway.upstream import EngineAnswer, WorkerDied
from dynaplan.http.connections import Stalled, target_of

TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
DONE = b"data: [DONE]\n\n"
ABORT = b'data: {"choices":[{"index":0,"delta":{"content":""},"finish_reason":"abort"}]}\n\n'


class Arriving:
    """Of a connection the answer's body as it arrives: one piece for each call."""

    def __init__(self, pieces: list[bytes], error: ConnectionError | None = None) -> None:
        self._pieces = pieces
        self._error = error
        self.is_complete = False

    async def read(self) -> bytes:
        if self._error and not self._pieces:
            raise self._error
        return self._pieces.pop(0) if self._pieces else b""


def lines_of(*pieces: bytes, error: ConnectionError | None = None) -> EngineAnswer:
    arriving = cast(Any, Arriving(list(pieces), error))
    return EngineAnswer(arriving, cast(Any, None), target_of("http://w/v1"))


async def read_all(answer: EngineAnswer) -> list[bytes]:
    read = []
    while piece := await answer.read_lines():
        read.append(piece)
    return read


async def test_bytes_pass_as_they_come_when_they_end_with_a_line() -> None:
    assert await read_all(lines_of(TOKEN, TOKEN + TOKEN, DONE)) == [TOKEN, TOKEN + TOKEN, DONE]


@pytest.mark.parametrize("size", [1, 2, 7, 50, 1000])
async def test_however_a_stream_is_cut_it_passes_in_whole_lines_and_complete(size: int) -> None:
    stream = TOKEN + ABORT + TOKEN + DONE
    read = await read_all(lines_of(*(stream[at : at + size] for at in range(0, len(stream), size))))
    assert b"".join(read) == stream
    assert all(piece.endswith(b"\n") for piece in read)
    assert any(find_failure(piece) for piece in read)


async def test_the_end_of_a_stream_passes_without_a_line_end_too() -> None:
    assert await read_all(lines_of(TOKEN + b"data: [DO", b"NE]")) == [TOKEN, b"data: [DONE]"]


@pytest.mark.parametrize("last", [TOKEN, TOKEN[:20]], ids=["behind a line", "within a line"])
@pytest.mark.parametrize("kind", [ConnectionError, Stalled])
async def test_a_stream_broken_off_here_is_no_lost_connection(
    kind: type[ConnectionError], last: bytes
) -> None:
    with pytest.raises(WorkerDied) as died:
        await read_all(lines_of(last, error=kind("it broke")))
    assert died.value.is_connection_lost == (kind is ConnectionError)
