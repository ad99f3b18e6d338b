"""Connections over TLS: nothing is lost between handshake and protocol, and bad handshakes harm nobody.

Each rule holds on both event loops that processes run on.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from dynaplan.util.sockets import bound_socket
from dynaplan.util.tls import ServerTls
from dynaplan.worker.http_server import handshakes
from dynaplan.worker.http_server.acceptor import Acceptor
from tests.fakes.certificates import Authority
from tests.fakes.polling import eventually

Run = Callable[[Coroutine[Any, Any, None]], None]

TOO_MUCH = b"x" * (8 * 2**20)
"""More than the kernel takes for a client that does not read."""

ANSWER_S = 20.0


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    chosen: Run = request.param
    return chosen


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def tls(authority: Authority) -> ServerTls:
    files = authority.issue("server")
    return ServerTls(str(files.certificate), str(files.key))


@pytest.fixture
def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.certificate))


class Echo(asyncio.Protocol):
    """Sends back what it gets; ``events`` is what it was told."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.events.append("made")
        self.transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        assert self.transport
        self.events.append(data.decode())
        self.transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.events.append("lost")


class Listener:
    """An acceptor over TLS that hands connections to ``Echo``."""

    def __init__(self, tls: ServerTls) -> None:
        self.protocols: list[Echo] = []
        self.acceptor = Acceptor(bound_socket("127.0.0.1", 0), self._welcome, tls=tls)
        self.acceptor.start()
        self.address = self.acceptor.address

    def _welcome(self, _: socket.socket) -> Echo:
        self.protocols.append(Echo())
        return self.protocols[-1]


@asynccontextmanager
async def listening(tls: ServerTls) -> AsyncIterator[Listener]:
    listener = Listener(tls)
    try:
        yield listener
    finally:
        await listener.acceptor.stop()


async def is_served(listener: Listener, trusting: ssl.SSLContext) -> bool:
    async with asyncio.timeout(ANSWER_S):
        reader, writer = await asyncio.open_connection(*listener.address, ssl=trusting)
        writer.write(b"hello")
        answer = await reader.readexactly(5)
        writer.close()
        return answer == b"hello"


async def is_closed(client: socket.socket) -> bool:
    client.settimeout(ANSWER_S)
    return await asyncio.to_thread(client.recv, 1) == b""


def test_what_comes_with_the_end_of_the_handshake_reaches_the_protocol(
    run: Run, tls: ServerTls, trusting: ssl.SSLContext
) -> None:
    """A client of TLS 1.3 sends its request together with its last word of the handshake."""

    async def many_are_served() -> None:
        async with listening(tls) as listener:
            for _ in range(20):
                assert await is_served(listener, trusting)
            await eventually(lambda: all(each.events[-1] == "lost" for each in listener.protocols))
            assert all(each.events[:2] == ["made", "hello"] for each in listener.protocols)

    run(many_are_served())


def test_clients_without_tls_and_silent_ones_keep_nobody_waiting(
    run: Run, tls: ServerTls, trusting: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "MOST_HANDSHAKES", 2)

    async def others_are_served() -> None:
        async with listening(tls) as listener:
            reader, plain = await asyncio.open_connection(*listener.address)
            plain.write(b"GET / HTTP/1.1\r\n\r\n")
            async with asyncio.timeout(ANSWER_S):
                assert b"HTTP" not in await reader.read()
            plain.close()
            silent = [socket.create_connection(listener.address) for _ in range(5)]
            assert await is_served(listener, trusting)
            assert all([await is_closed(each) for each in silent[:3]])
            for each in silent:
                each.close()

    run(others_are_served())


def test_a_handshake_that_takes_too_long_ends(
    run: Run, tls: ServerTls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "HANDSHAKE_WITHIN_S", 0.05)

    async def it_ends() -> None:
        async with listening(tls) as listener:
            with socket.create_connection(listener.address) as silent:
                assert await is_closed(silent)

    run(it_ends())


def test_a_connection_is_closed_when_its_client_has_all(
    run: Run, tls: ServerTls, trusting: ssl.SSLContext
) -> None:
    async def it_has_all() -> None:
        async with listening(tls) as listener:
            await listener.acceptor.closed()
            reader, writer = await asyncio.open_connection(*listener.address, ssl=trusting)
            writer.write(b"hello")
            await reader.readexactly(5)
            (echo,) = listener.protocols
            assert echo.transport
            echo.transport.write(TOO_MUCH)
            echo.transport.close()
            closed = asyncio.create_task(listener.acceptor.closed())
            assert not (await asyncio.wait({closed}, timeout=0.2))[0]
            async with asyncio.timeout(ANSWER_S):
                assert len(await reader.read()) == len(TOO_MUCH)
                writer.close()
                await closed

    run(it_has_all())


def test_a_client_that_does_not_read_loses_the_rest(
    run: Run, tls: ServerTls, trusting: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handshakes, "CLOSE_WITHIN_S", 0.1)

    async def it_ends() -> None:
        async with listening(tls) as listener:
            reader, writer = await asyncio.open_connection(*listener.address, ssl=trusting)
            writer.write(b"hello")
            await reader.readexactly(5)
            writer.transport.pause_reading()
            (echo,) = listener.protocols
            assert echo.transport
            echo.transport.write(TOO_MUCH)
            echo.transport.close()
            async with asyncio.timeout(ANSWER_S):
                await listener.acceptor.closed()
            writer.transport.abort()

    run(it_ends())


def test_clients_that_shake_hands_at_the_end_are_served(
    run: Run, tls: ServerTls, trusting: ssl.SSLContext
) -> None:
    async def they_are_served() -> None:
        async with listening(tls) as listener:
            served = [asyncio.create_task(is_served(listener, trusting)) for _ in range(5)]
            await eventually(lambda: len(listener.protocols) == 5)
        assert all(await asyncio.gather(*served))

    run(they_are_served())
