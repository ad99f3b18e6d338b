"""TensorBoard's event file format, scalars only, without protobuf.

A file is a sequence of TFRecords: length (8 bytes), its masked CRC-32C, the data, its masked CRC-32C, little
endian. The data is a protobuf ``tensorflow.Event``: wall_time 1 (double), step 2 (int64), file_version 3
(string), summary 5; ``Summary.Value``: tag 1 (string), simple_value 2 (float).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

FILE_VERSION = b"brain.Event:2"
"""The version that the first record of a file states."""


def header(wall_time_s: float) -> bytes:
    """Return the first record of an event file."""
    return _record(_double(1, wall_time_s) + _bytes(3, FILE_VERSION))


def scalars(wall_time_s: float, step: int, values: Mapping[str, float]) -> bytes:
    """Return one record with a scalar for each tag, at a time since the epoch and a step of 0 or more."""
    summary = b"".join(_bytes(1, _bytes(1, tag.encode()) + _float(2, value)) for tag, value in values.items())
    return _record(_double(1, wall_time_s) + b"\x10" + _varint(step) + _bytes(5, summary))


def crc32c(data: bytes) -> int:
    """Return the CRC-32C (Castagnoli) of the data."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ (crc >> 8)
    return crc ^ 0xFFFFFFFF


def _table_entry(value: int) -> int:
    for _ in range(8):
        value = (value >> 1) ^ (0x82F63B78 if value & 1 else 0)
    return value


_TABLE = tuple(_table_entry(value) for value in range(256))


def _record(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return length + _masked_crc(length) + data + _masked_crc(data)


def _masked_crc(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def _bytes(field: int, data: bytes) -> bytes:
    return bytes([field << 3 | 2]) + _varint(len(data)) + data


def _double(field: int, value: float) -> bytes:
    return bytes([field << 3 | 1]) + struct.pack("<d", value)


def _float(field: int, value: float) -> bytes:
    return bytes([field << 3 | 5]) + struct.pack("<f", value)
