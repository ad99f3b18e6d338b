"""Reads the metadata of a GGUF file: numbers and short texts of its header, never its tensors.

The file may be anybody's, so the reader is total and bounded: whatever the bytes say, it returns what it
could read, and it reads ``LONGEST_HEADER_BYTES`` and ``MOST_KEYS`` at most. The model's architecture stands
before its tokenizer, with which the reader stops. Source: the GGUF specification (ggml/docs/gguf.md),
versions 2 and 3, little-endian.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_KEYS = 4096
LONGEST_HEADER_BYTES = 64 * 2**20
LONGEST_TEXT_BYTES = 1024
LONGEST_ARRAY = 1024
"""The most elements of an array that is kept: one per layer."""

NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The struct format of each numeric type of the specification."""

TEXT, ARRAY = 8, 9

TOKENIZER = "tokenizer."


class _Unreadable(Exception):
    """The bytes are not what they should be."""


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the keys before the tokenizer's, with numbers, texts and arrays of numbers as their values.

    Whatever is too long to be of use is left out. Empty for a file that is no GGUF file, or unreadable.
    """
    found: dict[str, Any] = {}
    try:
        with path.open("rb") as file:
            header = _Header(file)
            for _ in range(header.keys):
                name = header.text()
                if name is None or name.startswith(TOKENIZER):
                    break
                value = header.value(header.number("I"))
                if value is not None:
                    found[name] = value
    except (OSError, _Unreadable):
        pass
    return found


class _Header:
    """A cursor in the header; every method raises _Unreadable instead of reading beyond its bounds."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        if self._bytes(4) != MAGIC or self.number("I") not in VERSIONS:
            raise _Unreadable
        self.number("Q")  # the number of tensors
        self.keys = min(MOST_KEYS, int(self.number("Q")))

    def number(self, kind: str) -> Any:
        """Return the next number, of that struct format."""
        return struct.unpack(f"<{kind}", self._bytes(struct.calcsize(f"<{kind}")))[0]

    def text(self) -> str | None:
        """Return the next text; None for one that is too long, which is passed over."""
        length = int(self.number("Q"))
        if length > LONGEST_TEXT_BYTES:
            self._skip(length)
            return None
        return self._bytes(length).decode(errors="replace")

    def value(self, kind: int) -> Any:
        """Return the next value; None for one that is passed over."""
        if kind in NUMBERS:
            return self.number(NUMBERS[kind])
        if kind == TEXT:
            return self.text()
        if kind != ARRAY:
            raise _Unreadable
        kind, length = self.number("I"), int(self.number("Q"))
        if kind == TEXT and length <= LONGEST_ARRAY:
            for _ in range(length):
                self.text()
            return None
        if kind not in NUMBERS:
            raise _Unreadable
        if length > LONGEST_ARRAY:
            self._skip(length * struct.calcsize(f"<{NUMBERS[kind]}"))
            return None
        return tuple(self.number(NUMBERS[kind]) for _ in range(length))

    def _skip(self, length: int) -> None:
        if self._file.tell() + length > LONGEST_HEADER_BYTES:
            raise _Unreadable
        self._file.seek(length, 1)

    def _bytes(self, length: int) -> bytes:
        read = self._file.read(length)
        if len(read) != length or self._file.tell() > LONGEST_HEADER_BYTES:
            raise _Unreadable
        return read
