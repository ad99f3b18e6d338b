"""One connection of a client: what ends it, what is refused, and what a request that waits changes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest

from dynaplan.http import timing
from dynaplan.http.limits import MAX_HEAD_BYTES, ConnectionLimits
from dynaplan.http.messages import InvalidBody, Request, Response
from dynaplan.http.server import MAX_PIPELINED, ClientConnection, HttpServer
from tests.fakes.polling import eventually

GET = b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n"
CHUNKED = b"POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
UPGRADE = b"GET /a HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n"

Handle = Callable[[Request], Awaitable[Response | None]]


class Wire(asyncio.Transport):
    """A connection whose client reads while it ``takes``; as asyncio's, it closes when all is sent."""

    def __init__(self, protocol: ClientConnection) -> None:
        super().__init__()
        self.written = b""
        self.writes = 0
        self.takes = True
        self.is_paused = self.is_lost = self.is_reset = self._is_closing = False
        self._protocol = protocol
        protocol.connection_made(self)

    def receive(self, data: bytes) -> None:
        if not self._is_closing:
            self._protocol.data_received(data)

    def write(self, data: Any) -> None:
        if not self._is_closing:
            self.written += bytes(data)
            self.writes += 1

    def close(self) -> None:
        self._is_closing = True
        if self.takes:
            self._lose()

    def abort(self) -> None:
        self.is_reset = self._is_closing = True
        self._lose()

    def _lose(self) -> None:
        if not self.is_lost:
            self.is_lost = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return self._is_closing

    def get_write_buffer_size(self) -> int:
        return 0 if self.takes else len(self.written)

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


async def answer_at_once(_: Request) -> Response:
    return Response.text("done")


async def read_and_answer(request: Request) -> Response:
    try:
        while await request.body.read():
            pass
    except InvalidBody as fault:
        return Response.text(str(fault), 400)
    return Response.text("done")


class Held:
    """A handler that answers when it is told to."""

    def __init__(self) -> None:
        self.go_on = asyncio.Event()
        self.asked: list[Request] = []
        self.cancelled = 0

    async def __call__(self, request: Request) -> Response:
        self.asked.append(request)
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return Response.text("done")


def connected(handle: Handle) -> tuple[Wire, HttpServer]:
    server = HttpServer(handle, ConnectionLimits())
    return Wire(ClientConnection(server)), server


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def statuses(wire: Wire) -> list[int]:
    return [int(part[2:5]) for part in wire.written.split(b"HTTP/1.")[1:] if part[1:2] == b" "]


async def test_a_malformed_chunk_after_the_answer_closes_the_connection() -> None:
    wire, _ = connected(answer_at_once)
    wire.receive(CHUNKED)
    await settle()
    wire.receive(b"ZZ\r\n")
    assert statuses(wire) == [200]
    assert wire.is_closing()


async def test_a_malformed_chunk_of_a_body_that_nobody_reads_ends_the_connection_after_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(timing, "LINGER_S", 0.0)
    wire, _ = connected(answer_at_once)
    wire.receive(CHUNKED + b"ZZ\r\n")
    await eventually(wire.is_closing)
    assert statuses(wire) == [200]
    assert b"Connection: close" in wire.written


@pytest.mark.parametrize("endless", [b"0\r\nX-T: ", b"0\r\n", b"1;"])
async def test_a_trailer_or_chunk_extension_that_never_ends_is_bounded_like_headers(endless: bytes) -> None:
    wire, _ = connected(read_and_answer)
    wire.receive(CHUNKED + b"3\r\nabc\r\n" + endless)
    sent = 0
    while not wire.written and sent <= 2 * MAX_HEAD_BYTES:
        wire.receive(b"a" * 4096)
        sent += 4096
        await settle()
    assert statuses(wire) == [400]
    assert b"larger than" in wire.written


async def test_many_trailers_are_bounded_too() -> None:
    wire, _ = connected(read_and_answer)
    wire.receive(CHUNKED + b"0\r\n")
    for _ in range(MAX_HEAD_BYTES // 1024 + 1):
        wire.receive(b"X-T: " + b"a" * 1024 + b"\r\n")
    await settle()
    assert statuses(wire) == [400]


async def test_many_small_chunks_are_no_head() -> None:
    wire, _ = connected(read_and_answer)
    wire.receive(CHUNKED)
    for _ in range(20):
        wire.receive(b"1\r\na\r\n" * 4096)
        await settle()
    wire.receive(b"0\r\n\r\n")
    await settle()
    assert statuses(wire) == [200]


async def test_a_body_is_not_counted_as_the_head_that_begins_behind_it() -> None:
    wire, _ = connected(read_and_answer)
    size = 2 * MAX_HEAD_BYTES
    head = b"POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % size
    wire.receive(head + b"x" * size + GET[:9])
    await settle()
    wire.receive(GET[9:])
    await settle()
    assert statuses(wire) == [200, 200]


async def test_a_client_that_reads_nothing_is_reset_when_the_server_closes() -> None:
    wire, server = connected(answer_at_once)
    wire.takes = False
    wire.receive(GET)
    await settle()
    await server.close(0.05)
    assert wire.is_lost


async def test_a_client_that_reads_is_not_reset_when_the_server_closes() -> None:
    wire, server = connected(answer_at_once)
    wire.receive(GET)
    await settle()
    await server.close(5)
    assert wire.is_lost
    assert not wire.is_reset


async def test_a_cut_stream_of_http_10_is_reset_because_closed_it_would_look_whole() -> None:
    async def cut(request: Request) -> None:
        request.connection.start_stream(request, {})
        await request.connection.write(b"half")
        raise RuntimeError("cut")

    wire, _ = connected(cut)
    wire.receive(GET.replace(b"1.1", b"1.0"))
    await settle()
    assert wire.is_reset


async def test_a_request_for_another_protocol_keeps_its_version_and_its_other_options() -> None:
    held = Held()
    held.go_on.set()
    wire, _ = connected(held)
    wire.receive(UPGRADE.replace(b"1.1", b"1.0"))
    await settle()
    assert wire.written.startswith(b"HTTP/1.0 200")
    wire, _ = connected(held)
    wire.receive(UPGRADE.replace(b"n: Upgrade", b"n: close, Upgrade"))
    await settle()
    assert b"Connection: close" in wire.written
    assert wire.is_closing()
    assert [request.headers.get("upgrade") for request in held.asked] == ["", ""]


@pytest.mark.parametrize(
    ("malformed", "status"),
    [
        (UPGRADE.replace(b"Host: x", b"Host: x\r\nContent-Encoding: br"), 415),
        (UPGRADE.replace(b"Host: x\r\n", b""), 400),
        (UPGRADE.replace(b"1.1", b"1.0").replace(b"Host: x", b"Transfer-Encoding: chunked"), 400),
    ],
)
async def test_a_request_for_another_protocol_is_refused_as_any_other(malformed: bytes, status: int) -> None:
    wire, _ = connected(answer_at_once)
    wire.receive(malformed)
    assert statuses(wire) == [status]
    assert b"callback" not in wire.written


async def test_any_number_of_requests_for_another_protocol_come_in_one_read() -> None:
    wire, _ = connected(answer_at_once)
    wire.receive(UPGRADE * 2000)
    await eventually(lambda: len(statuses(wire)) == 2000)


async def test_a_client_that_leaves_is_noticed_while_its_next_request_waits() -> None:
    held = Held()
    wire, _ = connected(held)
    wire.receive(GET + GET)
    await settle()
    assert not wire.is_paused
    wire.close()
    await settle()
    assert held.cancelled == 1


async def test_reading_pauses_while_too_many_requests_wait() -> None:
    held = Held()
    wire, _ = connected(held)
    wire.receive(GET * (1 + MAX_PIPELINED))
    await settle()
    assert wire.is_paused
    held.go_on.set()
    await settle()
    assert not wire.is_paused
    await eventually(lambda: statuses(wire) == [200] * (1 + MAX_PIPELINED))


async def test_what_is_malformed_behind_requests_that_wait_is_answered_after_them() -> None:
    held = Held()
    wire, _ = connected(held)
    wire.receive(GET + GET + b"\x16\x03\r\n\r\n")
    held.go_on.set()
    await eventually(lambda: statuses(wire) == [200, 200, 400])


async def test_an_error_is_lingered_on_so_that_the_client_sees_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "LINGER_S", 0.05)
    wire, _ = connected(answer_at_once)
    wire.receive(b"\x16\x03\r\n\r\n")
    assert statuses(wire) == [400]
    assert not wire.is_closing()
    wire.receive(GET)
    await eventually(wire.is_closing)
    assert statuses(wire) == [400]


@pytest.mark.parametrize("status", [499, 529, 799])
async def test_a_status_that_no_rfc_has_is_passed_on(status: int) -> None:
    async def answer(_: Request) -> Response:
        return Response.text("overloaded", status)

    wire, _ = connected(answer)
    wire.receive(GET)
    await settle()
    assert statuses(wire) == [status]
    assert wire.written.endswith(b"overloaded")


@pytest.mark.parametrize("is_raised", [True, False])
async def test_a_failure_before_the_first_part_of_a_stream_is_answered_500(is_raised: bool) -> None:
    async def fail(request: Request) -> Response:
        request.connection.start_stream(request, {})
        if is_raised:
            raise RuntimeError("before the first part")
        return Response(500, {}, b"before the first part")

    wire, _ = connected(fail)
    wire.receive(GET)
    await settle()
    assert statuses(wire) == [500]
    assert b"Content-Length" in wire.written
    assert b"chunked" not in wire.written


@pytest.mark.parametrize("is_raised", [True, False])
async def test_a_failure_after_the_first_part_of_a_stream_cuts_it(is_raised: bool) -> None:
    async def fail(request: Request) -> Response:
        request.connection.start_stream(request, {})
        await request.connection.write(b"a")
        if is_raised:
            raise RuntimeError("after the first part")
        return Response(500, {}, b"after the first part")

    wire, _ = connected(fail)
    wire.receive(GET)
    await settle()
    assert statuses(wire) == [200]
    assert wire.written.endswith(b"1\r\na\r\n")
    assert wire.is_closing()


@pytest.mark.parametrize("begins", [True, False])
async def test_a_part_that_is_held_goes_with_the_end_of_the_stream_in_one_write(begins: bool) -> None:
    async def stream(request: Request) -> None:
        connection = request.connection
        connection.start_stream(request, {})
        if begins:
            await connection.write(b"a")
        assert connection.hold(b"b")
        assert not connection.write_now(b"c"), "what is held is sent first"
        await connection.end_stream()

    wire, _ = connected(stream)
    wire.receive(GET)
    await settle()
    assert wire.writes == 1 + begins
    assert wire.written.endswith(b"\r\n\r\n" + begins * b"1\r\na\r\n" + b"1\r\nb\r\n0\r\n\r\n")
    assert not wire.is_closing()


async def test_a_part_that_is_held_is_sent_before_the_next_one_and_before_a_cut() -> None:
    async def stream(request: Request) -> None:
        connection = request.connection
        connection.start_stream(request, {})
        assert connection.hold(b"a")
        await connection.write(b"b")
        assert connection.hold(b"c")
        raise RuntimeError("cut")

    wire, _ = connected(stream)
    wire.receive(GET)
    await settle()
    assert wire.written.endswith(b"\r\n\r\n1\r\na\r\n1\r\nb\r\n1\r\nc\r\n")
    assert wire.is_closing()


async def test_an_empty_part_does_not_end_a_stream() -> None:
    async def stream(request: Request) -> None:
        connection = request.connection
        connection.start_stream(request, {})
        await connection.write(b"a")
        await connection.write(b"")
        assert connection.write_now(b"")
        assert connection.write_now(b"b")
        assert connection.write_chunk_now(b"1\r\nc\r\n")
        await connection.end_stream()

    wire, _ = connected(stream)
    wire.receive(GET)
    await settle()
    assert wire.written.endswith(b"\r\n\r\n1\r\na\r\n1\r\nb\r\n1\r\nc\r\n0\r\n\r\n")


async def test_a_write_that_is_cancelled_does_not_cancel_the_next() -> None:
    async def stream(request: Request) -> None:
        connection = request.connection
        connection.start_stream(request, {})
        protocol = cast(ClientConnection, connection)
        protocol.pause_writing()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await connection.write(b"a")
        asyncio.get_running_loop().call_soon(protocol.resume_writing)
        await connection.write(b"b")
        await connection.end_stream()

    wire, _ = connected(stream)
    wire.receive(GET)
    await eventually(lambda: wire.written.endswith(b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n"))
