"""One connection for each turn of the loop, none lost at the end, and rest when the machine has no more."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from unittest import mock

from dynaplan.util.sockets import bound_socket, holding_socket
from dynaplan.worker.http_server.acceptor import Acceptor
from tests.fakes.polling import eventually


class Greeter(asyncio.Protocol):
    """Answers with its name."""

    def __init__(self, name: bytes) -> None:
        self._name = name

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self._name)
        transport.close()


@contextmanager
def clients(port: int, number: int) -> Iterator[list[socket.socket]]:
    opened = [socket.create_connection(("127.0.0.1", port), 5) for _ in range(number)]
    yield opened
    for each in opened:
        each.close()


async def greetings(connections: list[socket.socket]) -> list[bytes]:
    return [await asyncio.to_thread(connection.recv, 10) for connection in connections]


async def test_processes_on_one_socket_share_what_waits() -> None:
    """Two acceptors in one loop: after one connection each leaves the next to the other."""
    listen_on = bound_socket("127.0.0.1", 0)
    both = [
        Acceptor(copy, lambda _, name=name: Greeter(name), is_alone=False)  # type: ignore[misc]
        for copy, name in ((listen_on, b"a"), (listen_on.dup(), b"b"))
    ]
    listen_on.listen()
    with clients(both[0].address[1], 20) as waiting:
        for acceptor in both:
            acceptor.start()
        answers = await greetings(waiting)
    for acceptor in both:
        await acceptor.stop()
    assert sorted(answers) == [b"a"] * 10 + [b"b"] * 10


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
        mock.patch("dynaplan.worker.http_server.acceptor.PAUSE_S", 0.05),
        clients(acceptor.address[1], 1) as waiting,
    ):
        acceptor._socket = failing
        await eventually(lambda: failing.accept.called)
        acceptor._socket = real
        assert await greetings(waiting) == [b"a"]
    await acceptor.stop()


async def test_a_connection_may_be_dealt_with_otherwise() -> None:
    def refuse(connection: socket.socket) -> None:
        with suppress(OSError):
            connection.send(b"full")
        connection.close()

    acceptor = Acceptor(bound_socket("127.0.0.1", 0), refuse)
    acceptor.start()
    with clients(acceptor.address[1], 1) as waiting:
        assert await greetings(waiting) == [b"full"]
    await acceptor.stop()
