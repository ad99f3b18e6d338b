"""What each key uses: its requests in flight, and its requests and tokens of this minute and the one before.

Frontends on one port share a key's limits: a client with one connection reaches always the same of them, so a
limit in parts would be a fraction of what was promised. Each writes words that the others read, and adds up
what all of them say. What two of them admit in the same moment may exceed a limit by one; what a frontend had
counted goes with it when it dies: a minute at most.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from dynaplan.gateway.keys.limits import WINDOW_S, Used
from dynaplan.util.shared_words import SharedWords

MAX_KEYS = 4096
"""Names of keys that one frontend counts in its life; further ones share a record. Files are sparse."""

_WORDS = 8
_ID, _IN_FLIGHT, _MINUTE, _REQUESTS, _REQUESTS_BEFORE, _TOKENS, _TOKENS_BEFORE = (0, *range(2, 8))
"""The words of a record: two of the name's hash, then one for each number."""


class KeyCounts:
    """The counts of one frontend. ``directory`` is that of all on the port; None for one that is alone.

    ``unix_s`` is the wall clock, which all of them have in common.
    """

    def __init__(self, directory: Path | None, unix_s: Callable[[], float]) -> None:
        self.unix_s = unix_s
        self._shared = SharedWords(directory, MAX_KEYS * _WORDS)
        self._words = self._shared.mine
        self._offsets: dict[str, int] = {}
        self._others: dict[str, _OtherCounts] = {}
        self.look_for_others()

    def look_for_others(self) -> None:
        """Find frontends that have come, and forget those that have died."""
        self._shared.look_for_others()
        known = self._others
        self._others = {
            name: known.get(name) or _OtherCounts(words) for name, words in self._shared.others.items()
        }

    def close(self) -> None:
        """Let others forget this frontend."""
        self._shared.close()

    def add(self, name: str, *, in_flight: int = 0, requests: int = 0, tokens: int = 0) -> None:
        """Count for the key of that name.

        Fewer ``tokens`` take back what a minute has; what an earlier one had too many stays counted there.
        """
        at, words = self._offsets.get(name), self._words
        if at is None:
            at = self._new_record(name)
        minute = int(self.unix_s() // WINDOW_S)
        if (passed := minute - words[at + _MINUTE]) != 0:
            for now in (_REQUESTS, _TOKENS):
                words[at + now + 1] = words[at + now] if passed == 1 else 0
                words[at + now] = 0
            words[at + _MINUTE] = minute
        words[at + _IN_FLIGHT] += in_flight
        words[at + _REQUESTS] += requests
        if tokens:
            words[at + _TOKENS] = max(0, words[at + _TOKENS] + tokens)

    def used(self, name: str) -> Used:
        """Return what all frontends have counted for it."""
        minute = int(self.unix_s() // WINDOW_S)
        at, words = self._offsets.get(name), self._words
        if at is None:
            at = self._new_record(name)
        if not self._others and words[at + _MINUTE] == minute:  # as most are, without a call
            return Used(words[at + _IN_FLIGHT], *words[at + _REQUESTS : at + _WORDS])
        own = _read(words, at, minute)
        others = (each.read(name, minute) for each in self._others.values())
        return Used(*map(sum, zip(own, *others, strict=True)))

    def _new_record(self, name: str) -> int:
        at = self._offsets[name] = _WORDS * min(len(self._offsets), MAX_KEYS - 1)
        self._words[at], self._words[at + 1] = _identity(name)
        return at


class _OtherCounts:
    """The words of another frontend, which goes on writing them."""

    def __init__(self, words: memoryview[int]) -> None:
        self._words = words
        self._found: dict[tuple[int, int], int] = {}
        self._unread = self._records()

    def read(self, name: str, minute: int) -> Used:
        identity = _identity(name)
        if identity not in self._found:
            self._found |= self._unread
            self._unread = self._records(len(self._found))
        at = self._found.get(identity)
        return _read(self._words, at, minute) if at is not None else Used()

    def _records(self, known: int = 0) -> Iterator[tuple[tuple[int, int], int]]:
        """Yield the records that are there behind those that are known, and where they begin."""
        for at in range(_WORDS * known, len(self._words), _WORDS):
            if not self._words[at]:
                return
            yield (self._words[at], self._words[at + 1]), at


def _read(words: memoryview[int], at: int, minute: int) -> Used:
    passed = minute - words[at + _MINUTE]
    requests, tokens = words[at + _REQUESTS], words[at + _TOKENS]
    if passed == 0:
        before = words[at + _REQUESTS_BEFORE], words[at + _TOKENS_BEFORE]
        return Used(words[at + _IN_FLIGHT], requests, before[0], tokens, before[1])
    if passed == 1:
        return Used(words[at + _IN_FLIGHT], 0, requests, 0, tokens)
    return Used(words[at + _IN_FLIGHT])


@cache
def _identity(name: str) -> tuple[int, int]:
    first, second = struct.unpack("qq", hashlib.blake2b(name.encode(), digest_size=16).digest())
    return first | 1, second  # a record that begins with 0 is free
