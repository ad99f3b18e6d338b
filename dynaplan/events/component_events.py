"""The events of one component, as the component publishes them and subscribes to them and others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from dynaplan.events.port import EventPlane, EventPublisher, EventSubscription
from dynaplan.events.subjects import NOW, Event, Start, Subject
from dynaplan.events.wire_formats import encode_payload, payload_reader
from dynaplan.util.errors import QueueUnavailable
from dynaplan.util.prometheus_text import PREFIX

log = logging.getLogger(__name__)

MAX_LOGGED_FAULTS = 1000
"""Faults of messages that are remembered, so that each is logged once."""

T = TypeVar("T")


@dataclass(frozen=True)
class TypedEvent(Generic[T]):
    """An event with its payload read."""

    value: T
    event: Event


class ComponentEvents:
    """Publishes the events of one component, and subscribes to those of any.

    With ``is_kept`` an event is kept for later subscribers too. A topic is the name of an event of this
    component, or a whole subject, which may have wildcards: ``vllm-agg.*.kv_cache_update``.
    """

    def __init__(self, plane: EventPlane, namespace: str, component: str) -> None:
        self._plane = plane
        self._namespace = namespace
        self._component = component
        self._publishers: dict[tuple[str, bool], EventPublisher] = {}
        self._unreadable = 0

    async def publish(self, event: str, payload: bytes, *, is_kept: bool = False) -> int:
        """Publish an event ``{namespace}.{component}.{event}``; return its number among the publisher's.

        While the server is away events wait, up to a bound. Raises ConfigError for a name that cannot be part
        of a subject, PermanentError for a payload that is too large.
        """
        publisher = self._publishers.get((event, is_kept))
        if publisher is None:
            subject = Subject(self._namespace, self._component, event)
            publisher = self._publishers[event, is_kept] = self._plane.publisher(subject, is_kept=is_kept)
        return await publisher.publish(payload)

    async def publish_serialized(self, event: str, value: object, *, is_kept: bool = False) -> int:
        """Publish a value as msgpack: what JSON has, bytes, dataclasses; raises TypeError for any other."""
        return await self.publish(event, encode_payload(value), is_kept=is_kept)

    async def subscribe(self, topic: str, start: Start = NOW, group: str = "") -> EventSubscription:
        """Subscribe to a topic; see ``dynaplan.events.port.EventPlane.subscribe``."""
        pattern = topic if "." in topic else str(Subject(self._namespace, self._component, topic))
        return await self._plane.subscribe(pattern, start, group)

    async def subscribe_typed(
        self, topic: str, kind: type[T], start: Start = NOW, group: str = ""
    ) -> TypedSubscription[T]:
        """Subscribe to events whose payloads are msgpack of that type: a dataclass, or what JSON has.

        A message that cannot be read is named once, counted and skipped.
        """
        return TypedSubscription(await self.subscribe(topic, start, group), kind, self._skipped)

    def continuity(self) -> int | None:
        """Return a number that changes whenever events may have been lost; None while none arrive.

        See ``dynaplan.events.port.EventPlane.continuity``.
        """
        return self._plane.continuity()

    def metrics(self) -> Mapping[str, float]:
        """Return the samples of this process' events for ``/metrics``."""
        counts = {**self._plane.counts()}
        counts["unreadable"] = counts.get("unreadable", 0) + self._unreadable
        names = {name: "events_waiting" if name == "waiting" else f"events_{name}_total" for name in counts}
        return {f"{PREFIX}{names[name]}": value for name, value in counts.items()}

    def _skipped(self) -> None:
        self._unreadable += 1


class TypedSubscription(Generic[T]):
    """The events of a subscription that can be read, with their values."""

    def __init__(self, events: EventSubscription, kind: type[T], skipped: Callable[[], None]) -> None:
        self._events = events
        self._read = payload_reader(kind)
        self._skipped = skipped
        self._logged_faults: set[tuple[str, str]] = set()

    def __aiter__(self) -> TypedSubscription[T]:
        """Return itself."""
        return self

    async def __anext__(self) -> TypedEvent[T]:
        """Return the next event that can be read; raises StopAsyncIteration after ``close``."""
        while True:
            event = await anext(self._events)
            try:
                return TypedEvent(self._read(event.payload), event)
            except ValueError as error:
                await self._skip(event, str(error))

    async def ack(self, event: TypedEvent[T]) -> None:
        """Tell that a group's event is done: it is not delivered again."""
        await self._events.ack(event.event)

    async def close(self) -> None:
        """End the subscription; its iteration ends."""
        await self._events.close()

    async def _skip(self, event: Event, fault: str) -> None:
        """Name the fault once; a group's event is done with that, and does not come again."""
        self._skipped()
        if (event.subject, fault) not in self._logged_faults and len(self._logged_faults) < MAX_LOGGED_FAULTS:
            self._logged_faults.add((event.subject, fault))
            log.warning("skipping an event of %s that cannot be read: %s", event.subject, fault)
        if event.receipt:
            with suppress(QueueUnavailable):
                await self._events.ack(event)
