"""llama.cpp: one real engine for any machine, with a real hand-off of KV entries through slot files."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dynaplan.adapters.clock import SystemClock
from dynaplan.adapters.engines.common.kinds import Options, prefill_body, real_gpus
from dynaplan.adapters.engines.common.requirements import check_installed
from dynaplan.adapters.engines.common.server_client import ServerClient
from dynaplan.adapters.engines.common.server_engine import HANG_TIMEOUT_S, first_of, number_option
from dynaplan.adapters.engines.common.signals import SignalNames, Signals, read_signals
from dynaplan.adapters.engines.common.watch import EngineWatch
from dynaplan.adapters.engines.llamacpp.desk import HAND_OFF, READ_TIMEOUT_S, SlotDesk
from dynaplan.adapters.engines.llamacpp.options import LlamaOptions, read_options, set_fields
from dynaplan.adapters.engines.llamacpp.server import make_host
from dynaplan.adapters.engines.llamacpp.slots import UNUSED_S, SlotFiles, SlotPool
from dynaplan.adapters.local.claims import node_dir
from dynaplan.adapters.local.start_gate import start_gate
from dynaplan.domain.engine import EngineContext
from dynaplan.domain.errors import PermanentError, TemporaryError
from dynaplan.domain.prefill import RemotePrefillRequest
from dynaplan.domain.routes import Route
from dynaplan.domain.worker_load import WorkerLoad
from dynaplan.ports import Engine, HandOver

log = logging.getLogger(__name__)

LAST_LOOK_S = 1.0
"""How long an engine that is to end may take to tell that it has no requests."""

SIGNALS = SignalNames(
    running=("llamacpp:requests_processing",),
    waiting=("llamacpp:requests_deferred",),
    progress=(
        ("llamacpp:n_decode_total",),  # moves with every step, so within a long prompt too
        ("llamacpp:tokens_predicted_total",),
        ("llamacpp:prompt_tokens_total",),
    ),
    samples=(
        "llamacpp:requests_processing",
        "llamacpp:requests_deferred",
        "llamacpp:prompt_tokens_total",
        "llamacpp:prompt_tokens_cached_total",
        "llamacpp:prompt_seconds_total",
        "llamacpp:tokens_predicted_total",
        "llamacpp:tokens_predicted_seconds_total",
        "llamacpp:n_decode_total",
        "llamacpp:n_busy_slots_per_decode",
    ),
)


def check(options: Options, gpus: float) -> None:
    """Raises the ConfigError that starting with these options would, as far as it can be foreseen."""
    checked = read_options(options, gpus)
    if not checked.server and importlib.util.find_spec("xllamacpp"):
        import xllamacpp

        set_fields(xllamacpp.CommonParams(), checked, xllamacpp)


class LlamaCppEngine:
    """``dynaplan.ports.Engine`` for llama.cpp: in this process, or as a ``llama-server`` child.

    A decode worker with ``remote-prefill`` gives each request a slot of its own before it comes, into which
    the KV entries of its prompt are restored. Raises ConfigError for an option that is wrong.
    """

    def __init__(self, options: Options, context: EngineContext) -> None:
        self._options = _with_host(read_options(options, context.gpus))
        self._context = context
        self._host = make_host(self._options, context, options.get("start-timeout"))
        self._client = ServerClient("", context.token)
        self._clock = SystemClock()
        hang_timeout_s = number_option(options, "hang-timeout", HANG_TIMEOUT_S)
        self._watch = EngineWatch(self._read, self._clock, hang_timeout_s, self._options.slots)
        is_prefill = context.role == "prefill"
        self._takes_hand_offs = self._options.takes_hand_offs and not is_prefill
        # A prefill worker gives back what it takes; only frontends can die over a reservation.
        self._pool = SlotPool(self._options.slots, self._clock.now_s, 0 if is_prefill else UNUSED_S)
        self._files = SlotFiles(context.scratch_dir, context.worker_name)
        self._desk = SlotDesk(self._client, self._pool, self._files, self._options.slots, self._clock)
        self._context_tokens = 0
        self._is_stopping = self._is_dead = False

    async def start(self) -> None:
        """Load the model and return when the server answers.

        Raises WorkerStartFailed or TemporaryError when it does not, ConfigError for an option that llama.cpp
        does not have.
        """
        self._files.delete_all()
        gpus = real_gpus(os.environ)
        async with start_gate(gpus, node_dir(os.environ)) if gpus else contextlib.nullcontext():
            await self._host.start()
        self._client.url = self._host.url
        await self._watch.requests()  # raises when it does not tell
        self._watch.start()
        log.info("loaded: %d slots of %d tokens", self._options.slots, self._context_tokens)

    def routes(self) -> Sequence[Route]:
        """The slots of a decode worker that takes hand-offs; the API is the engine's own."""
        return self._desk.routes() if self._takes_hand_offs else ()

    def card(self) -> Mapping[str, Any]:
        """The model, the context of one request; ``reserves``: before each one a slot must be asked for."""
        card = {
            "model": self._options.name,
            "context_tokens": self._context_tokens,
            "tokenizer": "llamacpp",
            "kv_block_tokens": self._options.block_tokens,
            "engine": "llamacpp",
            "role": self._context.role,
            "keep_alive": False,
        }
        return {**card, "reserves": True} if self._takes_hand_offs else card

    def load(self) -> WorkerLoad:
        """The load about a second ago at most; whoever waits for a slot waits now."""
        load = self._watch.load()
        return replace(load, waiting_requests=load.waiting_requests + self._pool.waiting)

    @property
    def url(self) -> str:
        """The base address of the engine's OpenAI API."""
        return self._host.url

    async def requests(self) -> int:
        """How many requests it has now, those that wait for a slot or its prompt too."""
        return await self._watch.requests() + max(self._pool.waiting, self._desk.reserving)

    def metrics(self) -> Mapping[str, float]:
        """The engine's own samples, its KV usage, and what became of hand-offs."""
        ours: dict[str, float] = {"llamacpp:kv_cache_usage_ratio": self._watch.signals.kv_usage}
        if self._context.role == "prefill":
            ours["dynaplan:kv_hand_offs_held"] = self._files.holds.held
            ours["dynaplan:kv_hand_offs_expired_total"] = self._files.holds.expired
        if self._takes_hand_offs:
            ours["dynaplan:kv_slots_reserved"] = self._pool.reserved
            ours["dynaplan:kv_slots_taken_back_total"] = self._pool.taken_back
            ours["dynaplan:remote_prefills_taken_total"] = self._desk.restored
            ours["dynaplan:remote_prefill_fallbacks_total"] = self._desk.not_restored
        return {**self._watch.metrics(), **ours}

    async def died(self) -> None:
        """Raises PermanentError once the server has ended unasked or is hung."""
        why = await first_of(self._host.exited(), self._hangs())
        if self._is_stopping:  # it was told to end
            await asyncio.Event().wait()
        self._is_dead = True
        self._host.kill()
        raise PermanentError(f"llama.cpp {why}")

    async def prefill(self, request: RemotePrefillRequest, hand_over: HandOver) -> None:
        """Compute the prompt in a slot of our own, save the slot, and hold the file until it is released.

        Raises PermanentError when the engine refuses the request (4xx), TemporaryError when it fails.
        """
        if self._files.directory is None:
            raise PermanentError("this worker has no scratch directory: it cannot hand KV entries over")
        name = self._files.new_name()
        try:
            tokens = await self._prefill_into(name, request)
            self._files.hold(request.request_id, name)  # before it is told: the release may come at once
        except BaseException:
            self._files.delete(name)
            raise
        try:
            await hand_over({HAND_OFF: {"file": name, "tokens": tokens, "slots": self._options.slots}})
        except BaseException:
            self.release(request.request_id)
            raise

    @property
    def awaits_release(self) -> bool:
        """True: a file says nothing of having been read."""
        return True

    def release(self, request_id: str) -> None:
        """The decode side has read the file, or never will; an unknown one is no error."""
        self._files.holds.release(request_id)

    def abandon(self) -> None:
        """Nobody is left who could read the files."""
        self._files.holds.release_all()

    async def stop(self) -> None:
        """Wait until held hand-offs have been read or have expired, then end the server and its files."""
        try:
            await self._files.holds.wait_empty()
        finally:
            self._is_stopping = True
            await self._end()

    async def _hangs(self) -> str:
        return f"hangs: {await self._watch.hung()}"

    async def _end(self) -> None:
        is_idle = False
        if self._client.url and not self._is_dead:
            with contextlib.suppress(TemporaryError, TimeoutError):
                async with asyncio.timeout(LAST_LOOK_S):
                    is_idle = await self._watch.requests() == 0
        await self._watch.stop()
        await self._desk.close()
        await self._client.close()
        try:
            await self._host.stop(is_idle=is_idle)
        finally:
            self._files.delete_all()

    async def _prefill_into(self, name: str, request: RemotePrefillRequest) -> int:
        """Compute the prompt and save it under that name; its tokens."""
        owner = name  # the same work may be here twice
        slot = await self._pool.take(owner)
        is_idle = False
        try:
            request = _with_prompt(request)
            body = prefill_body(
                request, model=self._options.name, n_predict=1, id_slot=slot, cache_prompt=True
            )
            await self._client.ask(request.path, body, request.request_id)
            tokens = await self._desk.save(slot, name)
            is_idle = True
        finally:
            self._desk.give_back(owner, is_idle=is_idle)
        return tokens

    async def _read(self) -> Signals:
        signals = read_signals(await self._client.text("/metrics", READ_TIMEOUT_S), SIGNALS)
        slots = await self._desk.look()
        block_tokens = self._options.block_tokens
        all_tokens = sum(slot.context_tokens for slot in slots)
        used_tokens = [slot.used_tokens for slot in slots if slot.is_computing]
        self._context_tokens = min((slot.context_tokens for slot in slots), default=0)
        return replace(
            signals,
            kv_usage=min(1.0, sum(used_tokens) / all_tokens) if all_tokens else 0.0,
            kv_active=sum(-(-tokens // block_tokens) for tokens in used_tokens),
            kv_total=all_tokens // block_tokens,
            block_tokens=block_tokens,
        )


def make(options: Options, context: EngineContext) -> Engine:
    """The engine, not started; raises ConfigError for a wrong option."""
    return LlamaCppEngine(options, context)


def _with_prompt(request: RemotePrefillRequest) -> RemotePrefillRequest:
    """The request with its tokens as the prompt, when it came without a text."""
    if request.body or not request.prompt_token_ids:
        return request
    return replace(request, body={"prompt": list(request.prompt_token_ids)}, path="/v1/completions")


def _with_host(options: LlamaOptions) -> LlamaOptions:
    """The options with the program to use: the named one, else xllamacpp, else the one on PATH.

    Raises ConfigError when none of them is here.
    """
    check_installed("llamacpp", {"llama-server": options.server})
    if options.server:
        found = shutil.which(Path(options.server).expanduser())
    else:
        found = "" if importlib.util.find_spec("xllamacpp") else shutil.which("llama-server")
    return replace(options, server=found or "")
