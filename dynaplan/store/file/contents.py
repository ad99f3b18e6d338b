"""Contents of a store, as far as its log has been read."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from dynaplan.process.identity import LeaseOwner
from dynaplan.store.model import Deleted, KeyValue, Put, WatchEvent

Record = dict[str, Any]


@dataclass(frozen=True)
class FileLease:
    """One lease: its time to live in seconds, its place among the renewals, and its owner.

    Without an owner it lives for its time, whichever process ends.
    """

    lease: int
    ttl_s: int
    slot: int
    owner: LeaseOwner | None

    def to_record(self) -> Record:
        """Return its form in the log."""
        owner = self.owner.to_record() if self.owner else None
        return {"lease": self.lease, "ttl_s": self.ttl_s, "slot": self.slot, "owner": owner}

    @classmethod
    def from_record(cls, record: Record) -> FileLease:
        """Read its form in the log."""
        owner = LeaseOwner.from_record(record["owner"]) if record["owner"] else None
        return cls(record["lease"], record["ttl_s"], record["slot"], owner)


class StoreContents:
    """Keys, leases and the number of the last record; a header is a record of everything."""

    def __init__(self, header: Record) -> None:
        self.identity: str = header["identity"]
        self.number: int = header["number"]
        self.items: dict[str, KeyValue] = {}
        self.leases: dict[int, FileLease] = {}
        self.keys_of: dict[int, set[str]] = {}
        self.owners: Counter[LeaseOwner] = Counter()
        self.ttls_s: Counter[int] = Counter()
        for each in header["leases"]:
            self._hold(FileLease.from_record(each))
        for key, value, revision, lease in header["items"]:
            self._put(KeyValue(key, value, revision, lease))

    def header(self) -> Record:
        """Return a record of everything, from which an equal one is made."""
        return {
            "identity": self.identity,
            "number": self.number,
            "leases": [each.to_record() for each in self.leases.values()],
            "items": [[each.key, each.value, each.revision, each.lease] for each in self.items.values()],
        }

    def under(self, prefix: str) -> tuple[KeyValue, ...]:
        """Return the keys with that prefix, in key order."""
        return tuple(self.items[key] for key in sorted(self.items) if key.startswith(prefix))

    def free_slot(self) -> int:
        """Return the first place among the renewals that no lease has."""
        taken = {each.slot for each in self.leases.values()}
        return next(slot for slot in range(len(taken) + 1) if slot not in taken)

    def keys_in(self, record: Record) -> tuple[dict[str, str], tuple[str, ...]]:
        """Return the keys and values that a record writes, and the keys that it takes away."""
        return record.get("put", {}), tuple(key for key in record.get("delete", ()) if key in self.items)

    def apply(self, record: Record) -> list[WatchEvent]:
        """Take the next record in; return what it changes for watches."""
        self.number = record["number"]
        puts, gone = self.keys_in(record)
        events: list[WatchEvent] = []
        for key, value in puts.items():
            item = KeyValue(key, value, self.number, record.get("lease", 0))
            self._put(item)
            events.append(Put(item))
        for key in gone:
            self._delete(key)
            events.append(Deleted(key))
        if "end" in record:
            self._let_go(record["end"])
        elif "grant" in record:
            self._hold(FileLease.from_record(record["grant"]))
        elif "own" in record and record["own"] in self.leases:
            owner = LeaseOwner.from_record(record["owner"]) if record["owner"] else None
            self._hold(replace(self.leases[record["own"]], owner=owner))
        return events

    def _put(self, item: KeyValue) -> None:
        before = self.items.get(item.key)
        if before is not None and before.lease != item.lease:
            self._delete(item.key)
        self.items[item.key] = item
        if item.lease:
            self.keys_of.setdefault(item.lease, set()).add(item.key)

    def _delete(self, key: str) -> None:
        item = self.items.pop(key)
        keys = self.keys_of.get(item.lease)
        if keys is not None:
            keys.discard(key)
            if not keys:
                del self.keys_of[item.lease]

    def _hold(self, lease: FileLease) -> None:
        self._let_go(lease.lease)
        self.leases[lease.lease] = lease
        self.ttls_s[lease.ttl_s] += 1
        if lease.owner:
            self.owners[lease.owner] += 1

    def _let_go(self, number: int) -> None:
        lease = self.leases.pop(number, None)
        if lease is None:
            return
        _count_down(self.ttls_s, lease.ttl_s)
        if lease.owner:
            _count_down(self.owners, lease.owner)


def _count_down(counter: Counter[Any], element: object) -> None:
    counter[element] -= 1
    if not counter[element]:
        del counter[element]
