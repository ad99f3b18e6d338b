"""Follow the keys under a prefix of the key-value store."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dynaplan.domain.wire.store import values_after
from dynaplan.ports.stores import KeyValueStore


async def follow_prefix(
    store: KeyValueStore, prefix: str, changed: Callable[[Mapping[str, str]], None]
) -> None:
    """Call ``changed(key -> value)`` with all keys under the prefix, now and after every change, for ever."""
    known: dict[str, str] = {}
    async for event in store.watch(prefix):
        known = values_after(known, event)
        changed(known)
