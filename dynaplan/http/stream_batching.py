"""Pass on the events of several streams in batches: those that arrive in one turn of the event loop.

All are read, then all are handled, then all are written. One by one, system calls would alternate with Python
code. A Python call then costs about twice as much, because its code and data are evicted from the CPU's
caches in between. And a client's process that has read one event blocks again before the next is written:
waking it costs as much as the write. In a batch all are passed on in less time than one by one, so the first
is hardly delayed, and the last arrives sooner. The only stream of a frontend is not delayed.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

log = logging.getLogger(__name__)


class Connection(Protocol):
    """The connection by which a stream arrives."""

    def data_received(self, data: bytes) -> None:
        """Handle what has arrived, or ``add`` it to the batch that gathers."""
        ...

    def close(self) -> None: ...


class StreamBatch:
    """What has arrived in this turn of the event loop, of all streams of one frontend.

    While it ``gathers``, a stream's connection adds what arrives, and handles it when ``run`` calls the
    connection's ``data_received`` again. ``arrived`` is what was added; while it is not empty, ``run`` is
    due, and a connection may append to it itself.
    ``writes``, while it is a list, takes what is to be written, and where; else it is written at once.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._streams = 0
        self.arrived: list[tuple[Connection, bytes]] = []
        self.gathers = False
        self.writes: list[tuple[asyncio.WriteTransport, bytes]] | None = None

    def begin_stream(self) -> None:
        self._streams += 1
        self.gathers = self._streams > 1

    def end_stream(self) -> None:
        self._streams -= 1
        self.gathers = self._streams > 1

    def add(self, connection: Connection, data: bytes) -> None:
        """Have the connection handle the data at the end of this turn, in the order of arrival."""
        if not self.arrived:
            self._loop.call_soon(self.run)
        self.arrived.append((connection, data))

    def run(self) -> None:
        """Handle all that has arrived, and write what is to be written of it."""
        arrived, self.arrived = self.arrived, []
        if not arrived:
            return
        writes: list[tuple[asyncio.WriteTransport, bytes]] = []
        self.writes, self.gathers = writes, False
        for connection, data in arrived:
            try:
                connection.data_received(data)
            except Exception:  # as the event loop does with a protocol's error
                log.exception("a stream's events could not be passed on")
                connection.close()
        self.writes, self.gathers = None, self._streams > 1
        for transport, data in writes:
            transport.write(data)
