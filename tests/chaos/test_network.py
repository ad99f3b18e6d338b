"""The connections in memory do what the kernel's do: each rule is tested with both."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, cast

import pytest

from dynaplan.http.acceptor import Acceptor
from tests.chaos.schedules.network import PUBLIC_PORT, MemoryAcceptor, MemorySocket, Network
from tests.chaos.schedules.virtual_time import Process, VirtualLoop
from tests.fakes.polling import eventually

RESET_AT_ONCE = struct.pack("ii", 1, 0)
"""A value of SO_LINGER: ``close`` resets the connection."""


class Heard(asyncio.Protocol):
    """Notes the bytes that it reads, and how the connection ends."""

    def __init__(self) -> None:
        self.read = b""
        self.end = ""
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.read += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.end = "reset" if exc else "closed"


class Kernel:
    """A listening socket of this machine, as ``serve`` holds one."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self._acceptors: list[Acceptor] = []
        self._heard: list[Heard] = []

    def run(self, rule: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        with self._socket:
            asyncio.run(self._followed(rule))

    async def _followed(self, rule: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        try:
            await rule(self)
        finally:
            for acceptor in self._acceptors:
                await acceptor.stop()
            for each in self._heard:
                if each.transport:
                    each.transport.abort()

    def listen(self, heard: Any = None) -> Any:
        heard = heard or Heard()
        acceptor = Acceptor(self._socket.dup(), lambda _: heard)
        acceptor.start()
        self._acceptors.append(acceptor)
        self._heard.append(heard)
        return heard

    def listen_stopped(self) -> Callable[[], None]:
        """Listen as a stopped process does; the result ends it."""
        return self._socket.dup().close

    def reset(self, transport: asyncio.Transport) -> None:
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_ONCE)
        transport.abort()


class Memory:
    """The public port of a network in memory."""

    port = PUBLIC_PORT

    def __init__(self) -> None:
        self._network = Network(Random(0))
        self._loop = VirtualLoop(self._network.connect)

    def run(self, rule: Callable[[Any], Coroutine[Any, Any, None]]) -> None:
        client = Process(self._loop, 1, "clients")
        try:
            self._loop.run_until_complete(client.context.run(self._loop.create_task, rule(self)))
        finally:
            self._loop.close()

    def listen(self, heard: Any = None) -> Any:
        return self._listen(heard)[0]

    def listen_stopped(self) -> Callable[[], None]:
        """Listen as a stopped process does; the result ends it."""
        _, server = self._listen()
        server.freeze()

        def kill() -> None:
            server.end()
            self._network.lose(server)

        return kill

    def _listen(self, heard: Any = None) -> tuple[Any, Process]:
        heard, server = heard or Heard(), Process(self._loop, 2, "Frontend")
        listen_on = MemorySocket(PUBLIC_PORT)
        server.context.run(lambda: MemoryAcceptor(self._network, listen_on, lambda _: heard).start())
        return heard, server

    def reset(self, transport: asyncio.Transport) -> None:
        cast(Any, transport).cut()


@pytest.fixture(params=[Kernel, Memory])
def place(request: pytest.FixtureRequest) -> Any:
    return request.param()


async def connect(place: Any) -> asyncio.Transport:
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_connection(asyncio.Protocol, "127.0.0.1", place.port)
    return transport


def test_what_a_client_sends_before_anybody_accepts_is_read(place: Any) -> None:
    async def rule(place: Any) -> None:
        client = await connect(place)
        client.write(b"asked ")
        heard = place.listen()
        await eventually(lambda: heard.read == b"asked ")
        client.write(b"more")
        await eventually(lambda: heard.read == b"asked more")
        assert not heard.end

    place.run(rule)


@pytest.mark.parametrize("end", ["closed", "reset"])
def test_a_connection_that_ends_before_anybody_accepts_it_has_its_bytes_and_its_end(
    place: Any, end: str
) -> None:
    async def rule(place: Any) -> None:
        client = await connect(place)
        client.write(b"asked")
        if end == "closed":
            client.close()
        else:
            place.reset(client)
        await asyncio.sleep(0.05)
        heard = place.listen()
        await eventually(lambda: heard.end)
        assert (heard.read, heard.end) == (b"asked", end)

    place.run(rule)


def test_who_pauses_reads_all_in_its_order_and_the_end_after_it(place: Any) -> None:
    async def rule(place: Any) -> None:
        client = await connect(place)
        heard = place.listen()
        await eventually(lambda: heard.transport)
        heard.transport.pause_reading()
        client.write(b"one ")
        client.write(b"two ")
        await asyncio.sleep(0.05)
        client.write(b"three")
        heard.transport.resume_reading()
        client.close()
        await eventually(lambda: heard.end)
        assert (heard.read, heard.end) == (b"one two three", "closed")

    place.run(rule)


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_connection_that_a_stopped_process_has_not_accepted_is_taken_by_another(
    place: Any, is_killed: bool
) -> None:
    async def rule(place: Any) -> None:
        kill = place.listen_stopped()
        client = await connect(place)
        client.write(b"asked")
        await asyncio.sleep(0.05)
        if is_killed:
            kill()
        heard = place.listen()
        await eventually(lambda: heard.read == b"asked")
        kill()
        await asyncio.sleep(0.05)
        assert not heard.end

    place.run(rule)


class Woken(Heard):
    """Wakes a task at bytes, which notes whether the end was heard before it ran."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        asyncio.get_running_loop().call_soon(lambda: self.seen.append(self.end))


def test_a_task_that_waits_for_bytes_is_awake_before_the_end_is_heard(place: Any) -> None:
    async def rule(place: Any) -> None:
        heard = place.listen(Woken())
        client = await connect(place)
        client.write(b"one ")
        client.write(b"two")
        client.close()
        await eventually(lambda: heard.end)
        assert heard.read == b"one two"
        assert set(heard.seen) == {""}

    place.run(rule)
