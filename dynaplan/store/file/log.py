"""The log of a store: a line for each record, first its CRC-32 in hexadecimal, then JSON.

The first line is the header, a record of everything; the records after it have consecutive numbers. A record
counts once its line is whole, for each reader and for ever. Part of a line at the end is what a killed
writer left: the next one cuts it off.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from typing import Any

Record = dict[str, Any]

_APPENDING = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


class LogDamaged(Exception):
    """The log holds a whole line that no writer wrote."""


class StoreLog:
    """One log that is open for reading, and how far it has been read."""

    def __init__(self, directory: int, name: str) -> None:
        """Open the log of that name; raises OSError, or LogDamaged when it has no header."""
        self._directory = directory
        self._name = name
        self._fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        self.offset = 0
        try:
            self.header = self._read_header()
        except BaseException:
            os.close(self._fd)
            raise
        self.header_size = self.offset
        self.number: int = self.header["number"]

    def close(self) -> None:
        """Close the descriptor: no record can be read after it."""
        os.close(self._fd)

    def is_at(self, path: str) -> bool:
        """Tell whether the path leads to this very file; raises FileNotFoundError without any."""
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(self._fd))

    def read_on(self) -> list[Record]:
        """Return the records since the last call that are whole; raises LogDamaged at one that is wrong."""
        records: list[Record] = []
        for line in self._new_lines():
            record = parsed(line)
            if record is None or record.get("number") != self.number + 1:
                if records:
                    break  # These count; the next call meets the wrong one first.
                raise LogDamaged(f"at byte {self.offset}")
            records.append(record)
            self.number += 1
            self.offset += len(line) + 1
        return records

    def records_after(self, number: int) -> list[Record]:
        """Return the records read so far with a number above that one."""
        lines = os.pread(self._fd, self.offset - self.header_size, self.header_size).splitlines()
        records = (parsed(line) for line in lines)
        return [record for record in records if record and record["number"] > number]

    def append(self, record: Record) -> None:
        """Write a record behind the last one read; afterwards it is there as a whole, or not at all."""
        fd = os.open(self._name, _APPENDING, dir_fd=self._directory)
        try:
            if os.fstat(fd).st_size > self.offset:
                os.ftruncate(fd, self.offset)
            try:
                write_all(fd, line_of(record))
            except OSError:
                os.ftruncate(fd, self.offset)
                raise
        finally:
            os.close(fd)

    def _read_header(self) -> Record:
        line = next(self._new_lines(), None)
        header = parsed(line) if line is not None else None
        if header is None or "identity" not in header:
            raise LogDamaged("it has no header")
        self.offset += len(line or b"") + 1
        return header

    def _new_lines(self) -> Iterator[bytes]:
        size = os.fstat(self._fd).st_size
        if size <= self.offset:
            return iter(())
        *lines, _ = os.pread(self._fd, size - self.offset, self.offset).split(b"\n")
        return iter(lines)


def line_of(record: Record) -> bytes:
    """Write the record as a line of the log: its checksum in hex, a space, its JSON."""
    body = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %b\n" % (zlib.crc32(body), body)


def parsed(line: bytes) -> Record | None:
    """Return the record in a line; None when it is none, or has been changed since it was written."""
    checksum, _, body = line.partition(b" ")
    try:
        record = json.loads(body) if int(checksum, 16) == zlib.crc32(body) else None
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def write_all(fd: int, data: bytes) -> None:
    """Write all of it, in several pieces where the kernel takes less at once."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
