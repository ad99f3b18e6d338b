"""The keys under a prefix of the store, as they are now, told on every change."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dynaplan.domain.store import Deleted, Put, Snapshot
from dynaplan.ports import KeyValueStore


async def follow_prefix(
    store: KeyValueStore, prefix: str, changed: Callable[[Mapping[str, str]], None]
) -> None:
    """Call ``changed(key -> value)`` with all keys under the prefix, now and after every change, for ever."""
    known: dict[str, str] = {}
    async for event in store.watch(prefix):
        match event:
            case Snapshot(items):
                known = {item.key: item.value for item in items}
            case Put(item):
                known[item.key] = item.value
            case Deleted(key):
                known.pop(key, None)
        changed(known)
