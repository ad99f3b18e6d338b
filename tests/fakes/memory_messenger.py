"""Messages and work queues in one process, in place of ``NatsMessenger``."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from dynaplan.events.port import WorkQueue
from dynaplan.events.subjects import matches
from dynaplan.events.timing import QUEUE_MAX_AGE_S
from dynaplan.util.clock import Clock
from dynaplan.util.errors import QueueUnavailable

ACK_WAIT_S = 3.0

MIN_WAIT_S = 1e-3
"""Seconds: a wait shorter than a clock can tell would never be over."""

Receive = Callable[[str, bytes], None]


@dataclass(eq=False)
class _Server:
    """The state that the messengers of one "server" share."""

    clock: Clock
    ack_wait_s: float
    is_available: bool = True
    receivers: list[tuple[MemoryMessenger, str, Receive]] = field(default_factory=list)
    streams: dict[str, _Stream] = field(default_factory=dict)

    def check(self) -> None:
        if not self.is_available:
            raise QueueUnavailable("the messenger in memory is switched off")


class MemoryMessenger:
    """The twin of ``NatsMessenger``: subjects, wildcards and queues behave as in NATS.

    ``peer()`` is another connection to the same server. Setting ``is_available`` to False, on any of them,
    makes every call raise QueueUnavailable, as when the server is away.
    """

    def __init__(self, clock: Clock, *, ack_wait_s: float = ACK_WAIT_S) -> None:
        self._server = _Server(clock, ack_wait_s)
        self._is_closed = False

    def peer(self) -> MemoryMessenger:
        """Another connection to the same server."""
        peer = MemoryMessenger(self._server.clock)
        peer._server = self._server
        return peer

    @property
    def is_available(self) -> bool:
        """False while a test has the server switched off; calls then raise QueueUnavailable."""
        return self._server.is_available

    @is_available.setter
    def is_available(self, value: bool) -> None:
        self._server.is_available = value

    async def publish(self, subject: str, payload: bytes) -> None:
        """Send the payload to the present subscribers."""
        self._check()
        for _, pattern, receive in self._server.receivers:
            if matches(pattern, subject):
                asyncio.get_running_loop().call_soon(receive, subject, payload)

    async def subscribe(self, subject: str, receive: Receive) -> None:
        """Call ``receive(subject, payload)`` for every message from now on."""
        self._check()
        self._server.receivers.append((self, subject, receive))

    async def queue(self, stream: str, taker: str = "") -> WorkQueue:
        """The work queue of that stream, or a lane in it: the same one for everybody."""
        self._check()
        return MemoryQueue(self._server, self._server.streams.setdefault(stream, _Stream()), taker)

    async def close(self) -> None:
        """End every subscription of this connection."""
        self._is_closed = True
        self._server.receivers = [entry for entry in self._server.receivers if entry[0] is not self]

    def _check(self) -> None:
        if self._is_closed:
            raise QueueUnavailable("the messenger in memory is closed")
        self._server.check()


@dataclass(eq=False)
class _Work:
    payload: bytes
    put_s: float
    lane: str = ""
    due_s: float = 0.0  # may be delivered from then on
    deliveries: int = 0


@dataclass(eq=False)
class _Stream:
    """The work of one stream, in all lanes; the empty one is shared."""

    sequences: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    work: dict[int, _Work] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)


class MemoryQueue:
    """The twin of the JetStream queue: work is delivered again after ``ack_wait_s``, by the clock given."""

    def __init__(self, server: _Server, stream: _Stream, lane: str) -> None:
        self._clock = server.clock
        self._check = server.check
        self.ack_wait_s = server.ack_wait_s
        self._stream = stream
        self._lane = lane

    async def put(self, payload: bytes) -> int:
        """Append the work; its sequence number."""
        self._check()
        sequence = next(self._stream.sequences)
        self._stream.work[sequence] = _Work(payload, self._clock.now_s(), self._lane)
        self.wake()
        return sequence

    async def get(self, timeout_s: float) -> MemoryWorkItem | None:
        """The next piece of work, or None when there is none in that time."""
        deadline_s = self._clock.now_s() + timeout_s
        while True:
            self._check()
            now_s = self._clock.now_s()
            mine = {number: work for number, work in self._kept().items() if work.lane == self._lane}
            for sequence, work in mine.items():
                if work.due_s <= now_s:
                    return self._deliver(sequence, work, now_s)
            if now_s >= deadline_s:
                return None
            await self._wait(min([deadline_s, *(work.due_s for work in mine.values())]) - now_s)

    async def remove(self, sequence: int) -> None:
        """Withdraw work that nobody needs any more; nothing happens when it is gone already."""
        self._check()
        self._stream.work.pop(sequence, None)

    async def depth(self) -> int:
        """Return the number of pieces of work not done, of the shared queue with those in all lanes."""
        self._check()
        return len(self._counted())

    async def clear(self) -> None:
        """Withdraw all work of the lane, taken or not; of the shared queue that in all lanes too."""
        self._check()
        for sequence in self._counted():
            del self._stream.work[sequence]

    def _kept(self) -> dict[int, _Work]:
        """Drop the work that is there for too long; return the rest, oldest first."""
        work, since_s = self._stream.work, self._clock.now_s() - QUEUE_MAX_AGE_S
        while work and (oldest := next(iter(work.items())))[1].put_s < since_s:
            del work[oldest[0]]
        return work

    def _counted(self) -> list[int]:
        work = self._kept().items()
        return [sequence for sequence, each in work if not self._lane or each.lane == self._lane]

    def wake(self) -> None:
        """Let every waiting ``get`` look again."""
        self._stream.changed.set()
        self._stream.changed = asyncio.Event()

    def _deliver(self, sequence: int, work: _Work, now_s: float) -> MemoryWorkItem:
        work.due_s = now_s + self.ack_wait_s
        work.deliveries += 1
        return MemoryWorkItem(self, sequence, work)

    async def _wait(self, seconds: float) -> None:
        """Wait until something has changed, or that many seconds have passed."""
        waits = {
            asyncio.ensure_future(self._stream.changed.wait()),
            asyncio.ensure_future(self._clock.sleep(max(seconds, MIN_WAIT_S))),
        }
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)

    def set_due(self, sequence: int, delivery: int, after_s: float) -> None:
        """Deliver the work (again) after that time, unless it was delivered to another worker meanwhile."""
        self._check()
        work = self._stream.work.get(sequence)
        if work is not None and work.deliveries == delivery:
            work.due_s = self._clock.now_s() + after_s
            self.wake()


class MemoryWorkItem:
    """One delivery of one piece of work; see ``dynaplan.events.port.WorkItem``."""

    def __init__(self, queue: MemoryQueue, sequence: int, work: _Work) -> None:
        self.payload = work.payload
        self.sequence = sequence
        self._queue = queue
        self._delivery = work.deliveries

    @property
    def deliveries(self) -> int:
        """The number of its deliveries, this one included."""
        return self._delivery

    async def ack(self) -> None:
        """Remove the work: it is done."""
        await self._queue.remove(self.sequence)

    async def in_progress(self) -> None:
        """Tell the queue that the work goes on: the time allowed for it starts anew."""
        self._queue.set_due(self.sequence, self._delivery, self._queue.ack_wait_s)
