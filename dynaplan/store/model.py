"""The terms of a key-value store: keys and values, changes, transactions."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class KeyValue:
    """One key with its value, the revision of its last change, and its lease (0: none)."""

    key: str
    value: str
    revision: int = 0
    lease: int = 0


@dataclass(frozen=True)
class Snapshot:
    """All keys under a watched prefix: they replace everything known before."""

    items: tuple[KeyValue, ...]


@dataclass(frozen=True)
class Put:
    """A key was written: ``item`` has its new value and revision."""

    item: KeyValue


@dataclass(frozen=True)
class Deleted:
    """A key is gone: deleted, or its lease expired or was revoked."""

    key: str


WatchEvent = Snapshot | Put | Deleted


@dataclass(frozen=True)
class Transaction:
    """All or nothing: write ``puts`` and delete ``deletes`` if each key in ``expected`` has that revision.

    Revision 0 is "absent".
    """

    expected: dict[str, int] = field(default_factory=dict)
    puts: dict[str, str] = field(default_factory=dict)
    deletes: tuple[str, ...] = ()
    lease: int = 0
