"""The messages of a bucket: as they are read from its stream, and as they are written to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dynaplan.store.model import KeyValue
from dynaplan.store.nats_kv.subjects import GUARD, key_of, lease_name

OPERATION = "KV-Operation"
GONE = frozenset({"DEL", "PURGE"})
MARKER = "Nats-Marker-Reason"
TTL = "Nats-TTL"
EXPECTED = "Nats-Expected-Last-Subject-Sequence"
EXPECTED_SUBJECT = "Nats-Expected-Last-Subject-Sequence-Subject"
LEASE = "Dynaplan-Lease"

TOMBSTONE_TTL_S = 600
"""Seconds that the mark of a deleted key stays; a watch that begins later reads what is there."""


@dataclass(frozen=True)
class Entry:
    """The last message under a name of the bucket."""

    name: str
    data: bytes
    sequence: int
    headers: Mapping[str, str]

    @property
    def is_gone(self) -> bool:
        """True for the mark of something deleted, revoked or expired."""
        return self.is_deleted or MARKER in self.headers

    @property
    def is_deleted(self) -> bool:
        """True for the mark of something deleted or revoked: somebody has done it, not the time."""
        return self.headers.get(OPERATION) in GONE

    @property
    def lease(self) -> int:
        """The lease that the entry lives under; 0 without one."""
        try:
            return int(self.headers.get(LEASE, "0"), 16)
        except ValueError:
            return 0

    @property
    def ttl_s(self) -> int:
        """The time to live of a lease, in seconds; 0 when it does not say."""
        return int(self.data) if self.data.isdigit() else 0

    @property
    def item(self) -> KeyValue | None:
        """The key with its value; None for what no key has written, or what is gone."""
        key = None if self.is_gone else key_of(self.name)
        if key is None:
            return None
        return KeyValue(key, self.data.decode(errors="surrogateescape"), self.sequence, self.lease)


@dataclass(frozen=True)
class Draft:
    """A message to be written under a name."""

    name: str
    data: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    def if_last(self, sequence: int) -> Draft:
        """Return it such that it is refused unless the name's last message is this one; 0: there is none."""
        return replace(self, headers={**self.headers, EXPECTED: str(sequence)})

    def if_last_of(self, subject: str, sequence: int) -> Draft:
        """Return it such that it is refused unless that is the last message of another subject."""
        return replace(self, headers={**self.headers, EXPECTED: str(sequence), EXPECTED_SUBJECT: subject})


def value_draft(name: str, value: str, lease: int) -> Draft:
    """Return the message that writes a value, under a lease unless 0."""
    headers = {LEASE: f"{lease:x}"} if lease else {}
    return Draft(name, value.encode(errors="surrogateescape"), headers)


def tombstone(name: str) -> Draft:
    """Return the message that deletes what is under the name, as NATS' own clients do."""
    return Draft(name, headers={OPERATION: "PURGE", "Nats-Rollup": "sub", TTL: f"{TOMBSTONE_TTL_S}s"})


def lease_draft(lease: int, ttl_s: int) -> Draft:
    """Return the message that lets a lease live for that time, in seconds; the server ends it."""
    return Draft(lease_name(lease), str(ttl_s).encode(), {TTL: f"{max(ttl_s, 1)}s"})


def guard(subject: str, sequence: int) -> Draft:
    """Return a message that says nothing, and is refused unless that is the last message of the subject."""
    return Draft(GUARD).if_last_of(subject, sequence)
