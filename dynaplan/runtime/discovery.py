"""Discovery: the instances of a namespace, as one process knows them by a watch of the registrations."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from dynaplan.domain.wire.discovery import SERVICES_PREFIX, Instance
from dynaplan.domain.wire.store import Deleted, KeyValue, Put, Snapshot, WatchEvent
from dynaplan.ports.stores import KeyValueStore

log = logging.getLogger(__name__)

MOST_IGNORED = 1000
"""The number of unreadable registrations whose faults are remembered, so that each is logged once."""


class Discovery:
    """The instances of a namespace, followed by watch.

    While the store is away the last known instances stay; when it is back, a Snapshot replaces them.
    Reading costs a dictionary look-up, so it may be done for every request.
    """

    def __init__(self, store: KeyValueStore, namespace: str) -> None:
        self._store = store
        self._prefix = f"{SERVICES_PREFIX}{namespace}/"
        self._by_key: dict[str, Instance] = {}
        self._by_endpoint: dict[tuple[str, str], tuple[Instance, ...]] = {}
        self._callbacks: list[Callable[[], None]] = []
        self._is_known = asyncio.Event()
        self._ignored: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Follow the registrations; return when the first snapshot is there, whenever the store answers."""
        self._task = asyncio.create_task(self._follow(), name="discovery")
        known = asyncio.create_task(self._is_known.wait())
        await asyncio.wait({self._task, known}, return_when=asyncio.FIRST_COMPLETED)
        known.cancel()
        if self._task.done():
            self._task.result()

    async def failed(self) -> None:
        """Raise the error that ended the watch, a fault of ours; without one it does not return."""
        if self._task:
            await asyncio.shield(self._task)

    def instances(self, component: str, endpoint: str = "generate") -> tuple[Instance, ...]:
        """Return the instances that serve the endpoint, in the order of their ids.

        Empty when there is none.
        """
        return self._by_endpoint.get((component, endpoint), ())

    def all(self) -> tuple[Instance, ...]:
        """Return every registration of the namespace, in key order."""
        return tuple(self._by_key[key] for key in sorted(self._by_key))

    def has(self, key: str) -> bool:
        """Tell whether a registration with that key is known."""
        return key in self._by_key

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call back after every change of the instances, from now on."""
        self._callbacks.append(callback)

    async def close(self) -> None:
        """Stop following; the last known instances stay readable."""
        if self._task:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _follow(self) -> None:
        async for event in self._store.watch(self._prefix):
            before = self._by_key
            self._by_key = self._after(event)
            self._is_known.set()
            if self._by_key != before:
                self._by_endpoint = _grouped(self._by_key)
                for callback in self._callbacks:
                    callback()

    def _after(self, event: WatchEvent) -> dict[str, Instance]:
        match event:
            case Snapshot(items):
                return {item.key: instance for item in items if (instance := self._read(item))}
            case Put(item):
                instance = self._read(item)
                return {**self._by_key, item.key: instance} if instance else self._by_key
            case Deleted(key):
                return {known: instance for known, instance in self._by_key.items() if known != key}

    def _read(self, item: KeyValue) -> Instance | None:
        """The registration; None for what is none, which is said once for each key and fault."""
        try:
            instance = Instance.from_json(item.value)
        except ValueError as error:
            if self._ignored.get(item.key) != str(error):
                log.warning("ignoring %s: it is not a registration (%s)", item.key, error)
            self._ignored[item.key] = str(error)
            while len(self._ignored) > MOST_IGNORED:
                del self._ignored[next(iter(self._ignored))]
            return None
        self._ignored.pop(item.key, None)
        return instance


def _grouped(by_key: dict[str, Instance]) -> dict[tuple[str, str], tuple[Instance, ...]]:
    groups: dict[tuple[str, str], list[Instance]] = {}
    for instance in by_key.values():
        groups.setdefault((instance.component, instance.endpoint), []).append(instance)
    return {name: tuple(sorted(group, key=lambda each: each.instance_id)) for name, group in groups.items()}
