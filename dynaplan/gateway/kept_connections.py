"""The frontend's side of the keeper: what it writes beside each connection, should it be killed.

``process.connection_keeper`` says what is kept, and what becomes of it. A connection costs two messages, at
its beginning and at its end; a request some writes into shared memory, and no system call.
"""

from __future__ import annotations

import array
import logging
import mmap
import os
import socket
import time
from collections.abc import Callable
from functools import cache

from dynaplan.gateway.error_forms import error_body, error_event
from dynaplan.gateway.ollama_api import is_ollama
from dynaplan.gateway.openai_api import ApiError
from dynaplan.process.connection_keeper import (
    BEGUN,
    BYE,
    CLOSED,
    DROP,
    HEAD,
    HELLO,
    LAST_WORDS_AT,
    LOST,
    MOST_LAST_WORDS_BYTES,
    MOST_RECEIVED_BYTES,
    NUMBER,
    RECEIVED_AT,
    SLOT_BYTES,
    TAKE,
    WAITING,
)

log = logging.getLogger(__name__)

SLOTS = 8192
RECONNECT_S = 1.0
LARGE_BYTES = 64 * 1024
"""What a request has written beyond this is given back to the kernel when it is answered."""


class KeptSlot:
    """What is written of one connection; nothing any more once it is released, when another may have it."""

    def __init__(self, memory: mmap.mmap, number: int, release: Callable[[int], None]) -> None:
        self._memory = memory
        self._number = number
        self._at = number * SLOT_BYTES
        self._release = release
        self._received_bytes = 0
        self._most_received_bytes = 0
        self._state = WAITING
        self._is_mixed = False
        self._write_head()

    def received(self, data: bytes, *, is_answer_sent: bool) -> None:
        """Keep bytes of a request, until its answer begins.

        ``is_answer_sent``: the answer before it is sent whole; otherwise the bytes are not kept.
        """
        if self._state == LOST:
            return
        if self._state == BEGUN or self._is_mixed or not is_answer_sent:
            self._is_mixed = True  # pipelined: what belongs to which request is not known here
            return
        begin, end = self._received_bytes, self._received_bytes + len(data)
        if end > MOST_RECEIVED_BYTES:
            self._state = LOST
        else:
            at = self._at + RECEIVED_AT
            self._memory[at + begin : at + end] = data
            self._received_bytes, self._state = end, WAITING
        self._write_head()

    def begin_answer(self, last_words: bytes = b"") -> None:
        """Note that the answer's bytes follow. If this process dies, the keeper ends it by ``last_words``."""
        self._state = BEGUN
        words = last_words if len(last_words) <= MOST_LAST_WORDS_BYTES else b""
        at = self._at + LAST_WORDS_AT
        self._memory[at : at + len(words)] = words
        self._write_head(len(words))

    def end_answer(self, *, is_more_coming: bool) -> None:
        """Note that the answer was written; some of it may still be on its way to the kernel.

        With ``is_more_coming``, the rest of this request or the next one, the connection is not kept on.
        """
        self._is_mixed = is_more_coming  # its beginning, or the rest of this one, goes with this
        self._state = CLOSED
        self._most_received_bytes = max(self._most_received_bytes, self._received_bytes)
        if self._most_received_bytes > LARGE_BYTES:
            self._memory.madvise(mmap.MADV_REMOVE, self._at, SLOT_BYTES)
            self._most_received_bytes = 0
        self._received_bytes = 0
        self._write_head()

    def settle(self) -> None:
        """Note that the kernel has all of the last answer: the connection is worth keeping again."""
        if self._state == CLOSED and not self._is_mixed:
            self._state = WAITING
            self._write_head()

    def release(self) -> None:
        """Have the copy of the connection closed."""
        self._release(self._number)

    def _write_head(self, words_bytes: int = 0) -> None:
        HEAD.pack_into(self._memory, self._at, self._state, words_bytes, self._received_bytes)


class KeptConnections:
    """Gives the keeper at ``path`` a copy of each connection; ``address`` is where the next frontend listens.

    Without a keeper, and when it does not take messages, connections are not kept, and it is tried again.
    """

    def __init__(self, path: str, address: tuple[str, int]) -> None:
        self._path = path
        self._address = address
        self._channel: socket.socket | None = None
        self._memory: mmap.mmap | None = None
        self._free: list[int] = []
        self._retry_at_s = 0.0

    def keep(self, descriptor: int) -> KeptSlot | None:
        """Give the keeper a copy of the connection; return its slot, None when it is not kept."""
        if self._channel is None:
            self._connect()
        if self._channel is None or self._memory is None or not self._free:
            return None
        number = self._free.pop()
        channel = self._channel
        slot = KeptSlot(self._memory, number, lambda number: self._drop(channel, number))
        return slot if self._send(TAKE + NUMBER.pack(number), descriptor) else None

    def close(self) -> None:
        """Have every copy closed: this process ends in order."""
        self._send(BYE)
        self._give_up()

    def _drop(self, channel: socket.socket, number: int) -> None:
        if channel is self._channel and self._send(DROP + NUMBER.pack(number)):
            self._free.append(number)

    def _connect(self) -> None:
        now_s = time.monotonic()
        if now_s < self._retry_at_s:
            return
        self._retry_at_s = now_s + RECONNECT_S
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            channel.setblocking(False)  # a keeper that stands still accepts nobody
            channel.connect(self._path)
            file = os.memfd_create("dynaplan-connections", os.MFD_CLOEXEC)
            try:
                os.ftruncate(file, SLOTS * SLOT_BYTES)
                self._memory = mmap.mmap(file, SLOTS * SLOT_BYTES)
                self._channel = channel
                host, port = self._address
                self._send(HELLO + f"{host} {port}".encode(), file)
            finally:
                os.close(file)
        except OSError as error:
            channel.close()
            self._channel = None
            log.warning("clients' connections end with this process: their keeper does not answer: %s", error)
            return
        self._free = list(reversed(range(SLOTS)))

    def _send(self, message: bytes, descriptor: int | None = None) -> bool:
        """Tell whether the keeper took the message; if not, all is given up until the next ``keep``."""
        if self._channel is None:
            return False
        files = [] if descriptor is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _packed(descriptor))]
        try:
            self._channel.sendmsg([message], files)
        except OSError as error:
            log.warning("clients' connections end with this process: their keeper does not listen: %s", error)
            self._give_up()
            return False
        return True

    def _give_up(self) -> None:
        """Close the channel to the keeper, which then closes its copies; this process goes on serving."""
        channel, self._channel, self._memory, self._free = self._channel, None, None, []
        if channel is not None:
            channel.close()


@cache
def last_words(path: str) -> bytes:
    """Return the chunk that ends a stream of that path whose frontend was killed, in the form of its API."""
    error = ApiError(503, "The frontend ended in the middle of this answer. Ask again.", code="retry")
    event = error_body(path, error) + b"\n" if is_ollama(path) else error_event(path, error)
    return b"%x\r\n%b\r\n" % (len(event), event)


def _packed(descriptor: int) -> bytes:
    return array.array("i", [descriptor]).tobytes()
