"""Keys as NATS subjects: readable, reversible, and such that a prefix of keys is a filter of subjects.

A key is cut at its slashes into the tokens of a subject. In a token every byte of its UTF-8 that is neither
a letter, a digit, ``-`` nor ``_`` is written as ``=`` and two hexadecimal digits; an empty token is ``=``::

    v1/box/planner/decision_id      v1.box.planner.decision_id
    /services/box/Worker/generate   =.services.box.Worker.generate
    v1/vllm-agg.2/Größe             v1.vllm-agg=2E2.Gr=C3=B6=C3=9Fe

Every character is one that key-value clients of NATS allow. The names beginning with ``=lease``,
``=identity`` and ``=guard`` are no key's, and hold what is ours.
"""

from __future__ import annotations

import re

IDENTITY = "=identity"
GUARD = "=guard"
LEASES = "=lease"

LONGEST_NAME_BYTES = 3500
"""Longest name of a key: a line of the protocol, 4096 bytes, holds it and an address for the answer."""

_ESCAPED = re.compile(rb"[^A-Za-z0-9_-]")
_ESCAPE = re.compile(rb"=([0-9A-F]{2})")


def name_of(key: str) -> str:
    """Return the key's name in the bucket; a character that is no text (surrogateescape) keeps its byte."""
    return ".".join(_token(part) for part in key.split("/"))


def key_of(name: str) -> str | None:
    """Return the key with that name in the bucket; None for a name that no key has."""
    parts = ["" if token == "=" else _part(token) for token in name.split(".")]
    key = "/".join(parts)
    return key if name_of(key) == name else None


def filter_of(prefix: str) -> str:
    """Return the narrowest filter of names that lets every key with the prefix through."""
    whole = prefix.split("/")[:-1]
    return ".".join([*(_token(part) for part in whole), ">"])


def lease_name(lease: int) -> str:
    """Return the name in the bucket under which a lease lives."""
    return f"{LEASES}.{lease:x}"


def lease_of(name: str) -> int | None:
    """Return the lease that lives under the name; None for every other name."""
    first, _, number = name.partition(".")
    if first != LEASES:
        return None
    try:
        return int(number, 16)
    except ValueError:
        return None


def _token(part: str) -> str:
    if not part:
        return "="
    data = part.encode(errors="surrogateescape")
    return _ESCAPED.sub(lambda match: b"=%02X" % match[0][0], data).decode("ascii")


def _part(token: str) -> str:
    data = _ESCAPE.sub(lambda match: bytes([int(match[1], 16)]), token.encode(errors="surrogateescape"))
    return data.decode(errors="surrogateescape")
