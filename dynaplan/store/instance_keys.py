"""Keys that say something of one instance: ``v1/{namespace}/{name}/{instance id as hex}``, with any value.

Each lives under a lease, so that none outlasts what it says.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dynaplan.util.documents import MAX_WHOLE

_MOST_DIGITS = 16
_HEXADECIMAL = frozenset("0123456789abcdef")


@dataclass(frozen=True)
class InstanceKeys:
    """Keys ``v1/NAMESPACE/NAME/INSTANCE``: a mark that instances may have, such as asleep."""

    name: str

    def prefix(self, namespace: str) -> str:
        """Return the prefix of all of them in a namespace."""
        return f"v1/{namespace}/{self.name}/"

    def key(self, namespace: str, instance_id: int) -> str:
        """Return the key of one instance."""
        return f"{self.prefix(namespace)}{instance_id:x}"

    def instance(self, namespace: str, key: str) -> int:
        """Return the instance id that a key ends in; 0 for any other end."""
        digits = key.removeprefix(self.prefix(namespace))
        if not 0 < len(digits) <= _MOST_DIGITS or set(digits) - _HEXADECIMAL:
            return 0
        number = int(digits, 16)
        return number if number <= MAX_WHOLE else 0

    def instances(self, namespace: str, keys: Iterable[str]) -> frozenset[int]:
        """Return the instance ids of these keys; a key that ends in none is left out."""
        return frozenset(found for key in keys if (found := self.instance(namespace, key)))


ASLEEP = InstanceKeys("asleep")
"""The instance's engine sleeps: its worker says so. The value is why it cannot be woken, or empty."""

WAKE = InstanceKeys("wake")
"""Somebody wants the instance's engine to be awake; its worker takes the key away when it tries."""
