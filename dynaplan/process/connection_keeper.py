"""Clients' connections outlive the frontend that has accepted them: the program that holds a copy of each.

The kernel closes a socket when its last descriptor is closed, so a frontend that is killed would cut all its
clients. It passes a copy of each accepted socket to the keeper (``SCM_RIGHTS``), a process that does nothing
with it: no byte of a request or of a token passes the keeper while the frontend lives. Beside the socket the
two share a *slot* of memory (a memfd), into which the frontend writes what somebody else would need to go on.

When the frontend dies, each of its connections is in one of four states, which its slot says:

    1. WAITING: a request has come, in part or whole, and nothing of its answer was sent; or nothing has come
       yet. The bytes that came are in the slot: they are sent over a new connection to the public port, where
       the next frontend listens, and from then on the keeper passes bytes on both ways. The client notices
       nothing. The worker of the first attempt sees its connection close, and stops.
    2. BEGUN: a part of the answer was sent. The slot has the last words: an event that says that the stream
       has ended and may be asked for again. They are sent, and the connection is closed.
    3. CLOSED: the frontend has given it up, or something of its last answer may be unsent. It is closed.
    4. LOST: the request does not fit into the slot. It is answered 503, to be tried again.

A connection that has come from the keeper is not gone on with a second time: a request that kills every
frontend that reads it would be asked for ever.

**Wire.** A frontend connects to the keeper's unix socket (SOCK_SEQPACKET) and sends, a message each: HELLO
with the memfd and the public address; TAKE with a slot's number and a socket; DROP with a slot's number, when
its connection is closed; BYE, when the frontend ends in order. When the channel ends without BYE, and the
process with it, the frontend has died. One that has ended its channel alone keeps no connections any more.

Not kept: connections over TLS, whose state is in the frontend's memory; those without a free slot; one that
was accepted when the kill came before its TAKE. Should the keeper be killed, connections go on as without it.
"""

from __future__ import annotations

import mmap
import os
import resource
import select
import selectors
import socket
import struct
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

KEEPER_VARIABLE = "DYNAPLAN_CONNECTION_KEEPER"
"""The variable that tells frontends the path of the keeper's socket."""

WAITING, BEGUN, CLOSED, LOST = range(4)

SLOT_BYTES = 1024 * 1024
"""A slot: its head, the last words, and what has come. Pages that were never written cost nothing."""

HEAD = struct.Struct("<BxHI")
"""State, length of the last words, length of what has come; all that is written of a slot at once."""

LAST_WORDS_AT, RECEIVED_AT = 64, 2048
MOST_LAST_WORDS_BYTES = RECEIVED_AT - LAST_WORDS_AT
MOST_RECEIVED_BYTES = SLOT_BYTES - RECEIVED_AT

HELLO, TAKE, DROP, BYE = b"H", b"T", b"D", b"B"
NUMBER = struct.Struct("<I")
MESSAGE_BYTES = 256
CREDENTIALS = struct.Struct("3i")
"""``struct ucred``: pid, uid and gid."""

DEATH_S = 1.0
"""Time from the end of a dying process' channel to its own end, at most."""

BUFFER_BYTES = 256 * 1024
"""Bytes of one direction of a connection that wait at most."""

CONNECT_RETRY_S, CONNECT_TIMEOUT_S = 0.1, 60.0
"""Pause between two attempts to reach the public port, and the time after which the client is let go."""

_BODY = b'{"error": {"message": "The frontend ended while this request waited. Try again.", "code": 503}}'
NO_ANSWER = (
    b"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\n"
    b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)


class FrontendChannel:
    """One frontend that is connected to the keeper: its memory, its public address and its connections."""

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        credentials = channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
        try:
            self.process = os.pidfd_open(CREDENTIALS.unpack(credentials)[0])
        except ProcessLookupError:
            self.process = -1
        self.memory: mmap.mmap | None = None
        self.address: tuple[str, int] = ("", 0)
        self.sockets: dict[int, socket.socket] = {}
        self.passed_on: set[int] = set()
        """The slots whose connections have come from the keeper."""

    def has_died(self) -> bool:
        """Tell whether the frontend's process has ended, or ends within DEATH_S seconds, for which it waits.

        A process that ends closes its channel a moment before.
        """
        return self.process < 0 or bool(select.select([self.process], [], [], DEATH_S)[0])

    def close(self) -> None:
        self.channel.close()
        if self.process >= 0:
            os.close(self.process)
        if self.memory is not None:
            self.memory.close()


class Passage:
    """A client's connection, and the one to the next frontend, between which bytes are passed on."""

    def __init__(self, client: socket.socket, received: bytes, address: tuple[str, int]) -> None:
        self.ends: list[socket.socket | None] = [client, None]
        self.waiting = [b"", received]
        """Bytes to be sent to the client, and to the frontend."""
        self.is_read = [True, True]
        """Whether each end may still send something."""
        self.address = address
        self.own_address: tuple[str, int] | None = None
        self.give_up_at_s = self.retry_at_s = 0.0


class Keeper:
    """Serves one unix socket; ``run`` goes on until the process ends."""

    def __init__(self, listening: socket.socket) -> None:
        self._listening = listening
        self._selector = selectors.DefaultSelector()
        self._selector.register(listening, selectors.EVENT_READ, self._accept)
        self._own_addresses: set[tuple[str, int]] = set()
        self._connecting: list[Passage] = []

    def run(self) -> None:
        while True:
            for key, _ in self._selector.select(CONNECT_RETRY_S if self._connecting else None):
                if key.fd in self._selector.get_map():  # not closed by one of these events
                    key.data()
            for passage in self._connecting[:]:
                self._connect(passage)

    # -- a frontend that lives ----------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            channel, _ = self._listening.accept()
            channel.setblocking(False)
            frontend = FrontendChannel(channel)
        except OSError as error:  # no descriptors are left, perhaps: the frontend is on its own
            print(f"a frontend is not taken: {error}", file=sys.stderr)
            return
        self._selector.register(channel, selectors.EVENT_READ, lambda: self._hear(frontend))

    def _hear(self, frontend: FrontendChannel) -> None:
        """Carry out all messages that the frontend has sent; forget it when it has ended."""
        while True:
            try:
                message, descriptors, _, _ = socket.recv_fds(frontend.channel, MESSAGE_BYTES, 1)
            except BlockingIOError:
                return
            except OSError:
                message, descriptors = b"", []
            try:
                if message[:1] in (b"", BYE):
                    self._lose(frontend, has_died=not message and frontend.has_died())
                    return
                self._carry_out(frontend, message, descriptors)
            # An IndexError: the socket did not come, for want of descriptors here.
            except (struct.error, ValueError, OSError, IndexError) as error:
                print(f"a message is not understood: {error}", file=sys.stderr)
                for descriptor in descriptors:
                    os.close(descriptor)

    def _carry_out(self, frontend: FrontendChannel, message: bytes, descriptors: list[int]) -> None:
        if message[:1] == HELLO:
            host, _, port = message[1:].decode().rpartition(" ")
            frontend.address = host, int(port)
            frontend.memory = mmap.mmap(descriptors[0], 0)
            os.close(descriptors[0])
            return
        (slot,) = NUMBER.unpack(message[1:])
        if message[:1] == TAKE:
            connection = socket.socket(fileno=descriptors[0])
            self._drop(frontend, slot)
            frontend.sockets[slot] = connection
            if _address(connection.getpeername) in self._own_addresses:
                frontend.passed_on.add(slot)
        else:
            self._drop(frontend, slot)

    def _drop(self, frontend: FrontendChannel, slot: int) -> None:
        frontend.passed_on.discard(slot)
        if connection := frontend.sockets.pop(slot, None):
            connection.close()

    # -- a frontend that has died --------------------------------------------------------------------

    def _lose(self, frontend: FrontendChannel, *, has_died: bool) -> None:
        self._selector.unregister(frontend.channel)
        for slot, connection in list(frontend.sockets.items()):
            if has_died and frontend.memory is not None:
                self._take_over(frontend, frontend.memory, slot, connection)
            else:
                connection.close()
        frontend.close()

    def _take_over(
        self, frontend: FrontendChannel, memory: mmap.mmap, slot: int, connection: socket.socket
    ) -> None:
        """Take a dead frontend's connection over, by the state in its slot of the frontend's memory.

        A request that waits for its answer is passed on to the next frontend; any other connection gets the
        end of its stream or an error, and is closed.
        """
        at = slot * SLOT_BYTES
        state, words, received = HEAD.unpack_from(memory, at)
        if state == WAITING and slot not in frontend.passed_on:
            connection.setblocking(False)  # one that was only just accepted is not yet
            bytes_received = bytes(memory[at + RECEIVED_AT : at + RECEIVED_AT + received])
            self._begin(Passage(connection, bytes_received, frontend.address))
            return
        last = b""
        if state == BEGUN:
            last = bytes(memory[at + LAST_WORDS_AT : at + LAST_WORDS_AT + words])
        elif state == LOST or received:
            last = NO_ANSWER
        _send_last(connection, last)

    def _begin(self, passage: Passage) -> None:
        if passage.waiting[1]:
            self._reconnect(passage)
        else:
            self._watch(passage)  # until the client sends something

    def _reconnect(self, passage: Passage) -> None:
        passage.give_up_at_s = time.monotonic() + CONNECT_TIMEOUT_S
        self._connecting.append(passage)

    def _connect(self, passage: Passage) -> None:
        """Try to reach the next frontend."""
        now_s = time.monotonic()
        if now_s < passage.retry_at_s:
            return
        passage.retry_at_s = now_s + CONNECT_RETRY_S
        try:
            frontend = socket.create_connection(passage.address, timeout=0.2)
        except OSError:
            if now_s > passage.give_up_at_s:
                self._connecting.remove(passage)
                client = passage.ends[0]
                assert client is not None
                self._unwatch(client)
                _send_last(client, NO_ANSWER)
            return
        self._connecting.remove(passage)
        frontend.setblocking(False)
        passage.own_address = _address(frontend.getsockname)
        self._own_addresses.add(passage.own_address)
        passage.ends[1] = frontend
        self._watch(passage)

    # -- passing on --------------------------------------------------------------------------------

    def _watch(self, passage: Passage) -> None:
        """Wait for what each end may do next; close both ends when nothing is left to do."""
        if passage.ends[1] is not None and not (passage.is_read[1] or passage.waiting[0]):
            self._close(passage)  # the frontend has said all
            return
        for end in (0, 1):
            connection = passage.ends[end]
            if connection is None:
                continue
            events = selectors.EVENT_WRITE if passage.waiting[end] else 0
            if passage.is_read[end] and len(passage.waiting[1 - end]) < BUFFER_BYTES:
                events |= selectors.EVENT_READ
            self._unwatch(connection)
            if events:
                self._selector.register(connection, events, _bound(self._pass_on, passage))

    def _pass_on(self, passage: Passage) -> None:
        """Read and write what is possible without waiting."""
        try:
            for end in (0, 1):
                _exchange(passage, end)
        except OSError:
            self._close(passage)
            return
        if not passage.is_read[0]:
            self._close(passage)  # the client has left: the frontend is to see it
        elif passage.ends[1] is None and passage.waiting[1]:
            self._unwatch(passage.ends[0])
            self._reconnect(passage)
        else:
            self._watch(passage)

    def _close(self, passage: Passage) -> None:
        if passage.own_address:
            self._own_addresses.discard(passage.own_address)
        for connection in passage.ends:
            if connection is not None:
                self._unwatch(connection)
                connection.close()

    def _unwatch(self, connection: socket.socket | None) -> None:
        if connection is not None and connection.fileno() in self._selector.get_map():
            self._selector.unregister(connection)


def _bound(function: Callable[[Passage], None], passage: Passage) -> Callable[[], None]:
    return lambda: function(passage)


def _exchange(passage: Passage, end: int) -> None:
    """Send to that end the bytes that wait for it, and read what it has sent, as far as neither blocks."""
    connection = passage.ends[end]
    if connection is None:
        return
    try:
        if passage.waiting[end]:
            passage.waiting[end] = passage.waiting[end][connection.send(passage.waiting[end]) :]
    except BlockingIOError:
        pass
    try:
        if passage.is_read[end] and len(passage.waiting[1 - end]) < BUFFER_BYTES:
            data = connection.recv(BUFFER_BYTES)
            passage.is_read[end] = data != b""
            passage.waiting[1 - end] += data
    except BlockingIOError:
        pass


def _address(ask: Callable[[], tuple[str, int]]) -> tuple[str, int]:
    """Return the host and port that ``ask`` finds of a socket; ``("", 0)`` of a broken one.

    An IPv4 address that an IPv6 socket has mapped is returned as IPv4.
    """
    try:
        host, port, *_ = ask()
    except (OSError, ValueError):
        return "", 0
    return host.removeprefix("::ffff:"), port


def _send_last(connection: socket.socket, data: bytes) -> None:
    """Send what the client takes now, and close."""
    try:
        connection.setblocking(False)
        if data:
            connection.send(data)
            connection.shutdown(socket.SHUT_WR)
    except OSError:
        pass
    connection.close()


def listen(path: str) -> socket.socket:
    """Listen on a new unix socket at that path; what was there is replaced."""
    try:
        os.unlink(path)
    except FileNotFoundError:
        pass
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(path)
    os.chmod(path, 0o600)
    listening.listen(64)
    listening.setblocking(False)
    return listening


def main(arguments: list[str]) -> int:
    """Keep the connections of the frontends that connect to the socket that the first argument names."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
    Keeper(listen(arguments[0])).run()
    return 0
