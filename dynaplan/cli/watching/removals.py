"""The part of ``dynaplan why`` about workers that were told to leave: which ones, and why these."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dynaplan.fleet.rules.reconcile import Removal

ANSWER_S = 1.0
"""Seconds in which the store must answer."""


async def removals(namespace: str) -> tuple[Removal, ...]:
    """Read the last removals, the newest last; none where the store does not answer."""
    from dynaplan.fleet.rules.reconcile import removals_in
    from dynaplan.fleet.store_keys import fleet_key
    from dynaplan.store import connections
    from dynaplan.util.documents import parse_object
    from dynaplan.util.errors import StoreUnavailable

    store = connections.connect_store()
    try:
        async with asyncio.timeout(ANSWER_S):
            item = await store.get(fleet_key(namespace))
        return removals_in(parse_object(item.value)) if item else ()
    except (StoreUnavailable, TimeoutError, ValueError):
        return ()
    finally:
        await store.close()


def removal_lines(found: Iterable[Removal]) -> list[str]:
    """Return a line for each, in local time."""
    return [f"{_local(each.at_unix_s)}  {each.worker} was told to leave: {each.why}" for each in found]


def _local(at_unix_s: float) -> str:
    return datetime.fromtimestamp(at_unix_s).isoformat(" ", "seconds")
