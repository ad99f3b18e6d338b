"""KV entries that outlast their process: a model that is put away saves its slots for its next load.

An agent's prompt of 50,000 tokens is then read from memory, and not computed again. The steps, with what each
guards against:

1. The model is put away and has no request left. Its slots are candidates, the last used first; a slot that
   was restored and not used since comes after those (``candidates``).
2. ``choose`` takes as many as there is room for, and says which older files, of other models too, must go for
   them. The room is ``saved-kv``, and no more than half of what the directory and the memory have free: saved
   entries must not keep the next model from its memory (``room_bytes``). A load on the CPU that
   needs theirs removes them (``remove_saved``).
3. llama.cpp writes a slot into a file of the worker's own, which goes with the worker if it dies half-way.
   Whole, the file gets its final name, which states what is in it (``SavedSlot``). Names sort by age.
4. The next load takes the files with its fingerprint: renamed to its own name first, all of them, so that an
   engine that dies over one does not find it again. A file is read only with the size that was written:
   llama.cpp aborts over a file that was cut.

The fingerprint is of everything that makes KV entries differ: the model's files, the options and the version
of llama.cpp. The files lie in the deployment's scratch directory and go with it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

SAVE_TIMEOUT_S = 5.0
"""Seconds that saving may delay the end of a worker, and so a swap; memory takes 1 to 2 GB in a second."""

RESTORE_TIMEOUT_S = 5.0
"""Seconds that restoring may delay the start of a worker."""

MIN_SAVED_TOKENS = 64
"""A prompt that is shorter is computed about as fast as it is read."""

MAX_MODEL_LENGTH = 120
"""Characters of a model's name in the name of a file, which has at most 255."""

_NAME = re.compile(r"saved\.(\d{20})\.([0-9a-f]{16})\.(\d+)\.(\d+)\.(.+)", re.ASCII)


@dataclass(frozen=True)
class SavedSlot:
    """One saved file: its model and fingerprint, its tokens and size, and its age.

    ``saved_at_ns``, in ns since the epoch, orders files: the last used slot of a worker has the greatest.
    """

    saved_at_ns: int
    fingerprint: str
    tokens: int
    size_bytes: int
    model: str

    @property
    def file_name(self) -> str:
        model = quote(self.model, safe="")[:MAX_MODEL_LENGTH]
        return f"saved.{self.saved_at_ns:020d}.{self.fingerprint}.{self.tokens}.{self.size_bytes}.{model}"

    @classmethod
    def parse(cls, name: str) -> SavedSlot | None:
        """Read the name of a file; None for any other file."""
        found = _NAME.fullmatch(name)
        if not found:
            return None
        saved_at, fingerprint, tokens, size, model = found.groups()
        return cls(int(saved_at), fingerprint, int(tokens), int(size), unquote(model))


class UsedSlot(NamedTuple):
    """A slot that could be saved, and about how many tokens its KV entries are of."""

    slot: int
    tokens: int


class Choice(NamedTuple):
    """The slots to save, in this order, and the files to remove for them."""

    slots: tuple[UsedSlot, ...]
    removed: tuple[SavedSlot, ...]


def candidates(used: Mapping[int, tuple[int, int]], restored: Mapping[int, int]) -> list[UsedSlot]:
    """Order the slots to save: the last used first, then restored ones that were not used since.

    ``used`` is slot -> (number of its last task, which rises; its tokens), ``restored`` slot -> tokens.
    """
    in_use = sorted(used, key=lambda slot: used[slot][0], reverse=True)
    return [
        *(UsedSlot(slot, used[slot][1]) for slot in in_use),
        *(UsedSlot(slot, tokens) for slot, tokens in restored.items() if slot not in used),
    ]


def choose(
    slots: Iterable[UsedSlot], saved: Iterable[SavedSlot], token_bytes: float, room_bytes: float
) -> Choice:
    """Choose what is kept within ``room_bytes``: these slots in their order, then the newest files.

    What is larger than the room that is left is passed over, for something older that fits.
    """
    chosen, removed = [], []
    for each in slots:
        if each.tokens >= MIN_SAVED_TOKENS and each.tokens * token_bytes <= room_bytes:
            chosen.append(each)
            room_bytes -= each.tokens * token_bytes
    for file in newest_first(saved):
        if file.size_bytes <= room_bytes:
            room_bytes -= file.size_bytes
        else:
            removed.append(file)
    return Choice(tuple(chosen), tuple(removed))


def room_bytes(limit_bytes: int, free_bytes: int, saved_bytes: int) -> int:
    """Return the bytes that all files may take: the limit, or half of what would be free without them."""
    return min(limit_bytes, (free_bytes + saved_bytes) // 2)


def newest_first(saved: Iterable[SavedSlot]) -> list[SavedSlot]:
    return sorted(saved, key=lambda each: each.saved_at_ns, reverse=True)


def fingerprint_of(settings: Mapping[str, Any], files: Sequence[Path]) -> str:
    """Digest the settings and the files' paths, sizes and times.

    Empty without files, or if one cannot be read.
    """
    try:
        stats = [(str(each.resolve()), each.stat().st_size, each.stat().st_mtime_ns) for each in files]
    except OSError:
        return ""
    text = json.dumps([settings, stats], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16] if stats else ""


def saved_by_model(directory: Path) -> dict[str, list[SavedSlot]]:
    """Return what is saved there, by model."""
    found: dict[str, list[SavedSlot]] = {}
    for each in saved_in(directory):
        found.setdefault(each.model, []).append(each)
    return found


def saved_in(directory: Path) -> list[SavedSlot]:
    """List what is saved there, the newest first; nothing when the directory cannot be read."""
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    return newest_first(each for each in map(SavedSlot.parse, names) if each)


def remove_saved(directory: Path, wanted_bytes: int, model: str) -> int:
    """Remove saved files of ``wanted_bytes`` in all, or all there are; return the bytes of those removed.

    The oldest go first, and those of the model last.
    """
    own = _name_in_file(model)
    removed_bytes = 0
    for each in sorted(saved_in(directory), key=lambda each: (each.model == own, each.saved_at_ns)):
        if removed_bytes >= wanted_bytes:
            break
        (directory / each.file_name).unlink(missing_ok=True)
        removed_bytes += each.size_bytes
    return removed_bytes


def _name_in_file(model: str) -> str:
    return unquote(quote(model, safe="")[:MAX_MODEL_LENGTH])


class SavedSlots:
    """The saved files of one deployment, as a worker of one model uses them; methods raise OSError."""

    def __init__(self, directory: Path, model: str, fingerprint: str, limit_bytes: int) -> None:
        self._directory = directory
        self._model = _name_in_file(model)
        self._fingerprint = fingerprint
        self._limit_bytes = limit_bytes
        self._saved_at_ns = 0

    def make_room(self, slots: Iterable[UsedSlot], token_bytes: float) -> Sequence[UsedSlot]:
        """Choose the slots to save, and remove the files that must go for them."""
        saved = saved_in(self._directory)
        chosen, removed = choose(slots, saved, token_bytes, self._room_bytes(saved))
        self._remove(removed)
        self._saved_at_ns = time.time_ns()
        return chosen

    def keep(self, own_name: str, tokens: int, size_bytes: int) -> bool:
        """Give a file that llama.cpp wrote for this worker its final name; False if it is not worth it.

        That is one that is not whole, or has too few tokens. To be called after ``make_room``, the newest
        slot first.
        """
        path = self._directory / own_name
        if path.stat().st_size != size_bytes or tokens < MIN_SAVED_TOKENS:
            return False
        saved = SavedSlot(self._saved_at_ns, self._fingerprint, tokens, size_bytes, self._model)
        self._saved_at_ns -= 1
        path.chmod(0o600)
        path.rename(self._directory / saved.file_name)
        return True

    def trim(self) -> None:
        """Remove the files beyond the room, the oldest first: slots may be larger than was estimated."""
        saved = saved_in(self._directory)
        self._remove(choose((), saved, 0, self._room_bytes(saved)).removed)

    def claim(self, own_names: Iterable[str]) -> dict[str, SavedSlot]:
        """Rename the newest files with this worker's fingerprint to ``own_names``; name -> the saved slot.

        The model's other files are deleted: they have another fingerprint, or there is no slot left for them.
        """
        mine = [each for each in saved_in(self._directory) if each.model == self._model]
        fitting = [each for each in mine if each.fingerprint == self._fingerprint]
        claimed = {own: each for own, each in zip(own_names, fitting, strict=False) if self._take(each, own)}
        self._remove(mine)
        return claimed

    def _take(self, saved: SavedSlot, own_name: str) -> bool:
        """Rename the file; False when it is not there any more, or not of the size that was written."""
        path = self._directory / saved.file_name
        try:
            status = path.lstat()
            is_whole = stat.S_ISREG(status.st_mode) and status.st_size == saved.size_bytes
            if is_whole:
                path.rename(self._directory / own_name)
        except FileNotFoundError:
            return False
        return is_whole

    def _room_bytes(self, saved: Iterable[SavedSlot]) -> int:
        import psutil

        free = min(shutil.disk_usage(self._directory).free, psutil.virtual_memory().available)
        return room_bytes(self._limit_bytes, free, sum(each.size_bytes for each in saved))

    def _remove(self, saved: Iterable[SavedSlot]) -> None:
        for each in saved:
            (self._directory / each.file_name).unlink(missing_ok=True)
