"""Places of key files: ``v1/instances`` and every other first two parts of a key are directories.

===========================================  =====================================================
key                                          file
===========================================  =====================================================
``v1/instances/box/backend/generate/1f``     ``v1/instances/box%2Fbackend%2Fgenerate%2F1f``
``v1/box/planner/num_decode_workers``        ``v1/box/planner%2Fnum%5Fdecode%5Fworkers``
``/services/box/backend/generate/1f``        ``%2Fservices/box/backend%2Fgenerate%2F1f``
``a/b`` (less than three parts)              ``+flat/a%2Fb``
===========================================  =====================================================

In a file's name every byte but ASCII letters and digits is percent-encoded, as the original does. A name
longer than a file system takes keeps its beginning, and ends in ``+`` and a digest of the whole.
"""

from __future__ import annotations

import hashlib
import string

FLAT = "+flat"
"""The directory of keys with less than three parts; no encoded name holds a ``+``."""

LONGEST_NAME = 255
"""The most bytes in a name of a file (``NAME_MAX`` of every usual file system)."""

_DIGEST_DIGITS = 32
_ALPHANUMERIC = frozenset((string.ascii_letters + string.digits).encode())
_IN_DIRECTORIES = _ALPHANUMERIC | frozenset(b"-_.")


def place_of(key: str) -> tuple[tuple[str, ...], str]:
    """Return the directories that lead to a key's file, and its name; no other key has the same."""
    root = key[:1] if key.startswith("/") else ""
    first, _, remainder = key[len(root) :].partition("/")
    second, _, rest = remainder.partition("/")
    if first and second and rest:
        return (_directory(root + first), _directory(second)), _fitting(_encoded(rest, _ALPHANUMERIC))
    return (FLAT,), _fitting(_encoded(key, _ALPHANUMERIC))


def bytes_of(text: str) -> bytes:
    """Return the bytes that a key or a value stands for; raises UnicodeEncodeError for half a character."""
    return text.encode(errors="surrogateescape")


def _directory(part: str) -> str:
    name = _encoded(part, _IN_DIRECTORIES)
    # Hidden directories, and the two that every directory has.
    return _fitting(f"%2E{name[1:]}" if name.startswith(".") else name)


def _encoded(text: str, kept: frozenset[int]) -> str:
    return "".join(chr(byte) if byte in kept else f"%{byte:02X}" for byte in bytes_of(text))


def _fitting(name: str) -> str:
    if len(name) <= LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()[:_DIGEST_DIGITS]
    return f"{name[: LONGEST_NAME - 1 - len(digest)]}+{digest}"
