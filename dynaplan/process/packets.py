"""Messages between two processes of ours: marshalled tuples, one a packet, with file descriptors."""

from __future__ import annotations

# Not ``socket`` nor ``json``: they would double a process that only waits.
import _socket
import marshal
import os
import select
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

MAX_MESSAGE_BYTES = 1 << 17
MAX_DESCRIPTORS = 16
"""What one message may have. A longer text travels as a file in memory: ``read_marshalled``."""

END: tuple[Any, ...] = ()
"""What ``receive`` returns when the other end has closed its socket; nobody sends it."""


class PacketSocket:
    """One end of a ``SOCK_SEQPACKET`` pair. The other end is trusted: marshalled data is not checked."""

    def __init__(self, descriptor: int) -> None:
        os.set_inheritable(descriptor, False)
        self._socket = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET, 0, descriptor)
        self._unsent: list[tuple[bytes, list[int]]] = []

    def fileno(self) -> int:
        """Return the number of the socket's file descriptor, for ``poll``."""
        return int(self._socket.fileno())

    def close(self) -> None:
        """Close the socket, and drop what waits; the other end then receives END."""
        self._drop_unsent()
        self._socket.close()

    @property
    def has_unsent(self) -> bool:
        """True while the other end has not read enough to take everything."""
        return bool(self._unsent)

    def post(self, message: tuple[Any, ...], descriptors: Iterable[int] = ()) -> None:
        """Send a message, now or by a later ``flush``; the caller may close the descriptors at once.

        Raises ValueError for one that is too long. When the other end is gone the message is dropped.
        """
        self._queue(message, descriptors)
        self.flush()

    def flush(self) -> None:
        """Send as much as the socket takes; a peer that hangs is not waited for."""
        try:
            self._send_queued(_socket.MSG_DONTWAIT)
        except OSError:
            return  # there is no room yet; or the other end is gone, which ``receive`` reports

    def send(self, message: tuple[Any, ...], descriptors: Iterable[int] = ()) -> None:
        """Send a message, after those that wait, and wait until there is room for it.

        Raises ValueError for one that is too long, OSError when the other end is gone.
        """
        self._queue(message, descriptors)
        self._send_queued(0)

    def receive(self, *, waits: bool = False) -> tuple[tuple[Any, ...], list[int]] | None:
        """Return the next message with its descriptors; ``(END, [])`` when the other end is closed.

        None when there is no message yet, unless the call ``waits`` for one.
        """
        room = _socket.CMSG_SPACE(4 * MAX_DESCRIPTORS)
        try:
            data, ancillary, _, _ = self._socket.recvmsg(
                MAX_MESSAGE_BYTES, room, 0 if waits else _socket.MSG_DONTWAIT
            )
        except BlockingIOError:
            return None
        except OSError:
            return END, []
        descriptors = [
            int.from_bytes(numbers[at : at + 4], sys.byteorder)
            for level, kind, numbers in ancillary
            if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS)
            for at in range(0, len(numbers), 4)
        ]
        for each in descriptors:
            os.set_inheritable(each, False)
        return (marshal.loads(data) if data else END), descriptors

    def _queue(self, message: tuple[Any, ...], descriptors: Iterable[int]) -> None:
        data, numbers = marshal.dumps(message), list(descriptors)
        if len(data) > MAX_MESSAGE_BYTES or len(numbers) > MAX_DESCRIPTORS:
            raise ValueError(f"a message of {len(data)} bytes and {len(numbers)} descriptors is too long")
        self._unsent.append((data, list(map(os.dup, numbers))))

    def _send_queued(self, flags: int) -> None:
        """Send what waits, in its order; raises BlockingIOError, or OSError when the other end is gone."""
        while self._unsent:
            data, descriptors = self._unsent[0]
            numbers = b"".join(each.to_bytes(4, sys.byteorder) for each in descriptors)
            ancillary = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, numbers)] if descriptors else []
            try:
                self._socket.sendmsg([data], ancillary, flags)
            except BlockingIOError:
                raise
            except OSError:
                self._drop_unsent()
                raise
            self._drop_first()

    def _drop_unsent(self) -> None:
        while self._unsent:
            self._drop_first()

    def _drop_first(self) -> None:
        for each in self._unsent.pop(0)[1]:
            os.close(each)


def read_marshalled(descriptor: int) -> Any:
    """Return what was marshalled into a file, from its beginning."""
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        return marshal.load(file)


def is_readable(descriptor: int, within_s: float) -> bool:
    """Wait until there is something to read, or the end; tell whether there is."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * within_s))
