"""The simulated engine: the engine model in real time behind the OpenAI API, in the worker's own process.

``StepDriver`` drives the model: it begins a step, waits for its duration, reports its end. Timers of the
event loop do it, not a task: an engine without requests has no timer and costs nothing. The end of a step is
counted from the end of the step before, so that late timers do not slow the engine down.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dynaplan.config.settings.worker import SimOptions
from dynaplan.engines.port import BlockChangesCallback, EngineContext, HandOffReady
from dynaplan.engines.sim.block_changes import BlockChanges
from dynaplan.engines.sim.kv_transfer import HeldPrompts, KvFetcher
from dynaplan.engines.sim.openai_endpoints import LiveAnswer, SimEndpoints
from dynaplan.engines.sim.profiles import timing_for
from dynaplan.engines.timing_model.engine_model import EngineModel, EngineRequest, EngineSettings
from dynaplan.engines.timing_model.kv_blocks import block_hashes
from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.events.prefill_requests import RemotePrefillRequest
from dynaplan.http.routes import Route
from dynaplan.util.errors import PermanentError, RequestRefused, UserError

log = logging.getLogger(__name__)


INSTANT_SLICE_S = 0.001
"""Seconds of instant steps after which the event loop gets its turn."""

FOLD_S = 0.001
"""Decode steps are done several at once up to this many seconds together."""

MAX_LATE_S = 0.05
"""Seconds of a late timer that are made up for by shorter waits; later than that the engine slows down."""


class StepDriver:
    """Steps a model. ``on_progress`` is called when tokens are due, ``on_failure`` when the model raised.

    ``speedup_ratio`` divides the durations; with 0 steps take no time, and the event loop gets its turn
    after every millisecond of them. Decode steps shorter than a millisecond are done several at once.
    """

    def __init__(
        self,
        model: EngineModel,
        speedup_ratio: float,
        on_progress: Callable[[], None],
        on_failure: Callable[[Exception], None],
    ) -> None:
        self._model = model
        self._speedup_ratio = speedup_ratio
        self._on_progress = on_progress
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        self._due_s = 0.0
        self._is_step_pending = False

    def wake(self) -> None:
        """Go on stepping, after a change in the model, if there is work to do."""
        if self._timer is None and not self._model.is_idle:
            self._due_s = self._loop.time()
            self._timer = self._loop.call_soon(self._turn)

    def stop(self) -> None:
        """Cancel the next step; requests in the model stay where they are."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _turn(self) -> None:
        self._timer = None
        try:
            self._timer = self._step() if self._speedup_ratio else self._step_instantly()
        except Exception as error:
            self._on_failure(error)

    def _step(self) -> asyncio.Handle | None:
        """End the step that is due and begin the next; returns the timer of its end, None without a step."""
        if self._is_step_pending:
            self._is_step_pending = False
            self._on_progress()
        duration_s = self._model.step(FOLD_S * self._speedup_ratio)
        if duration_s is None:
            return None
        self._is_step_pending = True
        earliest_s = self._loop.time() - MAX_LATE_S
        self._due_s = max(self._due_s, earliest_s) + duration_s / self._speedup_ratio
        return self._loop.call_at(self._due_s, self._turn)

    def _step_instantly(self) -> asyncio.Handle | None:
        """Step for a slice of time; returns the handle of the next slice, None when no work is left."""
        end_s = self._loop.time() + INSTANT_SLICE_S
        is_stuck = False
        while not is_stuck and self._loop.time() < end_s:
            is_stuck = self._model.step(math.inf) is None
        self._on_progress()
        return None if is_stuck or self._model.is_idle else self._loop.call_soon(self._turn)


WAKE_S = 0.82
"""Seconds of waking: vLLM 0.11, level 1, a model of 4 B parameters on an A100 (its blog, 2025-10-26)."""


class SimEngine:
    """An ``Engine`` without a GPU: real queueing, batching and KV blocks, timed by a measured profile.

    Others take its hand-offs at the worker's own HTTP server. Its role is told in the card, and changes
    nothing else. Raises ConfigError for a wrong option.
    """

    def __init__(self, options: Mapping[str, Any], context: EngineContext) -> None:
        self._options = checked = SimOptions.from_options(options)
        self._timing, kv_tokens = timing_for(checked)
        self._settings = EngineSettings.of(checked, kv_tokens)
        self._model = EngineModel(self._settings, self._timing)
        self._changes: BlockChanges | None = None
        self._role = context.role
        self._numbers = 0
        self._id_prefix = os.urandom(6).hex()
        self._live: dict[str, LiveAnswer] = {}
        self._failure: Exception | None = None
        self._failed = asyncio.Event()
        self._is_asleep = False
        self._driver: StepDriver | None = None
        self._fetcher = KvFetcher(checked.speedup_ratio, context.token)
        self._held = HeldPrompts(context.worker_name, context.address, self._release)
        self._endpoints = SimEndpoints(
            self, self._fetcher, checked.seed, checked.model, self._settings.context_tokens
        )

    def subscribe_kv_events(self, changed: BlockChangesCallback) -> bool:
        """Call back at the end of each step that changed the published blocks."""
        if not self._settings.is_prefix_caching:
            return False
        self._changes = BlockChanges(changed, self._settings.block_tokens)
        self._model = EngineModel(self._settings, self._timing, self._changes)
        return True

    async def start(self) -> None:
        """Wait ``startup-time`` seconds, as if a model were loaded, then begin to take steps."""
        if self._options.startup_time_s:
            await asyncio.sleep(self._options.startup_time_s)
        self._driver = StepDriver(self._model, self._options.speedup_ratio, self._deliver, self._fail)

    async def stop(self, *, keeps_cache: bool = False) -> None:
        """Wait for held hand-offs, then end every request; a failed engine does not wait."""
        try:
            if self._failure is None:
                await self._held.holds.wait_empty()
        finally:
            if self._driver is not None:
                self._driver.stop()
            for answer in list(self._live.values()):
                self.close(answer, "the engine stops")
            await self._fetcher.close()

    @property
    def waits_for_release(self) -> bool:
        return True

    def release(self, request_id: str) -> None:
        self._held.release(request_id)

    def release_all(self) -> None:
        self._held.holds.release_all()

    async def wait_for_failure(self) -> None:
        await self._failed.wait()
        raise PermanentError(f"the engine failed: {self._failure!r}")

    @property
    def url(self) -> str:
        return ""

    async def count_requests(self) -> int:
        load = self.load()
        return load.running_requests + load.waiting_requests

    async def sleep(self, level: str) -> str:
        if not self._options.can_sleep:
            return "enable-sleep-mode is not set."
        self._is_asleep = True
        return ""

    async def wake(self) -> str:
        """Go on with requests that arrived meanwhile, after the time that vLLM was seen to take."""
        if self._is_asleep and self._options.speedup_ratio:
            await asyncio.sleep(WAKE_S / self._options.speedup_ratio)
        self._is_asleep = False
        self._wake()
        return ""

    def routes(self) -> Sequence[Route]:
        """The OpenAI API, and the hand-over of computed prompts to other workers."""
        return (
            *self._endpoints.routes(),
            Route("POST", "/kv/{request_id}/take", self._held.take, is_work=False),  # a drain waits for it
        )

    def card(self) -> Mapping[str, Any]:
        """The model, its context, and how its tokens are counted and hashed: ``timing_model.tokens``."""
        return {
            "model": self._options.model,
            "context_tokens": self._settings.context_tokens,
            "tokenizer": "sim",
            "kv_block_tokens": self._settings.block_tokens,
            "engine": "sim",
            "role": self._role,
        }

    def load(self) -> WorkerLoad:
        """The model's load; requests whose KV entries are on their way here count as waiting."""
        load = self._model.load()
        if counters := load.counters:
            busy_s = counters.busy_s / (self._options.speedup_ratio or math.inf)
            load = replace(load, counters=replace(counters, at_s=time.monotonic(), busy_s=busy_s))
        in_transfer = self._fetcher.in_transfer
        if not in_transfer and not self._is_asleep:
            return load
        waiting = load.waiting_requests + in_transfer
        return replace(load, waiting_requests=waiting, is_asleep=self._is_asleep)

    def metrics(self) -> Mapping[str, float]:
        """Return values by vLLM's names of metrics, and a few of our own (``dynaplan:``).

        Those that end in ``_total`` are counters, the rest gauges.
        """
        load, totals, fetcher = self.load(), self._model.totals, self._fetcher
        return {
            "vllm:num_requests_running": load.running_requests,
            "vllm:num_requests_waiting": load.waiting_requests,
            "vllm:kv_cache_usage_perc": load.kv_usage,
            "vllm:prompt_tokens_total": totals.prompt_tokens,
            "vllm:generation_tokens_total": totals.generated_tokens,
            "vllm:num_preemptions_total": totals.preemptions,
            "vllm:prefix_cache_queries_total": totals.queried_tokens,
            "vllm:prefix_cache_hits_total": totals.cached_tokens,
            "vllm:external_prefix_cache_queries_total": fetcher.asked_tokens,
            "vllm:external_prefix_cache_hits_total": totals.external_tokens,
            "vllm:request_success_total": totals.finished_requests,
            "dynaplan:remote_prefills_taken_total": fetcher.taken,
            "dynaplan:remote_prefill_fallbacks_total": fetcher.fallbacks,
            "dynaplan:kv_transfer_seconds_total": fetcher.transfer_s,
            "dynaplan:kv_hand_offs_held": self._held.holds.held,
            "dynaplan:kv_hand_offs_expired_total": self._held.holds.expired,
        }

    async def prefill(self, request: RemotePrefillRequest, hand_off_ready: HandOffReady) -> None:
        """Compute the prompt and hold its blocks until they are taken, for ``HOLD_S`` at most.

        Raises RequestRefused for a prompt that this engine cannot serve.
        """
        prompt = request.prompt_token_ids
        if not prompt:
            try:
                is_chat = request.path.endswith("/chat/completions")
                prompt = self._endpoints.read(request.body, is_chat=is_chat).prompt
            except UserError as error:
                raise RequestRefused(str(error)) from error
        hand_off_id = f"{request.request_id}.{self.next_number()}"
        held = EngineRequest(hand_off_id, len(prompt), 1, self.hashes(prompt), is_held=True)
        answer = self.submit(LiveAnswer(held, is_streamed=False), prompt)
        try:
            await answer.progress(0)
            blocks = self._settings.blocks_for(len(prompt))
            params = self._held.hold(hand_off_id, len(prompt), blocks)
        except BaseException:
            self._model.cancel(hand_off_id)
            raise
        finally:
            self.close(answer)
        await hand_off_ready({"kv_transfer_params": params}, held.cached_tokens)

    def hashes(self, prompt: Sequence[int]) -> Sequence[int]:
        """Return the hashes of the prompt's full blocks; none where nothing is shared."""
        if not self._settings.is_prefix_caching:
            return ()
        return block_hashes(prompt, self._settings.block_tokens)

    def next_number(self) -> str:
        """Return a request's id, unique among all engines."""
        self._numbers += 1
        return f"{self._id_prefix}{self._numbers:x}"

    def submit(self, answer: LiveAnswer, prompt: Sequence[int]) -> LiveAnswer:
        """Give the model the request; raises PermanentError when it does not run, RequestRefused."""
        if self._failure is not None or self._driver is None:
            raise PermanentError(f"the engine does not run: {self._failure or 'it was not started'}")
        try:
            self._model.submit(answer.request)
        except ValueError as error:
            raise RequestRefused(str(error)) from error
        self._live[answer.request.request_id] = answer
        if self._changes:
            self._changes.add_prompt(prompt, answer.request.block_hashes)
        self._wake()
        return answer

    def close(self, answer: LiveAnswer, failure: str = "it was cancelled") -> None:
        """Forget the answer; one that is not finished fails, and ends in the model."""
        was_live = self._live.pop(answer.request.request_id, None)
        if not answer.is_finished:
            self._model.cancel(answer.request.request_id)
            answer.fail(PermanentError(f"request {answer.request.request_id}: {failure}"))
            self._wake()
        if was_live and self._changes:
            self._changes.remove_prompt(answer.request.block_hashes)

    def _release(self, hand_off_id: str) -> None:
        self._model.release(hand_off_id)
        self._wake()

    def _wake(self) -> None:
        if self._driver is not None and self._failure is None and not self._is_asleep:
            self._driver.wake()

    def _deliver(self) -> None:
        emitted_tokens = self._model.emitted_tokens
        for answer in self._live.values():
            tokens = emitted_tokens(answer.request)
            if tokens != answer.ready_tokens:
                answer.advance(tokens)
        if self._changes:
            self._changes.flush()

    def _fail(self, error: Exception) -> None:
        log.error("the engine model failed; every request gets an error from now on", exc_info=error)
        self._failure = error
        self._failed.set()
        for answer in self._live.values():
            answer.fail(PermanentError(f"the engine failed: {error!r}"))
