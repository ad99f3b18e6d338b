"""The event plane without a broker: each publisher has sockets, which subscribers find through the store."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from weakref import WeakSet

from dynaplan.config.settings.servers import MAX_AGE_S
from dynaplan.events.event_channels import EventChannel, channels_prefix
from dynaplan.events.inbox import EventCounts, EventInbox
from dynaplan.events.port import EventPublisher, EventSubscription
from dynaplan.events.replay import ReplayBuffer
from dynaplan.events.subjects import NOW, Event, Start, Subject, matches
from dynaplan.events.wires import ENDPOINT, TOPICS, event_of
from dynaplan.events.zmq_announcing import ChannelAnnouncer
from dynaplan.events.zmq_publishing import ZmqPublisher
from dynaplan.events.zmq_reading import ChannelReader
from dynaplan.events.zmq_sockets import EventSockets, refuse_open_tcp
from dynaplan.store.model import Put, Snapshot, WatchEvent
from dynaplan.store.port import Store
from dynaplan.util.errors import ConfigError
from dynaplan.util.tasks import BackgroundTasks

log = logging.getLogger(__name__)

MOST_KEPT = 16_384
MOST_KEPT_BYTES = 32 * 2**20
BRIEFLY = (1024, 4 * 2**20, 5000)
"""Events, bytes and milliseconds of what need not be kept: until a new subscription has taken effect."""

RESTORE_S = 3.0
LINGER_S = 15.0
"""Time for which a publisher is still listened to when its announcement is gone: the store may be wiped."""


class ZmqEventPlane:
    """``dynaplan.events.port.EventPlane`` on ZMQ sockets.

    ``directory`` (mode 0700) holds the sockets, named ``{prefix}.*``; None: one of its own. With ``host``
    they are TCP ports there, closed by the ``token``. ``is_original``: names of events are the original's,
    and other programs' plain TCP sockets are read too.
    """

    def __init__(
        self,
        store: Store,
        directory: Path | None = None,
        prefix: str = "events",
        *,
        host: str = "",
        token: str = "",
        age_s: float = MAX_AGE_S,
        is_original: bool = False,
        most_kept: int = MOST_KEPT,
    ) -> None:
        refuse_open_tcp(host, token)
        self._own = None if directory else tempfile.TemporaryDirectory(prefix="dp-ev-")
        self._store = store
        self._sockets = EventSockets(
            directory or Path(self._own.name if self._own else ""), prefix, host, token
        )
        self._age_s = age_s
        self._is_original = is_original
        self._most_kept = most_kept
        self._counts = EventCounts()
        self._tasks = BackgroundTasks()
        self._publishers: list[ZmqPublisher] = []
        self._subscriptions: WeakSet[EventSubscription] = WeakSet()
        self._announcer = ChannelAnnouncer(store)

    def publisher(self, subject: Subject, *, is_kept: bool) -> EventPublisher:
        """Return a publisher; its sockets are opened with its first event."""
        topic = TOPICS.get(subject.event, subject.event) if self._is_original else subject.event

        def named(publisher: int, address: str, replay: str) -> EventChannel:
            scope = subject.namespace, subject.component, ENDPOINT
            return EventChannel(*scope, topic, publisher, address, replay)

        bounds = (self._most_kept, MOST_KEPT_BYTES, int(self._age_s * 1000)) if is_kept else BRIEFLY
        buffer = ReplayBuffer(*bounds)
        made = ZmqPublisher(self._sockets, topic, named, self._announcer.announce, self._counts, buffer)
        if not self._publishers:
            self._tasks.spawn(self._announcer.run(), "event channels")
            self._tasks.spawn(self._restore(), "event sockets")
        self._publishers.append(made)
        return made

    async def subscribe(self, pattern: str, start: Start = NOW, group: str = "") -> EventSubscription:
        """Subscribe to every publisher of what matches, also to later ones.

        A position is a publisher's own count; now is this moment, also for publishers that are found later.
        """
        if group:
            raise ConfigError(
                f"the group {group!r} cannot be joined: over ZMQ every subscriber gets every event",
                hint="Groups need NATS: set NATS_SERVER, and DYN_EVENT_PLANE=nats.",
            )
        since = Start(unix_s=time.time()) if start.is_now else start
        subscription = ZmqSubscription(self._sockets, self._counts, pattern, since, self._is_original)
        self._subscriptions.add(subscription)
        following = self._tasks.spawn(subscription.follow(self._store), "event channels")
        await subscription.known(following)
        return subscription

    async def flush(self, timeout_s: float) -> bool:
        """Return True: what is published is on its way."""
        await asyncio.sleep(0)
        return True

    def continuity(self) -> int | None:
        """Return 0: every publisher has sockets of its own, and tells what was missed of it."""
        return 0

    def counts(self) -> Mapping[str, int]:
        """Count what this plane has published, dropped and received; ZMQ's own queues cannot be counted."""
        return {**vars(self._counts), "waiting": 0}

    async def close(self) -> None:
        """Close every socket, and take the announcements back."""
        for subscription in list(self._subscriptions):
            await subscription.close()
        await self._tasks.cancel()
        await self._announcer.close()
        for publisher in self._publishers:
            publisher.close()
        self._sockets.close()
        if self._own:
            self._own.cleanup()

    async def _restore(self) -> None:
        while True:
            await asyncio.sleep(RESTORE_S)
            for publisher in self._publishers:
                publisher.restore()


class ZmqSubscription(EventInbox):
    """The events of all publishers whose subjects match; they are followed through the store."""

    def __init__(
        self, sockets: EventSockets, counts: EventCounts, pattern: str, start: Start, is_open: bool
    ) -> None:
        super().__init__(counts, self._stop)
        self._sockets = sockets
        self._pattern = pattern
        self._start = start
        self._is_open = is_open
        self._readers: dict[int, ChannelReader] = {}
        self._asking: dict[int, asyncio.Task[None]] = {}
        self._positions: dict[int, int] = {}
        self._leaving: dict[int, asyncio.TimerHandle] = {}
        self._unusable: set[str] = set()
        self._tasks = BackgroundTasks()
        self._is_known = asyncio.Event()
        self._following: asyncio.Task[None] | None = None
        self.on_room = self._resume

    async def known(self, following: asyncio.Task[None]) -> None:
        """Return when the present publishers are known, and their events will come; or the store is away."""
        self._following = following
        known = asyncio.ensure_future(self._is_known.wait())
        await asyncio.wait({known, following}, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
        known.cancel()
        if following.done():
            following.result()

    async def follow(self, store: Store) -> None:
        """Read from every announced channel that matches, and from none that is gone, until cancelled."""
        values: dict[str, str] = {}
        async for event in store.watch(channels_prefix(self._pattern)):
            values = _after(values, event)
            channels = {channel.publisher: channel for channel in map(self._read, values.values()) if channel}
            for publisher, channel in channels.items():
                self._join(publisher, channel)
            for publisher in self._readers.keys() - channels.keys() - self._leaving.keys():
                later = asyncio.get_running_loop().call_later(LINGER_S, self._leave, publisher)
                self._leaving[publisher] = later
            self._is_known.set()

    def _read(self, text: str) -> EventChannel | None:
        """Return the channel whose events are wanted."""
        try:
            channel = EventChannel.from_json(text)
        except ValueError as error:
            self._name_once(text, f"ignoring an event channel: {error}")
            return None
        subject = f"{channel.namespace}.{channel.component}.{event_of(channel.topic)}"
        return channel if matches(self._pattern, subject) else None

    def _join(self, publisher: int, channel: EventChannel) -> None:
        """Read the channel, from where it was read before if it was."""
        if publisher in self._leaving:
            self._leaving.pop(publisher).cancel()
        present = self._readers.get(publisher)
        if present is not None:
            if present.channel == channel:
                return
            self._leave(publisher)
        start = Start(position=self._positions[publisher]) if publisher in self._positions else self._start
        try:
            reader = ChannelReader(self._sockets, channel, start, self._take, self._is_open)
        except ConfigError as error:
            self._name_once(channel.key, str(error))
            return
        self._readers[publisher] = reader
        self._asking[publisher] = self._tasks.spawn(reader.run(), channel.key)

    def _leave(self, publisher: int) -> None:
        self._leaving.pop(publisher, None)
        self._asking.pop(publisher).cancel()
        reader = self._readers.pop(publisher)
        if reader.next_position is not None:
            self._positions[publisher] = reader.next_position
        reader.close()

    def _take(self, event: Event) -> None:
        self.put(event)
        if self.stops():
            for reader in self._readers.values():
                reader.pause()

    def _resume(self) -> None:
        for reader in self._readers.values():
            reader.resume()

    def _name_once(self, what: str, fault: str) -> None:
        if what not in self._unusable and len(self._unusable) < 1000:
            self._unusable.add(what)
            log.warning("%s", fault)

    async def _stop(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.gather(self._following, return_exceptions=True)
        await self._tasks.cancel()
        for later in self._leaving.values():
            later.cancel()
        for publisher in list(self._readers):
            self._leave(publisher)


def _after(values: Mapping[str, str], event: WatchEvent) -> dict[str, str]:
    """Key -> value, once this has happened."""
    if isinstance(event, Snapshot):
        return {item.key: item.value for item in event.items}
    if isinstance(event, Put):
        return {**values, event.item.key: event.item.value}
    return {key: value for key, value in values.items() if key != event.key}
