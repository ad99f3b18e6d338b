"""What arrives in one turn of the loop is passed on together."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from dynaplan.http.stream_batching import StreamBatch


class Journal:
    """Two streams of one turn, and in which order they are handled, written and closed."""

    def __init__(self) -> None:
        self.batch = StreamBatch()
        self.entries: list[str] = []
        self.batch.begin_stream()
        self.batch.begin_stream()

    def data_received(self, data: bytes) -> None:
        self.entries.append(f"handle {data.decode()}")
        assert self.batch.writes is not None
        self.batch.writes.append((cast(asyncio.WriteTransport, self), data))

    def close(self) -> None:
        self.entries.append("close")

    def write(self, data: bytes) -> None:
        self.entries.append(f"write {data.decode()}")


class Failing(Journal):
    def data_received(self, data: bytes) -> None:
        raise ValueError("of this stream")


async def test_all_is_handled_before_anything_is_written() -> None:
    here = Journal()
    here.batch.add(here, b"1")
    here.batch.add(here, b"2")
    assert here.entries == []
    await asyncio.sleep(0)
    assert here.entries == ["handle 1", "handle 2", "write 1", "write 2"]
    assert here.batch.writes is None


async def test_a_stream_that_fails_is_closed_and_takes_no_other_with_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    here, failing = Journal(), Failing()
    here.batch.add(failing, b"1")
    here.batch.add(here, b"2")
    await asyncio.sleep(0)
    assert here.entries == ["handle 2", "write 2"]
    assert failing.entries == ["close"]
    assert "of this stream" in caplog.text
    assert here.batch.gathers


async def test_a_stream_that_is_alone_gathers_nothing() -> None:
    here = Journal()
    here.batch.end_stream()
    assert not here.batch.gathers
