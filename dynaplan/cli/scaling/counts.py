"""The desired counts and the holds in the key-value store, changed by hand in one transaction."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from dynaplan.fleet.counts import FleetCounts
from dynaplan.fleet.holds import HOLDS, RoleHolds
from dynaplan.fleet.rules.lost_keys import TimedEntries
from dynaplan.fleet.rules.statefile import Document, planner_keys_of
from dynaplan.fleet.store_keys import (
    COUNT_KEYS,
    FREE_GPUS,
    GPUS_LEFT_OUT,
    LEAVE_FIRST,
    DesiredCounts,
    fleet_key,
    planner_prefix,
)
from dynaplan.graph.lifecycle import Role
from dynaplan.store.model import Transaction
from dynaplan.util.documents import parse_object
from dynaplan.util.errors import TemporaryError

if TYPE_CHECKING:
    from dynaplan.store.port import KeyValueStore

E = TypeVar("E", bound=TimedEntries)

ATTEMPTS = 5
"""Attempts to write the counts while others write them too."""


@dataclass(frozen=True)
class WrittenCounts:
    """The result of a change by hand: ``counts`` are the desired ones from now on, set or not.

    ``before`` are the holds in force until then.
    """

    decision_id: int
    asked: Mapping[Role, int]
    counts: DesiredCounts
    before: RoleHolds
    holds: RoleHolds


Change = Callable[[DesiredCounts, RoleHolds], tuple[dict[Role, int], RoleHolds]]
"""Returns the counts to ask for and the holds from then on; it may raise UserError."""


async def write_counts(
    store: KeyValueStore, namespace: str, change: Change, leave_first: str = ""
) -> WrittenCounts:
    """Write the changed counts and holds; without counts only the holds, without a new decision.

    When a worker leaves by the decision, the one named ``leave_first`` does, before any other.

    The decision id is above every id in use. The transaction fails, and is tried again on what there is
    then, when a key has changed since it was read. Holds that are over, or cannot be read, count as none.
    """
    prefix = planner_prefix(namespace)
    for _ in range(ATTEMPTS):
        items = {item.key: item for item in await store.list(prefix)}
        now = DesiredCounts.from_keys(namespace, {key: item.value for key, item in items.items()})
        text = items[prefix + HOLDS].value if prefix + HOLDS in items else RoleHolds().to_text()
        before = readable_holds(text)
        asked, holds = change(now, before)
        puts = {prefix + COUNT_KEYS[role]: str(number) for role, number in asked.items()}
        decision_id = now.next_decision_id if asked else now.decision_id
        if asked:
            puts[prefix + "decision_id"] = str(decision_id)
            if leave_first:
                puts[prefix + LEAVE_FIRST] = f"{decision_id} {leave_first}"
        if holds.to_text() != text:
            puts[prefix + HOLDS] = holds.to_text()
        expected = dict.fromkeys((*puts, prefix + HOLDS), 0)
        expected |= {key: item.revision for key, item in items.items()}
        if await store.commit(Transaction(expected=expected, puts=puts)):
            keys = {key: item.value for key, item in items.items()} | puts
            return WrittenCounts(decision_id, asked, DesiredCounts.from_keys(namespace, keys), before, holds)
    raise TemporaryError("somebody else changes the desired counts all the time", hint="Try again.")


async def change_entries(
    store: KeyValueStore, namespace: str, name: str, read: Callable[[str], E], change: Callable[[E], E]
) -> tuple[E, E]:
    """Change what persons have written under a key of the planner; return it before and after.

    Entries that are over, or cannot be read, count as none. ``change`` may raise UserError.
    """
    key = planner_prefix(namespace) + name
    for _ in range(ATTEMPTS):
        item = await store.get(key)
        before = readable(read, item.value if item else "")
        after = change(before)
        expected = {key: item.revision if item else 0}
        if await store.commit(Transaction(expected=expected, puts={key: after.to_text()})):
            return before, after
    raise TemporaryError(f"somebody else changes the {name} all the time", hint="Try again.")


def readable(read: Callable[[str], E], text: str) -> E:
    """Return the entries that last, of a key's value; none when it cannot be read."""
    try:
        return read(text).lasting(time.time())
    except ValueError:
        return read("")


def readable_holds(text: str) -> RoleHolds:
    """Return the holds in force that the key's value says; none when it cannot be read."""
    return readable(RoleHolds.from_text, text)


def held_in(document: Document) -> RoleHolds:
    """Return the holds in force that the statefile remembers: for when the store does not answer."""
    return readable_holds(planner_keys_of(document).get(HOLDS, ""))


async def published_fleet(store: KeyValueStore, namespace: str) -> FleetCounts | None:
    """Return the fleet that the plugin publishes; None when there is none that can be read.

    ``status`` names one that cannot be read; the plugin publishes a good one at its next change.
    """
    item = await store.get(fleet_key(namespace))
    try:
        return FleetCounts.from_json(parse_object(item.value)) if item else None
    except ValueError:
        return None


async def free_gpus(store: KeyValueStore, namespace: str) -> int | None:
    """Return the number of GPUs that a further worker may get, as the plugin publishes it; None: unknown."""
    item = await store.get(fleet_key(namespace))
    try:
        free = parse_object(item.value).get(FREE_GPUS) if item else None
    except ValueError:
        free = None
    return len(free) if isinstance(free, list) else None


async def left_out_gpus(store: KeyValueStore, namespace: str) -> tuple[str, ...]:
    """Return a line for each reason for which GPUs of the box are left out, as the plugin publishes them."""
    item = await store.get(fleet_key(namespace))
    try:
        lines = parse_object(item.value).get(GPUS_LEFT_OUT) if item else None
    except ValueError:
        lines = None
    return tuple(map(str, lines)) if isinstance(lines, list) else ()
