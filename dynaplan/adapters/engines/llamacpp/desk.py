"""Hands out one llama.cpp server's slots, and moves KV entries between them and files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynaplan.adapters.engines.common.server_client import ServerClient
from dynaplan.adapters.engines.llamacpp.slots import SlotFiles, SlotPool
from dynaplan.domain.errors import PermanentError, TemporaryError
from dynaplan.domain.routes import Route
from dynaplan.ports import Clock

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger(__name__)

HAND_OFF = "kv_slot_file"
"""The field of a hand-off: ``{"file": name in the scratch directory, "tokens": how many, "slots": N}``.

A file can be restored only by a server with as many slots as the one that saved it.
"""

READ_TIMEOUT_S = 4.0
SETTLE_S = (0.005, 0.02, 0.05, 0.2)
"""Between two looks at whether a slot that was given back still computes; the last one repeats."""

MOVED = {"save": "n_saved", "restore": "n_restored"}
"""Where the answer to each action tells how many tokens were moved."""


@dataclass(frozen=True)
class Slot:
    """One slot as the engine tells it; ``used_tokens`` of one that does not compute are only a cache."""

    number: int
    is_computing: bool
    context_tokens: int
    used_tokens: int


class SlotDesk:
    """Where slots are taken and given back.

    ``reserving`` counts the requests that wait for their reservation now; ``restored`` and ``not_restored``
    count the hand-offs that were taken over here, and those that could not be.
    """

    def __init__(
        self, client: ServerClient, pool: SlotPool, files: SlotFiles, slots: int, clock: Clock
    ) -> None:
        self._client = client
        self._slots = slots
        self._pool = pool
        self._files = files
        self._clock = clock
        self._settling: asyncio.Task[None] | None = None
        self.reserving = self.restored = self.not_restored = 0

    def routes(self) -> Sequence[Route]:
        """Reserving a slot before a request, and giving it back after: for frontends."""
        return (
            Route("POST", "/kv_slots/reserve", self._reserve, is_counted=False),
            Route("POST", "/kv_slots/release", self._release, is_work=False),
        )

    async def look(self) -> Sequence[Slot]:
        """The slots now, of which the pool hears too; TemporaryError when the engine does not tell."""
        text = await self._client.text("/slots", READ_TIMEOUT_S)
        try:
            slots = [
                Slot(each["id"], each["is_processing"], each["n_ctx"], each.get("n_prompt_tokens", 0))
                for each in json.loads(text)
            ]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TemporaryError(f"/slots of the engine: {error!r} in {text[:200]!r}") from error
        self._pool.observe({slot.number for slot in slots if slot.is_computing})
        return slots

    async def save(self, slot: int, name: str) -> int:
        """Write the slot's KV entries into a file of that name; for how many tokens."""
        return await self._move(slot, "save", name)

    def give_back(self, owner: str, *, is_idle: bool = False) -> None:
        """The owner needs his slot no more; it is free at once, or when the engine is seen not to compute."""
        self._pool.give_back(owner, is_idle=is_idle)
        if self._pool.leaving and (self._settling is None or self._settling.done()):
            self._settling = asyncio.create_task(self._settle(), name="slots given back")

    async def close(self) -> None:
        """Look after nothing any more."""
        settling, self._settling = self._settling, None
        if settling is not None:
            settling.cancel()
            await asyncio.gather(settling, return_exceptions=True)

    async def _settle(self) -> None:
        """Look until the slots that were given back are idle."""
        looks = 0
        while self._pool.leaving:
            with contextlib.suppress(TemporaryError):
                await self.look()
            if self._pool.leaving:
                await self._clock.sleep(SETTLE_S[min(looks, len(SETTLE_S) - 1)])
                looks += 1

    async def _reserve(self, http: web.Request) -> web.Response:
        """A slot for one request, and the fields by which the request gets it; waits while all are taken."""
        from aiohttp import web

        try:
            document = await http.json()
            request_id, hand_off = str(document["request_id"]), document.get("hand_off")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return web.json_response({"error": f"not a reservation: {error!r}"}, status=400)
        self.reserving += 1
        try:
            slot = await self._taken(request_id, hand_off)
        except TemporaryError as error:
            return web.json_response({"error": str(error)}, status=409)
        finally:
            self.reserving -= 1
        return web.json_response({"fields": {"id_slot": slot, "cache_prompt": True}})

    async def _taken(self, request_id: str, hand_off: object) -> int:
        """The request's slot, its prompt restored into it; TemporaryError when it is released meanwhile."""
        slot = await self._pool.take(request_id)
        try:
            await self._restore(slot, hand_off)
        except BaseException:
            self.give_back(request_id)
            raise
        self._pool.told(request_id)
        return slot

    async def _release(self, http: web.Request) -> web.Response:
        """The request has ended, or never came."""
        from aiohttp import web

        try:
            request_id = str((await http.json())["request_id"])
        except (ValueError, KeyError, TypeError) as error:
            return web.json_response({"error": f"not a reservation: {error!r}"}, status=400)
        self.give_back(request_id)
        return web.json_response({})

    async def _restore(self, slot: int, hand_off: object) -> None:
        """Take the KV entries over; without them the engine computes the prompt itself."""
        if not hand_off:
            return
        try:
            await self._move(slot, "restore", self._file_of(hand_off))
        except (TemporaryError, PermanentError) as error:
            self.not_restored += 1
            log.warning("cannot take over %r: %s; computing the prompt here", hand_off, error)
        else:
            self.restored += 1

    def _file_of(self, hand_off: object) -> str:
        """The name of its file; TemporaryError says why it cannot be restored here."""
        taken = hand_off.get(HAND_OFF) if isinstance(hand_off, Mapping) else None
        if not isinstance(taken, Mapping):
            raise TemporaryError(f"it has no {HAND_OFF}")
        if taken.get("slots") != self._slots:
            raise TemporaryError(
                f"the prefill worker has {taken.get('slots')} slots, this worker {self._slots}",
                hint="give both the same max-num-seqs (or parallel)",
            )
        name = self._files.find(taken.get("file"))
        if not name:
            raise TemporaryError("there is no such file")
        return name

    async def _move(self, slot: int, action: str, name: str) -> int:
        path = f"/slots/{slot}?action={action}"
        answer: Mapping[str, Any] = await self._client.ask(path, {"filename": name}, f"{action} {name}")
        tokens = answer.get(MOVED[action])
        if not isinstance(tokens, int):
            raise TemporaryError(f"the engine's answer to {path} has no {MOVED[action]}: {dict(answer)!r}")
        return tokens
