"""Lost keys of the store: the statefile has copies of them, so that they outlive a store that loses its data.

There are two kinds. The planner's keys are never deleted: a missing one was lost, and is restored. (So nobody
ends a hold by deleting its key; ``dynaplan release`` writes ``{}``.) A live setting may be deleted; it was
lost only if the store has lost everything. The sign of that is a missing store id, a key that the fleet
plugin writes and nobody has reason to delete.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, Self

from dynaplan.contract.gpu_standing import SET_APART, GpuStandings
from dynaplan.contract.holds import HOLDS, RESERVATIONS, Hold, ReservedGpus, RoleHolds
from dynaplan.contract.model_keys import MODEL_ORDERS, MODEL_WORKERS, ModelOrders, planned_workers_in
from dynaplan.contract.option_changes import OPTION_CHANGE, OptionChange
from dynaplan.contract.store_keys import COUNT_KEYS, LIVE_SETTINGS, live_setting
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
    """Entries that users have written under one key, each with or without an expiry time."""

    def without_expired(self, now_s: float) -> Self:
        """Return the entries that have not expired at ``now_s``, seconds since 1970-01-01 UTC."""
        ...

    @property
    def descriptions(self) -> Mapping[str, Hold]:
        """The entries, by a description of each in the past tense."""
        ...

    def to_text(self) -> str:
        """Return the entries as the text of the key's value."""
        ...


USER_SET_KEYS: Mapping[str, Callable[[str], RoleHolds | ReservedGpus]] = {
    HOLDS: RoleHolds.from_text,
    RESERVATIONS: ReservedGpus.from_text,
}
"""The planner's keys that users set, and their parsers, which raise ValueError."""

PLANNER_KEYS: Mapping[str, Callable[[str], bool]] = {
    **{name: _is_read(read) for name, read in USER_SET_KEYS.items()},
    **dict.fromkeys(COUNT_KEYS.values(), _is_number),
    "decision_id": _is_number,
    STORE_ID: bool,
    SET_APART: _is_read(GpuStandings.from_text),
    MODEL_ORDERS: _is_read(ModelOrders.from_text),
    MODEL_WORKERS: _is_read(planned_workers_in),
    OPTION_CHANGE: _is_read(OptionChange.from_text),
}
"""The planner's keys that are saved, by name, and the test for a valid value."""


@dataclass(frozen=True)
class PersistedKeys:
    """Values of the planner's keys and of the live settings, by their names below their prefixes."""

    planner: Mapping[str, str] = field(default_factory=dict)
    live: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.planner or self.live)


@dataclass(frozen=True)
class Comparison:
    """The keys to save, and those of them that the store lacks.

    ``is_new_store``: it has lost everything.
    """

    kept: PersistedKeys
    lost: PersistedKeys
    is_new_store: bool


def compare(kept: PersistedKeys, found: PersistedKeys) -> Comparison:
    """Compare the saved keys with those in the store; invalid values there are ignored."""
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
