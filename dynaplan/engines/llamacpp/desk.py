"""Reserves one llama.cpp server's slots for requests, and moves KV entries between slots and files."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynaplan.engines.common.server_client import ServerClient
from dynaplan.engines.llamacpp.slots import SlotFiles, SlotPool
from dynaplan.util.clock import Clock
from dynaplan.util.documents import flag_field, whole_field
from dynaplan.util.errors import PermanentError, TemporaryError
from dynaplan.util.http_routes import Route

if TYPE_CHECKING:
    from aiohttp import web

log = logging.getLogger(__name__)

HAND_OFF = "kv_slot_file"
"""The field of a hand-off: ``{"file": its name in the scratch directory, "tokens": count, "slots": N}``.

A file can be restored only by a server with as many slots as the server that saved it.
"""

READ_TIMEOUT_S = 4.0
"""Seconds that the engine may take to describe its slots."""

SETTLE_S = (0.005, 0.02, 0.05, 0.2)
"""Seconds between two looks at whether a slot that was given back still computes; the last one repeats."""

MOVED = {"save": "n_saved", "restore": "n_restored"}
"""The field in the answer to each action with the number of tokens moved."""


@dataclass(frozen=True)
class Slot:
    """One slot of the engine; while it does not compute, its ``used_tokens`` are only a cache."""

    number: int
    is_computing: bool
    context_tokens: int
    used_tokens: int


class SlotDesk:
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
        self._settling: asyncio.Task[None] | None = None
        self.reserving = self.restored = self.not_restored = 0

    def routes(self) -> Sequence[Route]:
        """The routes by which frontends reserve a slot before a request and give it back after it."""
        return (
            Route("POST", "/kv_slots/reserve", self._reserve, is_counted=False),
            Route("POST", "/kv_slots/release", self._release, is_work=False),
        )

    async def look(self) -> Sequence[Slot]:
        """Read the slots, for the pool too; raises TemporaryError when the engine cannot be asked."""
        text = await self._client.text("/slots", READ_TIMEOUT_S)
        try:
            slots = _slots(text)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise TemporaryError(f"/slots of the engine: {error} in {text[:200]!r}") from None
        self._pool.observe({slot.number for slot in slots if slot.is_computing})
        return slots

    async def save(self, slot: int, name: str) -> int:
        """Write the slot's KV entries into a file of that name; returns the number of tokens saved."""
        return await self._move(slot, "save", name)

    def give_back(self, owner: str, *, is_idle: bool = False) -> None:
        """Free the owner's slot: at once if it ``is_idle``, else when it is seen not to compute."""
        self._pool.give_back(owner, is_idle=is_idle)
        if self._pool.leaving and (self._settling is None or self._settling.done()):
            self._settling = asyncio.create_task(self._settle(), name="slots given back")

    async def close(self) -> None:
        """Stop looking after slots that were given back."""
        settling, self._settling = self._settling, None
        if settling is not None:
            settling.cancel()
            await asyncio.gather(settling, return_exceptions=True)

    async def _settle(self) -> None:
        """Look at the engine until the slots that were given back are idle."""
        looks = 0
        while self._pool.leaving:
            with contextlib.suppress(TemporaryError):
                await self.look()
            if self._pool.leaving:
                await self._clock.sleep(SETTLE_S[min(looks, len(SETTLE_S) - 1)])
                looks += 1

    async def _reserve(self, http: web.Request) -> web.Response:
        """Reserve a slot for one request and answer with the fields that name it; may wait for a slot."""
        from aiohttp import web

        try:
            document = await http.json()
            request_id, hand_off = str(document["request_id"]), document.get("hand_off")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
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
        """Take a slot and restore the prompt into it; TemporaryError when it is released meanwhile."""
        slot = await self._pool.take(request_id)
        try:
            await self._restore(slot, hand_off)
        except BaseException:
            self.give_back(request_id)
            raise
        self._pool.announce(request_id)
        return slot

    async def _release(self, http: web.Request) -> web.Response:
        """Give back the slot of a request that has ended, or that never came."""
        from aiohttp import web

        try:
            request_id = str((await http.json())["request_id"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            return web.json_response({"error": f"not a reservation: {error!r}"}, status=400)
        self.give_back(request_id)
        return web.json_response({})

    async def _restore(self, slot: int, hand_off: object) -> None:
        """Take the KV entries over; where that fails, the engine computes the prompt itself."""
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
        """Find the hand-off's file; TemporaryError says why it cannot be restored here."""
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

    async def _move(self, slot: int, action: str, name: str) -> int:
        path = f"/slots/{slot}?action={action}"
        answer: Mapping[str, Any] = await self._client.ask(path, {"filename": name}, f"{action} {name}")
        tokens = answer.get(MOVED[action])
        if not isinstance(tokens, int):
            raise TemporaryError(f"the engine's answer to {path} has no {MOVED[action]}: {dict(answer)!r}")
        return tokens


def _slots(text: str) -> list[Slot]:
    """Read the answer of ``/slots``; raises ValueError, TypeError, AttributeError or RecursionError."""
    return [
        Slot(
            whole_field(each, "id"),
            flag_field(each, "is_processing"),
            whole_field(each, "n_ctx"),
            whole_field(each, "n_prompt_tokens", 0),
        )
        for each in json.loads(text)
    ]
