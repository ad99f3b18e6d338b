"""Reservations of llama.cpp's slots, and the files in which KV entries travel from one slot to another.

llama.cpp lets any request name a slot, and makes it wait while the slot computes. It does not reserve a slot:
that entries restored into one are still there when their request comes is ensured here.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path

from dynaplan.engines.common.holds import HOLD_S, Holds
from dynaplan.util.errors import TemporaryError

log = logging.getLogger(__name__)

UNUSED_S = 10.0
"""Seconds after which a reserved slot that does not compute is taken back: its frontend has died."""


class _Reserved:
    """One reservation of a slot.

    ``idle_since_s`` is the time since which the slot has been seen not to compute, None while it computes.
    A slot is expected to compute only once the reservation ``is_announced`` to its owner.
    """

    __slots__ = ("idle_since_s", "is_announced", "slot")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.is_announced = False
        self.idle_since_s: float | None = None


class SlotPool:
    """The slots 0 to ``count`` - 1, each reserved for one owner at a time, in the order of asking.

    The slot that has been free longest is given out first: the KV entries in the others may still serve as a
    prefix. A slot that is given back is free once the engine has been seen not to compute there
    (``observe``): the request of a client that left may go on for a moment. A slot that was announced to its
    owner (``announce``) and does not compute for ``unused_s`` seconds is taken back; 0 means never.
    """

    def __init__(self, count: int, now_s: Callable[[], float], unused_s: float = UNUSED_S) -> None:
        self._now_s = now_s
        self._unused_s = unused_s
        self._free = deque(range(count))
        self._reserved: dict[str, _Reserved] = {}
        self._leaving: set[int] = set()
        self._waiting: dict[str, asyncio.Future[int]] = {}
        self.taken_back = 0

    @property
    def waiting(self) -> int:
        """The number of owners that wait for a slot."""
        return len(self._waiting)

    @property
    def reserved(self) -> int:
        """The number of slots that are reserved."""
        return len(self._reserved)

    @property
    def leaving(self) -> int:
        """The number of slots that were given back and are not yet seen idle."""
        return len(self._leaving)

    async def take(self, owner: str) -> int:
        """Wait for a slot and return its number; an owner that has one gets the same again.

        Raises TemporaryError when the owner gives it back meanwhile.
        """
        if owner in self._reserved:
            return self._reserved[owner].slot
        self._drop_waiter(owner, "it was asked for again")
        waiter: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[owner] = waiter
        self._hand_out()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.give_back(owner)
            elif self._waiting.get(owner) is waiter:
                del self._waiting[owner]
            raise

    def announce(self, owner: str) -> None:
        """Note that the owner hears of its slot now: from now on the slot is expected to compute."""
        if owner in self._reserved:
            self._reserved[owner].is_announced = True

    def give_back(self, owner: str, *, is_idle: bool = False) -> None:
        """End the owner's reservation, if it has one, and its waiting for one.

        ``is_idle`` says that the engine is known not to compute there.
        """
        self._drop_waiter(owner, "it was given back before it was had")
        held = self._reserved.pop(owner, None)
        if held is None:
            return
        if is_idle:
            self._free.append(held.slot)
            self._hand_out()
        else:
            self._leaving.add(held.slot)

    def observe(self, computing: Collection[int]) -> None:
        """Note the slots in which the engine computes now; in the others it does not."""
        for slot in sorted(self._leaving.difference(computing)):
            self._leaving.discard(slot)
            self._free.append(slot)
        for owner, held in list(self._reserved.items()):
            if held.slot in computing or not held.is_announced:
                held.idle_since_s = None
            elif held.idle_since_s is None:
                held.idle_since_s = self._now_s()
            elif 0 < self._unused_s <= self._now_s() - held.idle_since_s:
                log.warning("slot %d was reserved by %s and not used: taken back", held.slot, owner)
                self.taken_back += 1
                del self._reserved[owner]
                self._free.append(held.slot)
        self._hand_out()

    def _hand_out(self) -> None:
        while self._free and self._waiting:
            owner = next(iter(self._waiting))
            waiter = self._waiting.pop(owner)
            if not waiter.done():
                self._reserved[owner] = _Reserved(self._free.popleft())
                waiter.set_result(self._reserved[owner].slot)

    def _drop_waiter(self, owner: str, why: str) -> None:
        waiter = self._waiting.pop(owner, None)
        if waiter is not None and not waiter.done():
            waiter.set_exception(TemporaryError(f"no slot for {owner}: {why}"))


class SlotFiles:
    """The files into which a worker has saved slots, in ``directory``, held until they have been read.

    Their names begin with ``{worker_name}.``. A file that is not released within ``hold_s`` is deleted.
    """

    def __init__(self, directory: str, worker_name: str, hold_s: float = HOLD_S) -> None:
        self._directory = Path(directory) if directory else None
        self._worker_name = worker_name
        # The random part tells them from files of the worker's last life, whose names may still be under way.
        self._names = (f"{worker_name}.{secrets.token_hex(4)}.{number}.kv" for number in itertools.count(1))
        self._of: dict[str, list[str]] = {}
        self.holds = Holds(self._delete_of, hold_s)

    @property
    def directory(self) -> Path | None:
        """The directory of the files; None when this worker has none."""
        return self._directory

    def new_name(self) -> str:
        """Make a name that no other file has had."""
        return next(self._names)

    def assign(self, request_id: str, name: str) -> None:
        """Delete this file too when that request's hold ends; it may have several: work can come twice."""
        self._of.setdefault(request_id, []).append(name)

    def delete(self, name: str) -> None:
        """Delete one file; nothing happens when it is not there."""
        if self._directory is not None:
            try:
                (self._directory / name).unlink(missing_ok=True)
            except OSError as error:
                log.warning("cannot delete %s: %s", self._directory / name, error)

    def delete_all(self) -> None:
        """Delete every file of this worker, also those of a life before this one."""
        if self._directory is None or not self._directory.is_dir():
            return
        begin = f"{self._worker_name}."
        for path in self._directory.iterdir():
            if path.name.startswith(begin):
                self.delete(path.name)

    def find(self, name: object) -> str:
        """Return the name if it is that of a file here, else ""; it comes from another process."""
        if self._directory is None or not isinstance(name, str) or name != Path(name).name:
            return ""
        path = self._directory / name
        return name if name.endswith(".kv") and path.is_file() and not path.is_symlink() else ""

    def _delete_of(self, request_id: str) -> None:
        for name in self._of.pop(request_id, []):
            self.delete(name)
