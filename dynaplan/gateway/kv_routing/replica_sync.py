"""Several frontends choose as one: each publishes to the others what it has sent where.

A frontend publishes ``{namespace}.{component}.active_sequences_events``: the requests and KV blocks that it
has at each worker now, and where it has sent which prompts, if that is to be predicted from. A message holds
all bookings and not their changes, so that a lost one does no harm; it is published soon after a change, and
every ``REPLICA_HEARTBEAT_S``. The bookings of a frontend that is silent for ``REPLICA_SILENT_S``, or whose
registration is removed, are dropped.
"""

from __future__ import annotations

import asyncio
import logging
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from dynaplan.events.component_events import ComponentEvents
from dynaplan.gateway import timing
from dynaplan.routing.booking import WorkerBook
from dynaplan.util.backoff import Backoff
from dynaplan.util.errors import PermanentError, QueueUnavailable
from dynaplan.util.tasks import BackgroundTasks

log = logging.getLogger(__name__)

TOPIC = "active_sequences_events"


MAX_PEERS = 100
"""Frontends that are listened to at most, besides those that are registered."""

MAX_SHARE = 2**40
"""A number of requests or KV blocks above which a message is taken for a fault."""

MAX_PROMPTS = 1000
MAX_PROMPT_BYTES = 256 * 1024
"""Prompts, and bytes of their hashes, in one message at most; of further ones only bookings are published.

A NATS server takes messages of 1 MiB unless it is told otherwise, and one prompt may have 64 KiB.
"""


@dataclass(frozen=True)
class SentPrompt:
    """A prompt that was sent to a worker; ``hashes`` are its blocks' chained hashes, 64 bits each."""

    instance_id: int
    hashes: bytes


@dataclass(frozen=True)
class WorkerShare:
    """One frontend's requests in flight at one worker, and their KV blocks."""

    instance_id: int
    in_flight: int
    active_blocks: int
    prefill_blocks: int


@dataclass(frozen=True)
class ActiveSequences:
    """One message: all that a frontend has in flight, and the prompts that it has sent since the last one.

    ``frontend`` is its instance id.
    """

    frontend: int
    workers: tuple[WorkerShare, ...] = ()
    sent: tuple[SentPrompt, ...] = ()


@dataclass
class _Peer:
    """Another frontend, by its last message."""

    received_s: float
    workers: tuple[WorkerShare, ...]
    is_registered: bool = False


class Replica(Protocol):
    """This frontend, as its replica sync sees it: its own bookings, and where other frontends' prompts go."""

    books: Mapping[int, WorkerBook]
    """This frontend's bookings by instance id of the worker."""

    @property
    def instance_id(self) -> int:
        """This frontend's instance id, 0 before it is registered."""
        ...

    async def events(self) -> ComponentEvents:
        """Return the event plane; raises QueueUnavailable while that does not answer."""
        ...

    def record_remote_prompt(self, hashes: Sequence[int], instance_id: int) -> None:
        """Record that another frontend has sent a prompt with these blocks to that worker."""
        ...


class ReplicaSync:
    """Publishes a frontend's bookings, and adds up those of the others in ``others``, by instance id.

    While the event plane does not answer each frontend goes by its own bookings.
    """

    def __init__(self, replica: Replica) -> None:
        self.others: dict[int, WorkerBook] = {}
        self._replica = replica
        self._peers: dict[int, _Peer] = {}
        self._registered: frozenset[int] = frozenset()
        self._sent: list[SentPrompt] = []
        self._sent_bytes = 0
        self._changed = asyncio.Event()
        self._tasks = BackgroundTasks()

    @property
    def peers(self) -> tuple[int, ...]:
        """The other frontends with messages, by instance id."""
        return tuple(self._peers)

    def start(self) -> None:
        """Publish and receive in the background, as soon as the event plane answers."""
        self._tasks.spawn(self._run(), "replica sync")

    async def close(self) -> None:
        await self._tasks.cancel()

    def notify(self) -> None:
        """Publish soon: a request was booked, is prefilled, or has ended."""
        self._changed.set()

    def record_prompt(self, hashes: Sequence[int], instance_id: int) -> None:
        """Publish that a prompt with these blocks was sent to that worker."""
        size_bytes = self._sent_bytes + 8 * len(hashes)
        if len(self._sent) < MAX_PROMPTS and size_bytes <= MAX_PROMPT_BYTES:
            self._sent.append(SentPrompt(instance_id, array("Q", hashes).tobytes()))
            self._sent_bytes = size_bytes
        self._changed.set()

    def update_registrations(self, instance_ids: Iterable[int]) -> None:
        """Take over the registrations of the namespace: a frontend that is no longer among them has ended."""
        self._registered = present = frozenset(instance_ids)
        for frontend, peer in list(self._peers.items()):
            if peer.is_registered and frontend not in present:
                self._forget(frontend)
            peer.is_registered = frontend in present

    async def _run(self) -> None:
        backoff = Backoff(0.1, timing.EVENT_PLANE_MAX_BACKOFF_S)
        while True:
            try:
                events = await self._replica.events()
                subscription = await events.subscribe_typed(TOPIC, ActiveSequences)
            except QueueUnavailable as error:
                if backoff.is_first:
                    log.warning("frontends do not share bookings until the event plane answers: %s", error)
                await backoff.pause()
                continue
            publishing = self._tasks.spawn(self._publish(events), "publish bookings")
            try:
                backoff.reset()
                async for event in subscription:
                    self._receive(event.value)
            finally:
                publishing.cancel()
                await subscription.close()
            await backoff.pause()

    async def _publish(self, events: ComponentEvents) -> None:
        """Publish the requests in flight after each change, and periodically."""
        while True:
            try:
                async with asyncio.timeout(timing.REPLICA_HEARTBEAT_S):
                    await self._changed.wait()
            except TimeoutError:
                pass
            self._drop_silent()
            self._changed.clear()
            if frontend := self._replica.instance_id:
                sent, self._sent, self._sent_bytes = tuple(self._sent), [], 0
                message = ActiveSequences(frontend, tuple(shares(self._replica.books)), sent)
                try:
                    await events.publish_serialized(TOPIC, message)
                except PermanentError as error:
                    log.warning("bookings are not shared with the other frontends: %s", error)
            await asyncio.sleep(timing.REPLICA_DEBOUNCE_S)

    def _receive(self, message: ActiveSequences) -> None:
        """Apply one message of another frontend; this frontend's own and implausible ones are ignored."""
        if message.frontend == self._replica.instance_id or not _is_plausible(message):
            return
        is_known = message.frontend in self._peers or message.frontend in self._registered
        if not is_known and len(self._peers) >= MAX_PEERS:
            return
        now_s = asyncio.get_running_loop().time()
        peer = self._peers.setdefault(message.frontend, _Peer(now_s, ()))
        self._add(peer.workers, -1)
        peer.workers, peer.received_s = message.workers, now_s
        self._add(peer.workers, 1)
        for prompt in message.sent:
            self._replica.record_remote_prompt(
                array("Q", prompt.hashes[: len(prompt.hashes) // 8 * 8]), prompt.instance_id
            )

    def _drop_silent(self) -> None:
        silent_s = asyncio.get_running_loop().time() - timing.REPLICA_SILENT_S
        for frontend, peer in list(self._peers.items()):
            if peer.received_s < silent_s:
                self._forget(frontend)

    def _forget(self, frontend: int) -> None:
        self._add(self._peers.pop(frontend).workers, -1)

    def _add(self, workers: Iterable[WorkerShare], sign: int) -> None:
        for share in workers:
            book = self.others.setdefault(share.instance_id, WorkerBook())
            book.in_flight += sign * share.in_flight
            book.active_blocks += sign * share.active_blocks
            book.prefill_blocks += sign * share.prefill_blocks
            if book == WorkerBook():
                del self.others[share.instance_id]


def _is_plausible(message: ActiveSequences) -> bool:
    return all(
        0 <= number <= MAX_SHARE
        for share in message.workers
        for number in (share.in_flight, share.active_blocks, share.prefill_blocks)
    )


def shares(books: Mapping[int, WorkerBook]) -> Iterable[WorkerShare]:
    for instance_id, book in books.items():
        if book.in_flight:
            yield WorkerShare(instance_id, book.in_flight, book.active_blocks, book.prefill_blocks)
