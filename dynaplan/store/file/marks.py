"""Marks beside the log: the number of the last record that has been drawn, and until when each lease lives.

They are apart from the log because they are no changes: they wake nobody up. They stand in the file that
writers lock. Times are of the machine's monotonic clock, which all processes share, and which stands
still while the machine is suspended.
"""

from __future__ import annotations

import os
import struct

_DIGITS = 20
_FIRST_ENTRY = 32
_ENTRY = struct.Struct("<Qd")


class StoreMarks:
    """The open file: decimal digits, then entries of a lease and its end in seconds. Methods raise
    OSError.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def drawn(self) -> int:
        """Return the number of the last record that has been drawn; 0 in a new file."""
        digits = os.pread(self._fd, _DIGITS, 0)
        return int(digits) if digits.isdigit() else 0

    def set_drawn(self, number: int) -> None:
        """Note that every record up to that number has been drawn."""
        os.pwrite(self._fd, b"%0*d\n" % (_DIGITS, number), 0)

    def renew(self, slot: int, lease: int, until_s: float) -> None:
        """Set the end of a lease."""
        os.pwrite(self._fd, _ENTRY.pack(lease, until_s), _FIRST_ENTRY + slot * _ENTRY.size)

    def ends(self) -> dict[int, float]:
        """Return lease -> its end; leases that exist no more may be among them."""
        data = os.pread(self._fd, os.fstat(self._fd).st_size, _FIRST_ENTRY)
        whole = len(data) - len(data) % _ENTRY.size
        return dict(_ENTRY.iter_unpack(data[:whole]))
