"""Lost keys of the store: the statefile remembers them, so that they outlive a store that loses its data.

There are two kinds. The planner's keys are never meant to go: one that is missing was lost, and is written
again. (So nobody ends a hold by deleting its key; ``dynaplan release`` writes ``{}``.) A live setting may be
deleted; it was lost only if the store has lost everything. That is seen by a key that nobody has reason to
delete, the store's id: the fleet plugin writes it, and a store that began anew lacks it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, Self

from dynaplan.fleet.holds import HOLDS, RESERVATIONS, Hold, ReservedGpus, RoleHolds
from dynaplan.fleet.model_keys import MODEL_ORDERS, MODEL_WORKERS, ModelOrders, planned_workers_in
from dynaplan.fleet.store_keys import COUNT_KEYS, LIVE_SETTINGS, live_setting
from dynaplan.util.documents import whole_number

STORE_ID = "store_id"
"""The key whose absence shows a store that has lost everything."""


def _is_number(text: str) -> bool:
    found = whole_number(text)
    return found is not None and found >= 0


def _is_read(by: Callable[[str], object]) -> Callable[[str], bool]:
    def is_read(text: str) -> bool:
        try:
            by(text)
        except ValueError:
            return False
        return True

    return is_read


class TimedEntries(Protocol):
    """Entries that persons have written under one key, and that may have a deadline."""

    def lasting(self, now_s: float) -> Self:
        """Return those whose deadline has not passed; seconds since 1970-01-01 UTC."""
        ...

    @property
    def sentences(self) -> Mapping[str, Hold]:
        """The entries, by a sentence in the past tense about each."""
        ...

    def to_text(self) -> str:
        """Write the key's value."""
        ...


PERSONS_KEYS: Mapping[str, Callable[[str], TimedEntries]] = {
    HOLDS: RoleHolds.from_text,
    RESERVATIONS: ReservedGpus.from_text,
}
"""The planner's keys that persons write, and their readers, which raise ValueError."""

PLANNER_KEYS: Mapping[str, Callable[[str], bool]] = {
    **{name: _is_read(read) for name, read in PERSONS_KEYS.items()},
    **dict.fromkeys(COUNT_KEYS.values(), _is_number),
    "decision_id": _is_number,
    STORE_ID: bool,
    MODEL_ORDERS: _is_read(ModelOrders.from_text),
    MODEL_WORKERS: _is_read(planned_workers_in),
}
"""The planner's keys that are kept, by name, and the test of a value that is worth it."""


@dataclass(frozen=True)
class PersistedKeys:
    """Values of the planner's keys and of the live settings, by their names below their prefixes."""

    planner: Mapping[str, str] = field(default_factory=dict)
    live: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.planner or self.live)


@dataclass(frozen=True)
class Comparison:
    """The keys to keep from now on, and those of them that the store lacks.

    ``is_new_store``: it has lost everything.
    """

    kept: PersistedKeys
    lost: PersistedKeys
    is_new_store: bool


def compare(kept: PersistedKeys, found: PersistedKeys) -> Comparison:
    """Compare what is written down with what is in the store; a value there that is no good counts not."""
    planner = {
        **kept.planner,
        **{name: text for name, text in found.planner.items() if _is_persisted(name, text)},
    }
    is_new_store = STORE_ID in kept.planner and STORE_ID not in found.planner
    live = {name: text for name, text in found.live.items() if _is_live(name, text)}
    if is_new_store:
        live = {**kept.live, **live}
    lost = PersistedKeys(
        {name: text for name, text in planner.items() if name not in found.planner},
        {name: text for name, text in live.items() if name not in found.live},
    )
    return Comparison(PersistedKeys(planner, live), lost, is_new_store)


def _is_persisted(name: str, text: str) -> bool:
    return name in PLANNER_KEYS and PLANNER_KEYS[name](text)


def _is_live(name: str, text: str) -> bool:
    return name in LIVE_SETTINGS and live_setting(text) is not None
