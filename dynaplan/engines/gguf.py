"""Reads the header of a GGUF file: its metadata, and how long the file must be. Never its tensors.

The file may be anybody's, so the reader is total and bounded: whatever the bytes say, it returns what it
could read, and it reads ``MAX_HEADER_BYTES`` and ``MAX_KEYS`` at most. The model's architecture stands
before its tokenizer, with which the reader stops. Source: the GGUF specification (ggml/docs/gguf.md),
versions 2 and 3, little-endian.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEYS = 4096
MAX_HEADER_BYTES = 64 * 2**20
MAX_STRING_BYTES = 1024
MAX_ARRAY_LENGTH = 1024
"""The most elements of an array that is kept: one per layer."""

NUMBER_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The struct format of each numeric type of the specification."""

STRING, ARRAY = 8, 9

TOKENIZER = "tokenizer."

ALIGNMENT_KEY, DEFAULT_ALIGNMENT = "general.alignment", 32

CHAT_TEMPLATE, MAX_TEMPLATE_BYTES = "tokenizer.chat_template", 2**20

MAX_TENSORS = 2**18
MAX_STRINGS = 2**21
"""The most texts of an array that are passed over: the tokens of a vocabulary."""

MAX_DIMENSIONS = 8

TENSOR_TYPES = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 20: (32, 18),
    23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 30: (1, 2), 39: (32, 17),
}  # fmt: skip
"""Values in a block, and the block's bytes, of each tensor type by its number in ggml.h (``ggml_type``)."""


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


def min_file_bytes(path: Path) -> int:
    """Return the bytes that the file must have at least to hold its tensors; 0 when that is not known.

    A tensor of an unknown type counts as empty.
    """
    try:
        with path.open("rb") as file:
            header = _Header(file)
            alignment = DEFAULT_ALIGNMENT
            for _ in range(header.keys):
                name = header.text()
                value = header.value(header.number("I"), MAX_STRINGS)
                if name == ALIGNMENT_KEY and isinstance(value, int) and value > 0:
                    alignment = value
            ends = [header.tensor()[1] for _ in range(min(MAX_TENSORS, header.tensors))]
            begin = -(-file.tell() // alignment) * alignment
    except (OSError, _Unreadable):
        return 0
    return begin + max(ends) if ends else 0


@dataclass(frozen=True)
class ModelDescription:
    """What a file says of its model: all its keys, its number of parameters, and its chat template."""

    metadata: Mapping[str, Any] = field(default_factory=dict)
    parameters: int = 0
    chat_template: str = ""


def read_description(path: Path) -> ModelDescription:
    """Return what the header says, the tokenizer's short keys included; empty for what cannot be read.

    It takes some 50 ms, as the vocabulary has to be passed over.
    """
    found: dict[str, Any] = {}
    parameters, template = 0, ""
    try:
        with path.open("rb") as file:
            header = _Header(file)
            for _ in range(header.keys):
                name, kind = header.text(), header.number("I")
                if name == CHAT_TEMPLATE and kind == STRING:
                    template = header.text(MAX_TEMPLATE_BYTES) or ""
                elif (value := header.value(kind, MAX_STRINGS)) is not None and name:
                    found[name] = value
            parameters = sum(header.tensor()[0] for _ in range(min(MAX_TENSORS, header.tensors)))
    except (OSError, _Unreadable):
        pass
    return ModelDescription(found, parameters, template)


class _Header:
    """A cursor in the header; every method raises _Unreadable instead of reading beyond its bounds."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        if self._bytes(4) != MAGIC or self.number("I") not in VERSIONS:
            raise _Unreadable
        self.tensors = int(self.number("Q"))
        self.keys = min(MAX_KEYS, int(self.number("Q")))

    def number(self, kind: str) -> Any:
        """Return the next number, of that struct format."""
        return struct.unpack(f"<{kind}", self._bytes(struct.calcsize(f"<{kind}")))[0]

    def text(self, max_bytes: int = MAX_STRING_BYTES) -> str | None:
        """Return the next text; None for one that is too long, which is passed over."""
        length = int(self.number("Q"))
        if length > max_bytes:
            self._skip(length)
            return None
        return self._bytes(length).decode(errors="replace")

    def tensor(self) -> tuple[int, int]:
        """Return how many values the next tensor has, and where it ends, in bytes after the begin of all."""
        self.text()
        dimensions = self.number("I")
        if dimensions > MAX_DIMENSIONS:
            raise _Unreadable
        values = math.prod(int(self.number("Q")) for _ in range(dimensions))
        kind, offset = self.number("I"), int(self.number("Q"))
        block_values, block_bytes = TENSOR_TYPES.get(kind, (1, 0))
        return values, offset + values // block_values * block_bytes

    def value(self, kind: int, max_strings: int = MAX_ARRAY_LENGTH) -> Any:
        """Return the next value; None for one that is passed over: too long, or a list of texts.

        Raises _Unreadable for a list of more than ``max_strings`` texts.
        """
        if kind in NUMBER_FORMATS:
            return self.number(NUMBER_FORMATS[kind])
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            raise _Unreadable
        kind, length = self.number("I"), int(self.number("Q"))
        if kind == STRING and length <= max_strings:
            for _ in range(length):
                self._skip(int(self.number("Q")))
            return None
        if kind not in NUMBER_FORMATS:
            raise _Unreadable
        if length > MAX_ARRAY_LENGTH:
            self._skip(length * struct.calcsize(f"<{NUMBER_FORMATS[kind]}"))
            return None
        return tuple(self.number(NUMBER_FORMATS[kind]) for _ in range(length))

    def _skip(self, length: int) -> None:
        if self._file.tell() + length > MAX_HEADER_BYTES:
            raise _Unreadable
        self._file.seek(length, 1)

    def _bytes(self, length: int) -> bytes:
        read = self._file.read(length)
        if len(read) != length or self._file.tell() > MAX_HEADER_BYTES:
            raise _Unreadable
        return read
