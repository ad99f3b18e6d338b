"""Crashes that requests have caused: a frontend names them, and the fleet plugin does not count them.

Key ``v1/{namespace}/forgiven_crashes/{instance id as hex}``, under a lease; the value says nothing more.
"""

from __future__ import annotations

from collections.abc import Iterable

from dynaplan.domain.documents import LARGEST_WHOLE

_MOST_DIGITS = 16
_HEXADECIMAL = frozenset("0123456789abcdef")


def forgiven_prefix(namespace: str) -> str:
    """Return the prefix of the keys of forgiven crashes."""
    return f"v1/{namespace}/forgiven_crashes/"


def forgiven_key(namespace: str, instance_id: int) -> str:
    """Return the key that says that this instance died of a request."""
    return f"{forgiven_prefix(namespace)}{instance_id:x}"


def forgiven_instances(namespace: str, keys: Iterable[str]) -> frozenset[int]:
    """Read the instance ids; a key that ends in none is left out."""
    found = (_instance_id(key.removeprefix(forgiven_prefix(namespace))) for key in keys)
    return frozenset(identity for identity in found if identity)


def _instance_id(digits: str) -> int:
    """The instance id, 0 for any other text."""
    if not 0 < len(digits) <= _MOST_DIGITS or set(digits) - _HEXADECIMAL:
        return 0
    number = int(digits, 16)
    return number if number <= LARGEST_WHOLE else 0
