"""Clients that send slowly, never read, or open more connections than there is room for."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from dynaplan.http import limits
from dynaplan.http.limits import MAX_HEAD_BYTES, MAX_HEADERS
from tests.fakes.frontend_runtime import Stage, body, stage
from tests.fakes.polling import consistently, eventually

COMPLETIONS = "/v1/completions"
MANY_TOKENS = 1_000_000
"""More than the kernel's buffers take, on both of a stream's connections."""


LIVE = b"GET /live HTTP/1.1\r\nHost: localhost\r\n\r\n"


@asynccontextmanager
async def client(here: Stage, sent: bytes = b"") -> AsyncIterator[asyncio.StreamReader]:
    """A connection on which these bytes, and no more, are sent."""
    reader, writer = await asyncio.open_connection("127.0.0.1", here.frontend.port)
    writer.write(sent)
    yield reader
    writer.close()


async def all_of(reader: asyncio.StreamReader) -> bytes:
    """What comes until the server closes the connection."""
    return await asyncio.wait_for(reader.read(), 10)


def code(answer: bytes) -> str:
    return str(json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"])


async def closed(here: Stage, reason: str) -> float:
    return await here.sample(
        f'dynamo_frontend_closed_connections_total{{dynamo_namespace="ns",reason="{reason}"'
    )


async def test_headers_that_never_end_are_answered_408() -> None:
    async with stage(head_timeout=0.1) as here:
        async with client(here, b"POST /v1/completions HTTP/1.1\r\nHost:") as reader:
            answer = await all_of(reader)
        assert answer.startswith(b"HTTP/1.1 408")
        assert code(answer) == "head_timeout"
        assert await closed(here, "head_timeout") == 1


async def test_headers_of_a_second_request_that_never_end_are_answered_408() -> None:
    async with stage(head_timeout=0.1) as here:
        reader, writer = await asyncio.open_connection("127.0.0.1", here.frontend.port)
        writer.write(LIVE)
        await reader.readuntil(b"}")
        writer.write(b"POST")
        assert (await all_of(reader)).startswith(b"HTTP/1.1 408")
        writer.close()


async def test_a_body_that_is_still_coming_is_no_slow_header() -> None:
    text = json.dumps(body(COMPLETIONS)).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(text)
    async with stage(head_timeout=0.1) as here:
        await here.worker()
        reader, writer = await asyncio.open_connection("127.0.0.1", here.frontend.port)
        writer.write(head + text[:10])
        await consistently(lambda: not reader.at_eof(), 0.3)
        writer.write(text[10:])
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        writer.close()


async def test_headers_that_are_too_large_together_are_answered_431() -> None:
    many = b"".join(b"X-%d: %b\r\n" % (number, b"x" * 4000) for number in range(17))
    assert len(many) > MAX_HEAD_BYTES
    async with stage() as here:
        async with client(here, b"GET /live HTTP/1.1\r\n" + many) as reader:
            answer = await all_of(reader)
        assert answer.startswith(b"HTTP/1.1 431")
        assert code(answer) == "head_too_large"
        assert await closed(here, "head_too_large") == 1


async def test_headers_of_the_next_request_are_limited_while_the_first_is_answered() -> None:
    many = b"".join(b"X-%d: %b\r\n" % (number, b"x" * 4000) for number in range(17))
    text = json.dumps(body(COMPLETIONS)).encode()
    first = (
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(text) + text
    )
    async with stage() as here:
        worker = await here.worker("hold_before")
        _, writer = await asyncio.open_connection("127.0.0.1", here.frontend.port)
        writer.write(first)
        await eventually(lambda: worker.in_flight == 1)
        writer.write(b"GET /live HTTP/1.1\r\n" + many)
        await eventually(lambda: worker.cancelled == 1)
        writer.close()


async def test_too_many_headers_are_answered_400() -> None:
    many = b"".join(b"X-%d: x\r\n" % number for number in range(MAX_HEADERS + 1))
    async with stage() as here, client(here, b"GET /live HTTP/1.1\r\n" + many + b"\r\n") as reader:
        assert b" 400 " in (await all_of(reader)).partition(b"\r\n")[0]


async def test_an_idle_connection_is_closed() -> None:
    async with stage(idle_timeout=0.1) as here, client(here) as silent, client(here, LIVE) as used:
        assert await all_of(silent) == b""
        assert (await all_of(used)).startswith(b"HTTP/1.1 200")


async def unread_stream(here: Stage) -> socket.socket:
    """A client that asks for a long stream, and reads nothing of it."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, ("127.0.0.1", here.frontend.port))
    text = json.dumps(body(COMPLETIONS, stream=True)).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(text)}\r\n\r\n"
    await loop.sock_sendall(connection, head.encode() + text)
    return connection


async def test_a_client_that_does_not_read_loses_its_connection_and_its_request_ends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with stage(write_timeout=0.3) as here:
        worker = await here.worker(tokens=MANY_TOKENS)
        with await unread_stream(here):
            await eventually(lambda: worker.in_flight == 1)
            await eventually(lambda: worker.in_flight == 0)
            assert await closed(here, "write_timeout") == 1
            await asyncio.wait_for(here.frontend.drain(), 5)
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) == 1
    assert "has read nothing for 0.3 s" in told[0]


async def test_a_client_that_reads_slowly_keeps_its_stream() -> None:
    async with stage(write_timeout=0.5) as here:
        worker = await here.worker(tokens=MANY_TOKENS)
        with await unread_stream(here) as connection:
            loop = asyncio.get_running_loop()

            async def is_going_on() -> bool:
                return bool(await loop.sock_recv(connection, 256 * 1024)) and not worker.cancelled

            await consistently(is_going_on, 1.5, interval_s=0.1)


async def test_with_too_many_connections_the_one_that_is_idle_for_longest_makes_room() -> None:
    loop = asyncio.get_running_loop()
    async with stage(max_connections=3) as here, client(here, LIVE) as first:
        await first.readuntil(b"}")
        # The loop's clock counts milliseconds: within one of them nobody is idle for longer.
        answered_s = loop.time()
        await eventually(lambda: loop.time() > answered_s)
        async with (
            client(here, LIVE) as second,
            client(here) as silent,
        ):
            await second.readuntil(b"}")
            async with client(here, LIVE) as fourth:
                assert (await fourth.readline()).startswith(b"HTTP/1.1 200")
                assert await all_of(first) == b""
                assert not second.at_eof()
                assert not silent.at_eof()
                assert await closed(here, "made_room") >= 1


async def test_with_too_many_busy_connections_a_new_one_is_answered_503(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with stage(max_connections=2) as here:
        worker = await here.worker("hold_before")
        requests = [asyncio.ensure_future(here.post(COMPLETIONS)) for _ in range(2)]
        await eventually(lambda: worker.in_flight == 2)
        async with client(here, LIVE) as reader:
            answer = await all_of(reader)
        assert answer.startswith(b"HTTP/1.1 503")
        assert b"Retry-After" in answer
        assert code(answer) == "too_many_connections"
        assert b"max-connections" in answer
        worker.go_on.set()
        assert [status for status, _ in await asyncio.gather(*requests)] == [200, 200]
        assert (await here.get("/live"))[0] == 200
        assert await closed(here, "too_many_connections") == 1
        await eventually(lambda: "1 connections refused" in caplog.text)


async def test_a_connection_whose_first_request_is_on_its_way_does_not_make_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with stage(max_connections=2) as here, client(here) as first, client(here) as second:
        async with client(here, LIVE) as third:
            assert (await all_of(third)).startswith(b"HTTP/1.1 503")
        assert not first.at_eof()
        assert not second.at_eof()
        monkeypatch.setattr(limits, "FIRST_REQUEST_S", 0.0)
        async with client(here, LIVE) as fourth:
            assert (await fourth.readline()).startswith(b"HTTP/1.1 200")


async def test_each_of_many_that_find_no_room_reads_why_whatever_it_sends(
    caplog: pytest.LogCaptureFixture,
) -> None:
    text = json.dumps(body(COMPLETIONS, prompt="x" * 20_000)).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(text)}\r\n\r\n".encode()
    async with stage(max_connections=2) as here:
        worker = await here.worker("hold_before")
        requests = [asyncio.ensure_future(here.post(COMPLETIONS)) for _ in range(2)]
        await eventually(lambda: worker.in_flight == 2)

        async def refused() -> bytes:
            async with client(here, head + text) as reader:
                return await all_of(reader)

        found = await asyncio.gather(*(refused() for _ in range(3 * limits.MAX_REFUSED)))
        assert {answer.partition(b"\r\n")[0] for answer in found} == {b"HTTP/1.1 503 Service Unavailable"}
        assert all(b"Retry-After" in answer for answer in found)
        worker.go_on.set()
        assert [status for status, _ in await asyncio.gather(*requests)] == [200, 200]
        await eventually(lambda: "connections refused" in caplog.text)
