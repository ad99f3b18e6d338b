"""Connections in memory between simulated processes, under the clients and servers of aiohttp and ours.

What the kernel does is copied: bytes arrive in order, and wait until they are read; of a process that is gone
the other side hears at once (reset, or the end of the stream), after them; nobody listens: refused; a stopped
process's connections are accepted by the kernel, and nothing answers; on the public port, whose socket
``serve`` holds, connections wait for a frontend: what a stopped one has not taken another one takes.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any
from unittest.mock import patch

import aiohappyeyeballs

from tests.chaos.schedules.virtual_time import PROCESS, Process

PUBLIC_PORT = 8000


class MemorySocket:
    """A bound socket, as far as a server asks it: its address, and whether it is closed."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.is_open = True

    def getsockname(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def fileno(self) -> int:
        return 1 if self.is_open else -1

    def close(self) -> None:
        self.is_open = False

    def setblocking(self, flag: bool) -> None:
        pass

    def send(self, data: bytes) -> int:
        return len(data)

    def shutdown(self, how: int) -> None:
        pass


class Wire(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, process: Process) -> None:
        super().__init__()
        self.process = process
        self.peer: Wire | None = None
        self.protocol: Any = None
        self.is_lost = False
        self.was_cut = False
        self._is_closing = False
        self._is_paused = False
        self._unread: deque[Callable[[], None]] = deque()
        self._is_due = False

    def write(self, data: Any) -> None:
        if not self._is_closing and self.peer:
            self.peer.process.post(self.peer.receive, bytes(data))

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def receive(self, data: bytes) -> None:
        """Bytes have come."""
        self._unread.append(lambda: self.protocol.data_received(data))
        self.read_soon()

    def hear_end(self, error: Exception | None) -> None:
        """The other end is gone; nothing comes after this."""
        self._unread.append(lambda: self.lose(error))
        self.read_soon()

    def read_soon(self) -> None:
        """Read in a turn of the loop to come, one thing in each.

        As asyncio does: those that wait for bytes are awake before the end is heard.
        """
        if not self._is_due:
            self._is_due = True
            self.process.post(self._read)

    def _read(self) -> None:
        """Pass on the next thing that has come, if somebody reads; before it is accepted nobody does."""
        if PROCESS.get() is not self.process:
            return
        self._is_due = False
        if self._unread and self.protocol is not None and not (self._is_paused or self._is_closing):
            self._unread.popleft()()
            if self._unread:
                self.read_soon()

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            if self.peer:
                self.peer.process.post(self.peer.hear_end, None)
            self.process.post(self.lose, None)

    def abort(self) -> None:
        self.close()

    def lose(self, error: Exception | None) -> None:
        """The connection is gone, as this end sees it."""
        self._is_closing = True
        if self.is_lost:
            return
        self.is_lost = True
        if self.protocol is not None:
            if error is None:
                self.protocol.eof_received()
            self.protocol.connection_lost(error)

    def cut(self) -> None:
        """Somebody between the two ends resets the connection."""
        self.was_cut = True
        for end in (self, self.peer):
            if end:
                end.was_cut = True
                end.process.post(end.hear_end, ConnectionResetError(104, "Connection reset by peer"))

    def is_closing(self) -> bool:
        return self._is_closing

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def get_protocol(self) -> Any:
        return self.protocol

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)}.get(name, default)

    def can_write_eof(self) -> bool:
        return False

    def is_reading(self) -> bool:
        return not self._is_paused

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False
        self.read_soon()


class MemoryAcceptor:
    """Stands in for ``Acceptor``: takes connections of the network instead of the kernel's."""

    def __init__(self, network: Network, listen_on: MemorySocket, welcome: Callable[[Any], Any]) -> None:
        self.address = listen_on.getsockname()
        process = PROCESS.get()
        assert process
        self.process = process
        self._network = network
        self._socket = listen_on
        self._welcome = welcome

    def start(self) -> None:
        self._network.listen(self)

    async def stop(self) -> None:
        self._socket.close()
        self._network.stop_listening(self)

    async def closed(self) -> None:
        pass

    def look(self) -> None:
        """Take the connection that has waited longest, if no other process has taken it."""
        if wire := self._network.next_waiting():
            wire.process = self.process
            self.accept(wire)

    def accept(self, wire: Wire) -> None:
        """Take a connection, in this acceptor's process."""
        protocol = self._welcome(self._socket)
        if protocol is None or wire.peer is None:
            wire.close()
            return
        wire.protocol = protocol
        protocol.connection_made(wire)
        wire._is_due = False  # in the client's process, whose it was
        wire.read_soon()


class Network:
    """All listeners, and all connections that are open."""

    def __init__(self, dice: Random) -> None:
        self.dice = dice
        self.wires: list[Wire] = []
        self._listeners: dict[int, list[MemoryAcceptor]] = {}
        self._waiting: deque[Wire] = deque()
        self._last_port = 20000

    def new_socket(self) -> MemorySocket:
        self._last_port += 1
        return MemorySocket(self._last_port)

    def listen(self, acceptor: MemoryAcceptor) -> None:
        self._listeners.setdefault(acceptor.address[1], []).append(acceptor)
        if acceptor.address[1] == PUBLIC_PORT:
            for _ in self._waiting:
                acceptor.process.post(acceptor.look)

    def next_waiting(self) -> Wire | None:
        """Return the connection to the public port that has waited longest; it waits no more."""
        return self._waiting.popleft() if self._waiting else None

    def stop_listening(self, acceptor: MemoryAcceptor) -> None:
        there = self._listeners.get(acceptor.address[1], [])
        if acceptor in there:
            there.remove(acceptor)

    async def connect(
        self, protocol_factory: Any, host: Any = None, port: int = 0, sock: Any = None, **options: Any
    ) -> tuple[Wire, Any]:
        """``loop.create_connection``."""
        process = PROCESS.get()
        assert process
        port = sock.port if sock else port
        there = [each for each in self._listeners.get(port, []) if not each.process.is_dead]
        if process.is_dead or (not there and port != PUBLIC_PORT):
            raise ConnectionRefusedError(111, f"Connect call failed ('127.0.0.1', {port})")
        wire, other = Wire(process), Wire(process)
        wire.peer, other.peer = other, wire
        wire.protocol = protocol_factory()
        wire.protocol.connection_made(wire)
        self.wires = [each for each in self.wires if not each.is_lost]
        self.wires.append(wire)
        if port == PUBLIC_PORT:
            self._wait(other, there)
        else:
            acceptor = self.dice.choice(there)
            other.process = acceptor.process
            acceptor.process.post(acceptor.accept, other)
        return wire, wire.protocol

    def _wait(self, wire: Wire, there: list[MemoryAcceptor]) -> None:
        """Have the connection wait, and all that listen look: one that runs, drawn, before the others."""
        self._waiting.append(wire)
        if there:
            first = self.dice.choice([each for each in there if not each.process.is_frozen] or there)
            for acceptor in (first, *(each for each in there if each is not first)):
                acceptor.process.post(acceptor.look)

    def lose(self, process: Process) -> None:
        """The process is gone, and with it its ends of all connections."""
        for acceptors in self._listeners.values():
            acceptors[:] = [each for each in acceptors if each.process is not process]
        for wire in self.wires:
            for end in (wire, wire.peer):
                if end and end.process is process and end.peer and not end.is_lost:
                    error = ConnectionResetError(104, "Connection reset by peer")
                    is_reset = self.dice.random() < 0.5
                    end.is_lost = end._is_closing = True
                    end.peer.process.post(end.peer.hear_end, error if is_reset else None)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Have aiohttp's clients and dynaplan's servers use this network."""

        async def start_connection(addr_infos: Any, **options: Any) -> MemorySocket:
            return MemorySocket(addr_infos[0][4][1])

        def acceptor(listen_on: Any, welcome: Any, **options: Any) -> MemoryAcceptor:
            return MemoryAcceptor(self, listen_on, welcome)

        with ExitStack() as stack:
            stack.enter_context(patch.object(aiohappyeyeballs, "start_connection", start_connection))
            stack.enter_context(patch("dynaplan.http.server.Acceptor", acceptor))
            yield
