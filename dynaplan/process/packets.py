"""Messages between two processes of ours: marshalled tuples, one a packet, with descriptors beside them."""

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

END: tuple[Any, ...] = ()
"""The message that the other end will never send: it has closed its socket."""


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
        """Close the socket; the other end then receives END."""
        self._socket.close()

    @property
    def has_unsent(self) -> bool:
        """True while the other end has not read enough to take everything."""
        return bool(self._unsent)

    def post(self, message: tuple[Any, ...], descriptors: Iterable[int] = ()) -> None:
        """Send a message, now or as soon as there is room for it."""
        self._unsent.append((marshal.dumps(message), list(descriptors)))
        self.flush()

    def flush(self) -> None:
        """Send what there is room for; nobody waits for an end that stands still."""
        while self._unsent:
            try:
                self._transmit(*self._unsent[0], _socket.MSG_DONTWAIT)
            except BlockingIOError:
                return
            except OSError:  # the other end is gone: ``receive`` reports it
                self._unsent.clear()
                return
            self._unsent.pop(0)

    def send(self, message: tuple[Any, ...], descriptors: Iterable[int] = ()) -> None:
        """Send a message, and wait until there is room for it; raises OSError when the other end is gone."""
        self._transmit(marshal.dumps(message), list(descriptors), 0)

    def receive(self, *, waits: bool = False) -> tuple[tuple[Any, ...], list[int]] | None:
        """Return the next message with its descriptors; None when there is none yet, END at the end."""
        room = _socket.CMSG_SPACE(4 * MAX_DESCRIPTORS)
        try:
            data, beside, _, _ = self._socket.recvmsg(
                MAX_MESSAGE_BYTES, room, 0 if waits else _socket.MSG_DONTWAIT
            )
        except BlockingIOError:
            return None
        except OSError:
            return END, []
        descriptors = [
            int.from_bytes(numbers[at : at + 4], sys.byteorder)
            for level, kind, numbers in beside
            if (level, kind) == (_socket.SOL_SOCKET, _socket.SCM_RIGHTS)
            for at in range(0, len(numbers), 4)
        ]
        for each in descriptors:
            os.set_inheritable(each, False)
        return (marshal.loads(data) if data else END), descriptors

    def _transmit(self, data: bytes, descriptors: list[int], flags: int) -> None:
        numbers = b"".join(each.to_bytes(4, sys.byteorder) for each in descriptors)
        beside = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, numbers)] if descriptors else []
        self._socket.sendmsg([data], beside, flags)


def read_text(descriptor: int) -> Any:
    """Return what was marshalled into a file, from its beginning."""
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        return marshal.load(file)


def is_readable(descriptor: int, within_s: float) -> bool:
    """Wait until there is something to read, or the end; tell whether there is."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * within_s))
