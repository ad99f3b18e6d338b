"""What arrives in one turn of the loop is passed on together."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from dynaplan.gateway.turns import Turn


class Journal:
    """Two streams of one turn, and in which order they are handled, written and closed."""

    def __init__(self) -> None:
        self.turn = Turn()
        self.entries: list[str] = []
        self.turn.begin_stream()
        self.turn.begin_stream()

    def data_received(self, data: bytes) -> None:
        self.entries.append(f"handle {data.decode()}")
        assert self.turn.writes is not None
        self.turn.writes.append((cast(asyncio.WriteTransport, self), data))

    def close(self) -> None:
        self.entries.append("close")

    def write(self, data: bytes) -> None:
        self.entries.append(f"write {data.decode()}")


class Failing(Journal):
    def data_received(self, data: bytes) -> None:
        raise ValueError("of this stream")


async def test_all_is_handled_before_anything_is_written() -> None:
    here = Journal()
    here.turn.add(here, b"1")
    here.turn.add(here, b"2")
    assert here.entries == []
    await asyncio.sleep(0)
    assert here.entries == ["handle 1", "handle 2", "write 1", "write 2"]
    assert here.turn.writes is None


async def test_a_stream_that_fails_is_closed_and_takes_no_other_with_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here, failing = Journal(), Failing()
    here.turn.add(failing, b"1")
    here.turn.add(here, b"2")
    await asyncio.sleep(0)
    assert here.entries == ["handle 2", "write 2"]
    assert failing.entries == ["close"]
    assert "of this stream" in caplog.text
    assert here.turn.gathers


async def test_a_stream_that_is_alone_gathers_nothing() -> None:
    here = Journal()
    here.turn.end_stream()
    assert not here.turn.gathers
