"""A question for a server's health over a bare socket."""

from __future__ import annotations

import asyncio
from pathlib import Path

from dynaplan.http.probe import get_health, get_health_at

OK = b'HTTP/1.0 200 OK\r\n\r\n{"health": "true"}'


async def _get_head(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    assert (await reader.readline()).startswith(b"GET /health ")
    writer.write(OK)
    writer.close()


async def _say_nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def test_the_answer_is_returned_from_its_status_line_on(runtime_dir: Path) -> None:
    async with await asyncio.start_server(_get_head, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert await get_health(f"http://127.0.0.1:{port}", 5.0) == OK
    async with await asyncio.start_unix_server(_get_head, runtime_dir / "s"):
        assert await get_health_at(runtime_dir / "s", 5.0) == OK


async def test_silence_and_absence_are_no_answer(runtime_dir: Path) -> None:
    async with await asyncio.start_server(_say_nothing, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        assert await get_health(f"http://127.0.0.1:{port}", 0.05) == b""
    assert await get_health("http://127.0.0.1:1", 5.0) == b""
    assert await get_health("", 5.0) == b""
    assert await get_health_at(runtime_dir / "nobody", 5.0) == b""
