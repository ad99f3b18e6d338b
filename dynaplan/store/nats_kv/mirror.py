"""The keys of a bucket as its follower knows them, the leases that live, and the keys of ended ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dynaplan.store.model import Deleted, KeyValue, Put
from dynaplan.store.nats_kv.messages import Entry
from dynaplan.store.nats_kv.subjects import key_of, lease_of

Change = Put | Deleted


class Mirror:
    """The keys of the bucket, by its messages in the order of writing.

    A key whose lease does not live is no key; its message is remembered in ``orphans``, by name, until it is
    deleted or written again, or the lease turns out to live: where a lease was renewed before its making
    could be told, its keys come first. ``leases`` holds the time to live of each living lease, in seconds,
    ``sequence`` is that of the last message taken in.
    """

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.leases: dict[int, int] = {}
        self.orphans: dict[str, Entry] = {}
        self.items: dict[str, KeyValue] = {}
        self._leased: dict[int, dict[str, Entry]] = {}
        self.sequence = 0
        whole = sorted(entries, key=lambda entry: entry.sequence)
        # A lease that was renewed since stands behind its keys.
        for entry in (*(each for each in whole if lease_of(each.name)), *whole):
            for _ in self._changes(entry):
                pass
        self.sequence = whole[-1].sequence if whole else 0

    def apply(self, entry: Entry) -> list[Change]:
        """Take the message in; return what it changes. One that is known already changes nothing."""
        if entry.sequence <= self.sequence:
            return []
        self.sequence = entry.sequence
        return list(self._changes(entry))

    def end(self, lease: int) -> list[Change]:
        """End the lease; return the end of its keys, in the order in which they were written."""
        self.leases.pop(lease, None)
        ended = sorted(self._leased.pop(lease, {}).values(), key=lambda entry: entry.sequence)
        self.orphans |= {entry.name: entry for entry in ended}
        return [event for entry in ended for event in self._without(entry.name)]

    def _changes(self, entry: Entry) -> Iterator[Change]:
        lease = lease_of(entry.name)
        if lease is None:
            yield from self._changes_of_key(entry)
        elif entry.is_gone:
            yield from self.end(lease)
        else:
            is_new = lease not in self.leases
            self.leases[lease] = entry.ttl_s
            early = [each for each in self.orphans.values() if each.lease == lease] if is_new else ()
            for each in early:
                yield from self._changes_of_key(each)

    def _changes_of_key(self, entry: Entry) -> Iterator[Change]:
        self.orphans.pop(entry.name, None)
        item = entry.item
        if item is None or (item.lease and item.lease not in self.leases):
            if item is not None:
                self.orphans[entry.name] = entry
            yield from self._without(entry.name)
            return
        before = self.items.get(item.key)
        if before is not None and before.lease != item.lease:
            self._leased.get(before.lease, {}).pop(entry.name, None)
        if item.lease:
            self._leased.setdefault(item.lease, {})[entry.name] = entry
        self.items[item.key] = item
        yield Put(item)

    def _without(self, name: str) -> Iterator[Change]:
        """Remove the key with that name, if there is one."""
        key = key_of(name)
        before = None if key is None else self.items.pop(key, None)
        if before is not None:
            self._leased.get(before.lease, {}).pop(name, None)
            yield Deleted(before.key)
