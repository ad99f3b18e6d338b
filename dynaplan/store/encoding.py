"""Keys, values and ranges as etcd's JSON gateway writes them."""

from __future__ import annotations

import base64
from typing import Any

from dynaplan.store.model import KeyValue

Document = dict[str, Any]


def encoded(text: str) -> str:
    """Text as it travels: base64 of its UTF-8; bytes that are none stand in it by ``surrogateescape``."""
    return base64.b64encode(text.encode(errors="surrogateescape")).decode()


def decoded(text: str) -> str:
    """The text that travelled; bytes of others that are no text do not make it fail."""
    return base64.b64decode(text).decode(errors="surrogateescape")


def key_range(prefix: str) -> Document:
    """The range of all keys with that prefix; the empty prefix means every key."""
    if not prefix:
        return {"key": base64.b64encode(b"\0").decode(), "range_end": base64.b64encode(b"\0").decode()}
    start = prefix.encode(errors="surrogateescape")
    # No key that is UTF-8 has the byte 0xff; behind others' bytes that are none, adding one would carry.
    stem = start.rstrip(b"\xff")
    end = stem[:-1] + bytes([stem[-1] + 1]) if stem else b"\0"
    return {"key": encoded(prefix), "range_end": base64.b64encode(end).decode()}


def key_value(document: Document) -> KeyValue:
    """One key as etcd describes it; fields that are zero are left out there."""
    return KeyValue(
        key=decoded(document["key"]),
        value=decoded(document.get("value", "")),
        revision=int(document.get("mod_revision", 0)),
        lease=int(document.get("lease", 0)),
    )


def key_values(answer: Document) -> tuple[KeyValue, ...]:
    """The keys of a range answer."""
    return tuple(key_value(document) for document in answer.get("kvs", ()))
