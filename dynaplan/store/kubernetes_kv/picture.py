"""The keys that a set of objects holds: under which leases they are, and which process sees them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from dynaplan.store.kubernetes_kv.documents import PodRecord, StoredKey
from dynaplan.store.model import KeyValue


@dataclass(frozen=True)
class ClusterPicture:
    """The objects as they were read: the shared keys, the pods' records by name, and the pods that are ready.

    A lease exists as long as a record has it, so it ends with its pod. Of a key in two places the one with
    the higher revision counts.
    """

    shared: Mapping[str, StoredKey] = field(default_factory=dict)
    pods: Mapping[str, PodRecord] = field(default_factory=dict)
    ready: frozenset[str] = frozenset()

    def holder(self, lease: int) -> tuple[str, int] | None:
        """Return the pod that has a lease, and its time to live in seconds; None when nobody has."""
        for name, record in self.pods.items():
            if lease in record.leases:
                return name, record.leases[lease].ttl_s
        return None

    def all_keys(self) -> dict[str, StoredKey]:
        """Return every key whose lease exists, whether its pod is ready or not."""
        return _newest(self._candidates(self.pods))

    def seen_by(self, pod: str) -> dict[str, KeyValue]:
        """Return what a process sees: what ready pods and its own have registered, and the shared keys."""
        seen = {name: record for name, record in self.pods.items() if name == pod or name in self.ready}
        return {
            key: KeyValue(key, stored.value, stored.revision, stored.lease)
            for key, stored in sorted(_newest(self._candidates(seen)).items())
        }

    def waiting(self) -> list[str]:
        """Return the pods that have registered something and are not ready."""
        return [
            name
            for name, record in self.pods.items()
            if name not in self.ready and any(held.keys for held in record.leases.values())
        ]

    def _candidates(self, pods: Mapping[str, PodRecord]) -> Iterator[tuple[str, StoredKey]]:
        alive = {lease for record in self.pods.values() for lease in record.leases}
        for key, stored in self.shared.items():
            if not stored.lease or stored.lease in alive:
                yield key, stored
        for record in pods.values():
            for held in record.leases.values():
                yield from held.keys.items()


def _newest(candidates: Iterator[tuple[str, StoredKey]]) -> dict[str, StoredKey]:
    found: dict[str, StoredKey] = {}
    for key, stored in candidates:
        if key not in found or stored.revision > found[key].revision:
            found[key] = stored
    return found
