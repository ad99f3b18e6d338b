"""llama.cpp: a real engine for any machine, with a real hand-off of KV entries through slot files."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dynaplan.config.command_words import COMMAND
from dynaplan.engines.llamacpp.launch_line import KIND, fingerprint, read_options
from dynaplan.engines.llamacpp.saved_slots import (
    RESTORE_TIMEOUT_S,
    SAVE_TIMEOUT_S,
    SavedSlots,
    candidates,
)
from dynaplan.engines.llamacpp.slots import HAND_OFF, UNUSED_RESERVATION_S, SlotAllocator, SlotFiles, SlotPool
from dynaplan.engines.model_memory import memory_need
from dynaplan.engines.port import EngineContext, HandOffReady
from dynaplan.engines.server.engine import ServerEngine
from dynaplan.engines.server.engine_options import Options
from dynaplan.engines.server.kind import Ask, prefill_body
from dynaplan.engines.server.metrics import EngineMetrics
from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.events.prefill_requests import RemotePrefillRequest
from dynaplan.http.routes import Route
from dynaplan.util.clock import SystemClock
from dynaplan.util.errors import PermanentError, TemporaryError

log = logging.getLogger(__name__)


class LlamaCppEngine(ServerEngine):
    """A llama.cpp server as a child of the worker, and the slots by which KV entries are handed over.

    A decode worker with ``remote-prefill`` gives each request a slot of its own before it comes, into which
    the KV entries of its prompt are restored. A worker without saves its slots when it is put away, and
    restores them when it comes back (``saved_slots``). Raises ConfigError for a wrong option.
    """

    def __init__(self, options: Options, context: EngineContext) -> None:
        super().__init__(KIND, options, context)
        self._checked = checked = read_options(options, context.gpus)
        is_prefill = context.role == "prefill"
        self._takes_hand_offs = checked.takes_hand_offs and not is_prefill
        clock = SystemClock()
        # A prefill worker gives back what it takes; only frontends can die over a reservation.
        self._pool = SlotPool(checked.slots, clock.now_s, 0 if is_prefill else UNUSED_RESERVATION_S)
        self._files = SlotFiles(context.scratch_dir, context.worker_name)
        self._holds = self._files.holds
        self._allocator = SlotAllocator(self._client, self._pool, self._files, checked.slots, clock)
        self._context_tokens = self._slots = 0
        self._lacks_tools = False
        self._restored: dict[int, int] = {}
        self._saved = None if is_prefill or self._takes_hand_offs else self._make_saved_slots()

    async def start(self) -> None:
        """Delete the files of an earlier life, then start as every server does."""
        self._files.delete_all()
        await super().start()
        if self._saved is not None:
            await within(RESTORE_TIMEOUT_S, self._restore_slots(self._saved), "restore KV entries")

    def routes(self) -> Sequence[Route]:
        """Routes to reserve and restore slots, where this worker takes hand-offs."""
        return self._allocator.routes() if self._takes_hand_offs else ()

    def card(self) -> Mapping[str, Any]:
        """Describe the model.

        ``reserves``: before each request a slot must be asked for. ``lacks_tools``: its chat template has
        none, and the engine drops them from a request.
        """
        reserves = {"reserves": True} if self._takes_hand_offs else {}
        tools = {"lacks_tools": True} if self._lacks_tools else {}
        return {**super().card(), "tokenizer": "llamacpp", "keep_alive": False, **reserves, **tools}

    def load(self) -> WorkerLoad:
        """The load about a second ago at most, with the requests that wait for a slot now."""
        load = super().load()
        return replace(load, waiting_requests=load.waiting_requests + self._pool.waiting)

    async def count_requests(self) -> int:
        """Count its requests, with those whose slot or prompt is not there yet."""
        return await super().count_requests() + max(self._pool.waiting, self._allocator.reserving)

    def metrics(self) -> Mapping[str, float]:
        """The engine's own samples, its KV usage, and what became of hand-offs."""
        ours: dict[str, float] = {"llamacpp:kv_cache_usage_ratio": self._watch.signals.kv_usage}
        if self._takes_hand_offs:
            ours["dynaplan:kv_slots_reserved"] = self._pool.reserved
            ours["dynaplan:kv_slots_taken_back_total"] = self._pool.reclaimed
            ours["dynaplan:remote_prefills_taken_total"] = self._allocator.restored
            ours["dynaplan:remote_prefill_fallbacks_total"] = self._allocator.not_restored
        return {**super().metrics(), **ours}

    async def _first_model(self) -> Mapping[str, Any]:
        """The model as ``/slots`` describes it; raises TemporaryError when the engine cannot be asked."""
        await self._watch.count_requests()
        self._lacks_tools = await self._ask_whether_tools_are_lacking()
        named = await super()._first_model() if self._options.get(COMMAND) else {}
        return {"id": named.get("id") or self._checked.name, "max_model_len": self._context_tokens}

    async def _ask_whether_tools_are_lacking(self) -> bool:
        """Ask whether the chat template lacks tools; False where the engine does not tell."""
        try:
            found = (await self._client.json("/props")).get("chat_template_caps")
        except TemporaryError:
            return False
        return isinstance(found, Mapping) and found.get("supports_tools") is False

    async def _read(self) -> EngineMetrics:
        signals = await super()._read()
        try:
            slots = await self._allocator.refresh()
        except TemporaryError:
            if not self._options.get(COMMAND):
                raise
            return signals  # its owner's, or its age's: it does not show its slots
        block_tokens = self._checked.block_tokens
        self._slots = len(slots)
        tokens = [slot.context_tokens for slot in slots]
        all_tokens = max(tokens, default=0) if self._checked.is_unified else sum(tokens)
        used_tokens = [slot.used_tokens for slot in slots if slot.is_computing]
        self._context_tokens = min(tokens, default=0)
        counters = signals.counters
        if counters:
            unfinished = sum(slot.is_computing and slot.decoded_tokens == 0 for slot in slots)
            counters = replace(
                counters,
                kv_tokens=sum(used_tokens),
                kv_capacity_tokens=all_tokens,
                unfinished_prompts=unfinished,
            )
        return replace(
            signals,
            counters=counters,
            request_slots=self._slots,
            kv_usage=min(1.0, sum(used_tokens) / all_tokens) if all_tokens else 0.0,
            kv_active=sum(-(-tokens // block_tokens) for tokens in used_tokens),
            kv_total=all_tokens // block_tokens,
            block_tokens=block_tokens,
        )

    async def _run_prefill(
        self, request: RemotePrefillRequest, hand_off_ready: HandOffReady, ask: Ask, ports: Sequence[int]
    ) -> None:
        if self._files.directory is None:
            raise PermanentError("this worker has no scratch directory: it cannot hand KV entries over")
        name = self._files.new_name()
        try:
            tokens = await self._prefill_into(name, request, ask)
        except BaseException:
            self._files.delete(name)
            raise
        self._files.assign(request.request_id, name)
        await hand_off_ready({HAND_OFF: {"file": name, "tokens": tokens, "slots": self._checked.slots}})

    async def _prefill_into(self, name: str, request: RemotePrefillRequest, ask: Ask) -> int:
        """Compute the prompt and save it under that name; returns its tokens."""
        owner = name  # the same work may be here twice
        slot = await self._pool.take(owner)
        is_idle = False
        try:
            request = _with_prompt(request)
            body = prefill_body(request, n_predict=1, id_slot=slot, cache_prompt=True)
            await ask(request.path, body, request.request_id)
            tokens = (await self._allocator.save(slot, name)).tokens
            is_idle = True
        finally:
            self._allocator.release(owner, is_idle=is_idle)
        return tokens

    def _make_saved_slots(self) -> SavedSlots | None:
        """The files of slots that outlast the worker; None where nothing is to be saved."""
        checked, directory = self._checked, self._files.directory
        if directory is None or not checked.saved_kv_bytes:
            return None
        digest = fingerprint(checked, self._context.gpus)
        return SavedSlots(directory, checked.name, digest, checked.saved_kv_bytes) if digest else None

    async def _restore_slots(self, saved: SavedSlots) -> None:
        claimed = saved.claim([self._files.new_name() for _ in range(self._slots)])
        try:
            for slot, name in enumerate(claimed):
                self._restored[slot] = (await self._allocator.restore(slot, name)).tokens
        finally:
            for name in claimed:
                self._files.delete(name)
        if claimed:
            log.info("restored %s, saved when the model was put away", prompts(self._restored.values()))

    async def _save_cache(self) -> None:
        if self._saved is not None:
            await within(SAVE_TIMEOUT_S, self._save_slots(self._saved), "save KV entries")

    async def _save_slots(self, saved: SavedSlots) -> None:
        idle = {slot.number: slot for slot in await self._allocator.refresh() if not slot.is_computing}
        used = {
            number: (slot.last_task, slot.used_tokens) for number, slot in idle.items() if slot.used_tokens
        }
        restored = {number: tokens for number, tokens in self._restored.items() if number in idle}
        need = memory_need(KIND.name, self._options, self._context.gpus)
        kept = []
        try:
            for slot, _ in saved.make_room(candidates(used, restored), need.token_bytes if need else 0):
                name = self._files.new_name()
                moved = await self._allocator.save(slot, name)
                if saved.keep(name, moved.tokens, moved.size_bytes):
                    kept.append(moved.tokens)
        finally:
            saved.trim()
            if kept:
                log.info("saved %s for the next load", prompts(kept))

    async def _end(self, grace_s: float) -> None:
        """Release everything; the files last, when no engine can read or write them any more."""
        self._allocator.close()
        try:
            await super()._end(grace_s)
        finally:
            self._files.delete_all()


async def within(seconds: float, work: Coroutine[Any, Any, None], purpose: str) -> None:
    """Await the work for at most so many seconds; lateness and failure are only logged."""
    try:
        async with asyncio.timeout(seconds):
            await work
    except TimeoutError:
        log.warning("cannot %s within %g s: going on without the rest", purpose, seconds)
    except (TemporaryError, PermanentError, OSError) as error:
        log.warning("cannot %s: %s", purpose, error)


def prompts(tokens: Collection[int]) -> str:
    return f"{len(tokens)} prompt{'s' * (len(tokens) != 1)} of {sum(tokens)} tokens"


def _with_prompt(request: RemotePrefillRequest) -> RemotePrefillRequest:
    """Return the request with its token ids as the prompt of a completion, if it came without a body."""
    if request.body or not request.prompt_token_ids:
        return request
    return replace(request, body={"prompt": list(request.prompt_token_ids)}, path="/v1/completions")
