"""Whose turn a connection is, none lost at the end, and rest when the machine has no more.

The number of connections stays below that of the descriptors.

Connections over TLS: nothing is lost between handshake and protocol, and bad handshakes harm nobody.

Each rule holds on both event loops that processes run on.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import uvloop

from dynaplan.http import acceptor
from dynaplan.http.accept_shares import AcceptShares
from dynaplan.http.acceptor import MAX_ACCEPTED_A_TURN, Acceptor
from dynaplan.http.limits import MAX_CONNECTIONS, ConnectionLimits, raw_error
from dynaplan.http.tls import ServerTls
from dynaplan.util.sockets import bound_socket, holding_socket
from tests.fakes.certificates import Authority
from tests.fakes.polling import eventually


class Greeter(asyncio.Protocol):
    """Answers with its name, and closes the connection, unless that is kept."""

    def __init__(self, name: bytes, *, is_kept: bool = False) -> None:
        self._name = name
        self._is_kept = is_kept

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._name)
        if not self._is_kept:
            transport.close()


@contextmanager
def clients(port: int, number: int) -> Iterator[list[socket.socket]]:
    opened = [socket.create_connection(("127.0.0.1", port), 5) for _ in range(number)]
    yield opened
    for each in opened:
        each.close()


async def greetings(connections: list[socket.socket]) -> list[bytes]:
    return [await asyncio.to_thread(connection.recv, 10) for connection in connections]


async def test_processes_on_one_socket_share_what_waits(tmp_path: Path) -> None:
    """Two acceptors in one loop."""
    listen_on = bound_socket("127.0.0.1", 0)
    both = [
        Acceptor(copy, lambda _, name=name: Greeter(name, is_kept=True), shares=AcceptShares(tmp_path))  # type: ignore[misc]
        for copy, name in ((listen_on, b"a"), (listen_on.dup(), b"b"))
    ]
    listen_on.listen()
    with clients(both[0].address[1], 3 * MAX_ACCEPTED_A_TURN) as waiting:
        for acceptor in both:
            acceptor.start()
        answers = await greetings(waiting)
    for acceptor in both:
        await acceptor.stop()
    assert Counter(answers) == dict.fromkeys((b"a", b"b"), len(waiting) // 2)


async def test_a_process_that_is_alone_accepts_several_in_a_turn_and_no_more_than_have_room() -> None:
    accepted: list[socket.socket] = []

    def welcome(connection: socket.socket) -> asyncio.Protocol:
        accepted.append(connection)
        return Greeter(b"a")

    listen_on = bound_socket("127.0.0.1", 0)
    listen_on.listen()
    acceptor = Acceptor(listen_on, welcome, has_room=lambda: len(accepted) != MAX_ACCEPTED_A_TURN + 2)
    with clients(acceptor.address[1], MAX_ACCEPTED_A_TURN + 3) as waiting:
        acceptor.start()
        acceptor._accept()
        assert len(accepted) == MAX_ACCEPTED_A_TURN
        acceptor._accept()
        assert len(accepted) == MAX_ACCEPTED_A_TURN + 2
        await acceptor.stop()
        assert await greetings(waiting) == [b"a"] * len(waiting)


async def test_where_the_kernel_does_not_count_what_waits_it_is_accepted_all_the_same() -> None:
    acceptor = Acceptor(bound_socket("127.0.0.1", 0), lambda _: Greeter(b"a"))
    acceptor.start()
    with (
        mock.patch("dynaplan.http.acceptor._count_waiting", return_value=0),
        clients(acceptor.address[1], 3) as waiting,
    ):
        assert await greetings(waiting) == [b"a"] * 3
    await acceptor.stop()


async def test_what_waits_at_the_end_is_accepted_and_the_socket_of_others_stays_open() -> None:
    listen_on = bound_socket("127.0.0.1", 0)
    other = listen_on.dup()
    acceptor = Acceptor(listen_on, lambda _: Greeter(b"a"))
    acceptor.start()
    with clients(acceptor.address[1], 3) as waiting:
        await acceptor.stop()
        await acceptor.stop()
        assert await greetings(waiting) == [b"a"] * 3
    with clients(acceptor.address[1], 1):  # it waits for another process
        accepted, _ = other.accept()
        accepted.close()
    other.close()


async def test_the_port_of_a_server_that_closed_its_connections_first_can_be_held_again_at_once() -> None:
    listen_on = holding_socket("127.0.0.1", 0)
    acceptor = Acceptor(listen_on, lambda _: Greeter(b"a"))
    acceptor.start()
    port = acceptor.address[1]
    with clients(port, 1) as connections:
        assert await greetings(connections) == [b"a"]
        assert await greetings(connections) == [b""], "the server's end waits for a minute from now on"
    await acceptor.stop()
    holding_socket("127.0.0.1", port).close()


async def test_without_resources_it_rests_and_goes_on() -> None:
    acceptor = Acceptor(bound_socket("127.0.0.1", 0), lambda _: Greeter(b"a"))
    acceptor.start()
    real = acceptor._socket
    failing = mock.Mock(wraps=real, fileno=real.fileno)
    failing.accept.side_effect = OSError(errno.EMFILE, "Too many open files")
    with (
        mock.patch("dynaplan.http.acceptor.ACCEPT_PAUSE_S", 0.05),
        clients(acceptor.address[1], 1) as waiting,
    ):
        acceptor._socket = failing
        await eventually(lambda: failing.accept.called)
        acceptor._socket = real
        assert await greetings(waiting) == [b"a"]
    await acceptor.stop()


@pytest.mark.parametrize(
    ("descriptors", "most", "expected"),
    [
        (1024, 0, 462),
        (1024, 100, 100),
        (1024, 5000, 462),
        (2**20, 0, MAX_CONNECTIONS),
        (2**20, 20_000, 20_000),
        (64, 0, 1),
    ],
)
def test_the_connections_leave_descriptors_for_their_requests(
    descriptors: int, most: int, expected: int
) -> None:
    with mock.patch("dynaplan.http.limits.descriptor_limit", return_value=descriptors):
        assert ConnectionLimits(most=most).most_connections == expected


def test_an_answer_without_a_request_is_whole() -> None:
    head, _, body = raw_error(503, "full", "too_many_connections").partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert b"Retry-After: 5" in head
    assert b"Content-Length: %d" % len(body) in head
    assert b'"message": "full"' in body


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


def test_others_are_told_of_a_connection_from_its_acceptance_to_its_end(tls: ServerTls) -> None:
    """On uvloop, as all processes are that share a socket."""

    async def others_are_told(speaks: ServerTls | None) -> None:
        shares = mock.Mock(wraps=AcceptShares())
        acceptor = Acceptor(bound_socket("127.0.0.1", 0), lambda _: Echo(), shares=shares, tls=speaks)
        acceptor.start()
        with clients(acceptor.address[1], 2):
            await eventually(lambda: shares.publish.call_args == mock.call(2))
        await eventually(lambda: shares.publish.call_args == mock.call(0))
        await acceptor.stop()

    for speaks in (None, tls):  # over TLS both leave before their handshake
        uvloop.run(others_are_told(speaks))


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
    monkeypatch.setattr(acceptor, "MAX_HANDSHAKES", 2)

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
    monkeypatch.setattr(acceptor, "HANDSHAKE_TIMEOUT_S", 0.05)

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
    monkeypatch.setattr(acceptor, "TLS_CLOSE_TIMEOUT_S", 0.1)

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
