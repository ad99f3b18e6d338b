"""llama.cpp's slots: who may use which, and the files in which KV entries travel from one slot to another.

llama.cpp lets any request name a slot, and makes it wait while the slot computes. It does not reserve a slot:
that entries restored into one are still there when their request comes is ensured here. ``SlotPool`` counts
the reservations, ``SlotFiles`` names and deletes the files, and ``SlotAllocator`` is the place where
frontends reserve slots of one server and give them back.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import logging
import secrets
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dynaplan.engines.held_hand_offs import HOLD_S, HeldHandOffs
from dynaplan.engines.server.client import ServerClient
from dynaplan.http.messages import Request, Response
from dynaplan.http.routes import Route
from dynaplan.util.clock import Clock
from dynaplan.util.documents import flag_field, whole_field
from dynaplan.util.errors import PermanentError, TemporaryError

log = logging.getLogger(__name__)


UNUSED_RESERVATION_S = 10.0
"""Seconds after which a reserved slot that does not compute is taken back: its frontend has died."""


class _Reservation:
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

    def __init__(
        self, count: int, now_s: Callable[[], float], unused_s: float = UNUSED_RESERVATION_S
    ) -> None:
        self._now_s = now_s
        self._unused_s = unused_s
        self._free = deque(range(count))
        self._reserved: dict[str, _Reservation] = {}
        self._releasing: set[int] = set()
        self._waiting: dict[str, asyncio.Future[int]] = {}
        self.reclaimed = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def reserved(self) -> int:
        return len(self._reserved)

    @property
    def releasing(self) -> int:
        """The number of slots that were released and are not yet seen idle."""
        return len(self._releasing)

    async def take(self, owner: str) -> int:
        """Wait for a slot and return its number; an owner that has one gets the same again.

        Raises TemporaryError when the owner gives it back, or asks anew, before it has one.
        """
        if owner in self._reserved:
            return self._reserved[owner].slot
        self._drop_waiter(owner, "it was asked for again")
        waiter: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[owner] = waiter
        self._grant()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self.release(owner)
            elif self._waiting.get(owner) is waiter:
                del self._waiting[owner]
            raise

    def announce(self, owner: str) -> None:
        """Note that the owner is told of its slot: from now on the slot is expected to compute."""
        if owner in self._reserved:
            self._reserved[owner].is_announced = True

    def release(self, owner: str, *, is_idle: bool = False) -> None:
        """End the owner's reservation, if it has one, and its waiting for one.

        ``is_idle`` says that the engine is known not to compute there.
        """
        self._drop_waiter(owner, "it was given back before it was had")
        held = self._reserved.pop(owner, None)
        if held is None:
            return
        if is_idle:
            self._free.append(held.slot)
            self._grant()
        else:
            self._releasing.add(held.slot)

    def observe(self, computing: Collection[int]) -> None:
        """Note in which slots the engine computes now; released ones that do not are free again.

        A slot that its owner has not used for too long is taken back.
        """
        for slot in sorted(self._releasing.difference(computing)):
            self._releasing.discard(slot)
            self._free.append(slot)
        for owner, held in list(self._reserved.items()):
            if held.slot in computing or not held.is_announced:
                held.idle_since_s = None
            elif held.idle_since_s is None:
                held.idle_since_s = self._now_s()
            elif 0 < self._unused_s <= self._now_s() - held.idle_since_s:
                log.warning("slot %d was reserved by %s and not used: taken back", held.slot, owner)
                self.reclaimed += 1
                del self._reserved[owner]
                self._free.append(held.slot)
        self._grant()

    def _grant(self) -> None:
        while self._free and self._waiting:
            owner = next(iter(self._waiting))
            waiter = self._waiting.pop(owner)
            if not waiter.done():
                self._reserved[owner] = _Reservation(self._free.popleft())
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
        # The random part: names of files of the worker's last process may still be under way.
        self._names = (f"{worker_name}.{secrets.token_hex(4)}.{number}.kv" for number in itertools.count(1))
        self._of_request: dict[str, list[str]] = {}
        self.holds = HeldHandOffs(self._delete_for_request, hold_s)

    @property
    def directory(self) -> Path | None:
        return self._directory

    def new_name(self) -> str:
        return next(self._names)

    def assign(self, request_id: str, name: str) -> None:
        """Have this file deleted when the request's hold ends.

        A request may have several: work can come twice.
        """
        self._of_request.setdefault(request_id, []).append(name)

    def delete(self, name: str) -> None:
        if self._directory is not None:
            try:
                (self._directory / name).unlink(missing_ok=True)
            except OSError as error:
                log.warning("cannot delete %s: %s", self._directory / name, error)

    def delete_all(self) -> None:
        """Delete every slot file of this worker, also those of an earlier process of its name."""
        if self._directory is None or not self._directory.is_dir():
            return
        begin = f"{self._worker_name}."
        for path in self._directory.iterdir():
            if path.name.startswith(begin):
                self.delete(path.name)

    def find(self, name: object) -> str:
        """Return the name if it is that of a slot file here, else "": it comes from another process."""
        if self._directory is None or not isinstance(name, str) or name != Path(name).name:
            return ""
        path = self._directory / name
        return name if name.endswith(".kv") and path.is_file() and not path.is_symlink() else ""

    def _delete_for_request(self, request_id: str) -> None:
        for name in self._of_request.pop(request_id, []):
            self.delete(name)


HAND_OFF = "kv_slot_file"
"""The field of a hand-off: ``{"file": its name in the scratch directory, "tokens": count, "slots": N}``.

A file can be restored only by a server with as many slots as the server that saved it.
"""

SLOTS_TIMEOUT_S = 4.0
"""Seconds that the engine may take to describe its slots."""

IDLE_POLL_S = (0.005, 0.02, 0.05, 0.2)
"""Seconds between two polls of whether a slot that was released still computes; the last one repeats."""

MOVED_FIELDS = {"save": ("n_saved", "n_written"), "restore": ("n_restored", "n_read")}
"""The fields in the answer to each action with the numbers of tokens and bytes moved."""


@dataclass(frozen=True)
class Slot:
    """One slot of the engine; while it does not compute, its ``used_tokens`` are only a cache.

    ``last_task`` is the number of its last task, which rises over all slots; -1 for a slot not used yet.
    ``decoded_tokens`` are 0 while it computes a prompt, -1 where the engine does not say.
    """

    number: int
    is_computing: bool
    context_tokens: int
    used_tokens: int
    last_task: int = -1
    decoded_tokens: int = -1


class Moved(NamedTuple):
    """What was saved into a file or restored from it."""

    tokens: int
    size_bytes: int


class SlotAllocator:
    """The place where frontends reserve slots and give them back.

    ``reserving`` counts the requests that wait for their reservation now, ``restored`` the hand-offs that
    were taken over here, ``not_restored`` the hand-offs that could not be.
    """

    def __init__(
        self, client: ServerClient, pool: SlotPool, files: SlotFiles, slots: int, clock: Clock
    ) -> None:
        self._client = client
        self._slots = slots
        self._pool = pool
        self._files = files
        self._clock = clock
        self._idle_poll: asyncio.Task[None] | None = None
        self.reserving = self.restored = self.not_restored = 0

    def routes(self) -> Sequence[Route]:
        """The routes by which frontends reserve a slot before a request and give it back after it."""
        return (
            Route("POST", "/kv_slots/reserve", self._reserve, is_counted=False),
            Route("POST", "/kv_slots/release", self._release, is_work=False),
        )

    async def refresh(self) -> Sequence[Slot]:
        """Read the slots from the engine, and tell the pool.

        Raises TemporaryError when it cannot be asked.
        """
        text = await self._client.text("/slots", SLOTS_TIMEOUT_S)
        try:
            slots = _slots(text)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise TemporaryError(f"/slots of the engine: {error} in {text[:200]!r}") from None
        self._pool.observe({slot.number for slot in slots if slot.is_computing})
        return slots

    async def save(self, slot: int, name: str) -> Moved:
        """Write the slot's KV entries into a file of that name."""
        return await self._move(slot, "save", name)

    async def restore(self, slot: int, name: str) -> Moved:
        """Read the file of that name into the slot.

        It must be whole: llama.cpp aborts over one that was cut.
        """
        return await self._move(slot, "restore", name)

    def release(self, owner: str, *, is_idle: bool = False) -> None:
        """Free the owner's slot: at once if it ``is_idle``, else when it is seen not to compute."""
        self._pool.release(owner, is_idle=is_idle)
        if self._pool.releasing and (self._idle_poll is None or self._idle_poll.done()):
            self._idle_poll = asyncio.create_task(self._wait_until_idle(), name="slots given back")

    def close(self) -> None:
        """Stop polling released slots."""
        if self._idle_poll is not None:
            self._idle_poll.cancel()
            self._idle_poll = None

    async def _wait_until_idle(self) -> None:
        """Poll the engine until the released slots are idle."""
        polls = 0
        while self._pool.releasing:
            with contextlib.suppress(TemporaryError):
                await self.refresh()
            if self._pool.releasing:
                await self._clock.sleep(IDLE_POLL_S[min(polls, len(IDLE_POLL_S) - 1)])
                polls += 1

    async def _reserve(self, http: Request) -> Response:
        """Reserve a slot for one request and answer with the fields that name it; may wait for a slot."""
        try:
            document = json.loads(await http.read())
            request_id, hand_off = str(document["request_id"]), document.get("hand_off")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            return Response.json({"error": f"not a reservation: {error!r}"}, 400)
        self.reserving += 1
        try:
            slot = await self._take_and_restore(request_id, hand_off)
        except TemporaryError as error:
            return Response.json({"error": str(error)}, 409)
        finally:
            self.reserving -= 1
        return Response.json({"fields": {"id_slot": slot, "cache_prompt": True}})

    async def _take_and_restore(self, request_id: str, hand_off: object) -> int:
        """Wait for a slot, restore the prompt into it and return it.

        Raises TemporaryError when the slot is given back before it is had.
        """
        slot = await self._pool.take(request_id)
        try:
            await self._restore(slot, hand_off)
        except BaseException:
            self.release(request_id)
            raise
        self._pool.announce(request_id)
        return slot

    async def _release(self, http: Request) -> Response:
        """Give back the slot of a request that has ended, or that never came."""
        try:
            request_id = str((json.loads(await http.read()))["request_id"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            return Response.json({"error": f"not a reservation: {error!r}"}, 400)
        self.release(request_id)
        return Response.json({})

    async def _restore(self, slot: int, hand_off: object) -> None:
        """Take the KV entries of a hand-off over, if there is one; a failure is logged and counted."""
        if not hand_off:
            return
        try:
            await self.restore(slot, self._find_file(hand_off))
        except (TemporaryError, PermanentError) as error:
            self.not_restored += 1
            log.warning("cannot take over %r: %s; computing the prompt here", hand_off, error)
        else:
            self.restored += 1

    def _find_file(self, hand_off: object) -> str:
        """Return the name of the hand-off's file; raises TemporaryError if it cannot be restored here."""
        taken = hand_off.get(HAND_OFF) if isinstance(hand_off, Mapping) else None
        if not isinstance(taken, Mapping):
            raise TemporaryError(f"it has no {HAND_OFF}")
        if taken.get("slots") != self._slots:
            raise TemporaryError(
                f"the prefill worker has {taken.get('slots')} slots, this worker {self._slots}",
                hint="Give both the same max-num-seqs (or parallel).",
            )
        name = self._files.find(taken.get("file"))
        if not name:
            raise TemporaryError("there is no such file")
        return name

    async def _move(self, slot: int, action: str, name: str) -> Moved:
        path = f"/slots/{slot}?action={action}"
        answer: Mapping[str, Any] = await self._client.ask(path, {"filename": name}, f"{action} {name}")
        tokens, size_bytes = (answer.get(name) for name in MOVED_FIELDS[action])
        if not isinstance(tokens, int) or not isinstance(size_bytes, int):
            raise TemporaryError(
                f"the engine's answer to {path} lacks {' or '.join(MOVED_FIELDS[action])}: {dict(answer)!r}"
            )
        return Moved(tokens, size_bytes)


def _slots(text: str) -> list[Slot]:
    """Read the answer of ``/slots``; raises ValueError, TypeError, AttributeError or RecursionError."""
    return [
        Slot(
            whole_field(each, "id"),
            flag_field(each, "is_processing"),
            whole_field(each, "n_ctx"),
            whole_field(each, "n_prompt_tokens", 0),
            task if type(task := each.get("id_task")) is int else -1,
            _decoded_tokens(each.get("next_token")),
        )
        for each in json.loads(text)
    ]


def _decoded_tokens(next_token: object) -> int:
    """Read the number in ``next_token``, a mapping or a list of these; -1 without one."""
    found = next_token[0] if isinstance(next_token, list) and next_token else next_token
    return whole_field(found, "n_decoded", -1) if isinstance(found, Mapping) else -1
