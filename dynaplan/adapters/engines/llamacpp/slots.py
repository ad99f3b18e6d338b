"""Who has which of llama.cpp's slots, and the files in which KV entries travel from one slot to another.

llama.cpp lets anybody name a slot and makes him wait while it computes. Exclusive use, so that what was
restored into a slot is still there when its request comes, is ours to see to.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections import deque
from collections.abc import Callable, Collection
from pathlib import Path

from dynaplan.adapters.engines.common.holds import HOLD_S, Holds
from dynaplan.domain.errors import TemporaryError

log = logging.getLogger(__name__)

UNUSED_S = 10.0
"""How long a slot may not compute once its owner was told of it: whoever asked for it has died."""


class _Reserved:
    """One slot's owner has it; ``idle_since_s`` is since when it has been seen not to compute, or None.

    Before he ``is_told``, nobody expects it to compute.
    """

    __slots__ = ("idle_since_s", "is_told", "slot")

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.is_told = False
        self.idle_since_s: float | None = None


class SlotPool:
    """The slots 0 to ``count`` - 1, each of one owner at a time; who comes first is served first.

    The slot that has been free longest goes first: what the others still hold may serve as a prefix. A slot
    that is given back is free once the engine has been seen not to compute there (``observe``): the request
    of a client that left may go on for a moment. One that was ``told`` to its owner and does not compute for
    ``unused_s`` is taken back; 0 means that nothing ever is.
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
        """How many wait for a slot."""
        return len(self._waiting)

    @property
    def reserved(self) -> int:
        """How many have one."""
        return len(self._reserved)

    @property
    def leaving(self) -> int:
        """How many slots were given back and not yet seen idle."""
        return len(self._leaving)

    async def take(self, owner: str) -> int:
        """A slot, as soon as there is one; the one that the owner has, if any.

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

    def told(self, owner: str) -> None:
        """The owner hears of his slot now: from now on it is expected to compute."""
        if owner in self._reserved:
            self._reserved[owner].is_told = True

    def give_back(self, owner: str, *, is_idle: bool = False) -> None:
        """The owner needs none any more; nothing happens when he has none.

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
        """In these slots the engine computes now, in the others it does not."""
        for slot in sorted(self._leaving.difference(computing)):
            self._leaving.discard(slot)
            self._free.append(slot)
        for owner, held in list(self._reserved.items()):
            if held.slot in computing or not held.is_told:
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
    """The files that a worker has saved slots into, in ``directory``, held until they have been read.

    Their names begin with ``{worker_name}.``; one that nobody releases in ``hold_s`` is deleted.
    """

    def __init__(self, directory: str, worker_name: str, hold_s: float = HOLD_S) -> None:
        self._directory = Path(directory) if directory else None
        self._worker_name = worker_name
        # A life's own: a file name of the last one may still be under way.
        self._names = (f"{worker_name}.{secrets.token_hex(4)}.{number}.kv" for number in itertools.count(1))
        self._of: dict[str, list[str]] = {}
        self.holds = Holds(self._delete_of, hold_s)

    @property
    def directory(self) -> Path | None:
        """Where they are; None when this worker has no such place."""
        return self._directory

    def new_name(self) -> str:
        """A name that no other file has had."""
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
        """The name when it is that of a file here, else "": it comes from another process."""
        if self._directory is None or not isinstance(name, str) or name != Path(name).name:
            return ""
        path = self._directory / name
        return name if name.endswith(".kv") and path.is_file() and not path.is_symlink() else ""

    def _delete_of(self, request_id: str) -> None:
        for name in self._of.pop(request_id, []):
            self.delete(name)
