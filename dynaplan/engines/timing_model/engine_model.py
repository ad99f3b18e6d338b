"""The simulated engine: continuous batching over paged KV, step by step. Time is what a step returns.

Each step decodes one token for every running request whose prompt is computed, and spends the rest of the
token budget on prompt chunks, first come first served. A prompt gets all its blocks when it is admitted, less
those its prefix shares; a decoding request gets a block whenever it fills one. When none is free, the request
admitted last gives up its blocks; later, before all others, it computes prompt and answer so far again.

A step costs the same however many requests decode: what changes for all of them by one per step (tokens
emitted, context, KV tokens) is kept as the difference to ``_clock``, the number of decode steps so far, and
what happens to one of them (a block fills, the last token) waits in a bucket for its step.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from heapq import heappop, heappush
from typing import NamedTuple

from dynaplan.config.settings.worker import EngineOptions, SimOptions
from dynaplan.engines.engine_counters import EngineCounters
from dynaplan.engines.timing_model.kv_blocks import BlockListener, KvBlocks
from dynaplan.engines.timing_model.step_timing import StepTiming
from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.util.errors import ConfigError
from dynaplan.util.splitmix import UniformDraws

DEFAULT_CONTEXT_TOKENS = 16_384
"""The context where no option says it and the KV cache holds as much."""


@dataclass(frozen=True)
class EngineSettings:
    """The sizes of an engine, in tokens unless the name says blocks.

    Each step's duration is multiplied by a factor drawn evenly from ``1 - jitter`` to ``1 + jitter``.
    """

    total_blocks: int
    block_tokens: int = EngineOptions.block_tokens
    context_tokens: int = DEFAULT_CONTEXT_TOKENS
    batched_tokens: int = EngineOptions.batched_tokens
    request_slots: int = EngineOptions.request_slots
    is_prefix_caching: bool = True
    jitter: float = 0.0
    seed: int = 0

    @classmethod
    def of(cls, options: SimOptions, profile_kv_tokens: int) -> EngineSettings:
        """Fill in the KV size and the context; raise ConfigError when the context does not fit."""
        kv_tokens = options.total_kv_tokens or profile_kv_tokens
        total_blocks = options.total_blocks or max(kv_tokens // options.block_tokens, 1)
        kv_tokens = total_blocks * options.block_tokens
        if options.context_tokens > kv_tokens:
            raise ConfigError(
                f"max-model-len is {options.context_tokens}, but the KV cache holds {kv_tokens} tokens",
                hint="Expected at most num-gpu-blocks-override times block-size, or kv-total-tokens.",
            )
        return cls(
            total_blocks=total_blocks,
            block_tokens=options.block_tokens,
            context_tokens=options.context_tokens or min(DEFAULT_CONTEXT_TOKENS, kv_tokens),
            batched_tokens=options.batched_tokens,
            request_slots=options.request_slots,
            is_prefix_caching=options.is_prefix_caching,
            jitter=options.jitter,
            seed=options.seed,
        )

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)


class RequestState(IntEnum):
    """The state of a request. ``HELD``: computed for another engine, which has yet to take its blocks."""

    WAITING = 0
    PREFILLING = 1
    DECODING = 2
    HELD = 3
    ENDED = 4


class EngineRequest:
    """One request, and once it is submitted its state, which only its model changes.

    ``block_hashes`` are the chained hashes of the prompt's full blocks (none: nothing is shared).
    ``is_remote`` says that the prompt's KV entries come from another engine; ``is_held`` that its own are
    kept after the last token until ``release``. ``finish_reason`` is as given, or "abort".
    """

    __slots__ = (
        "_context",
        "_emitted",
        "_finish_at",
        "_joined_at",
        "_shared",
        "_target",
        "_was_admitted",
        "block_hashes",
        "cached_tokens",
        "finish_reason",
        "is_held",
        "is_remote",
        "max_tokens",
        "prompt_tokens",
        "request_id",
        "state",
    )

    def __init__(
        self,
        request_id: str,
        prompt_tokens: int,
        max_tokens: int,
        block_hashes: Sequence[int] = (),
        *,
        is_remote: bool = False,
        is_held: bool = False,
        finish_reason: str = "length",
    ) -> None:
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.block_hashes = block_hashes
        self.is_remote = is_remote
        self.is_held = is_held
        self.finish_reason = finish_reason
        self.cached_tokens = 0
        self.state = RequestState.WAITING
        self._target = prompt_tokens  # tokens to compute before the next one is emitted
        self._context = 0  # tokens in KV; while decoding: when it joined the batch
        self._emitted = 0  # likewise
        self._joined_at = 0  # the clock when it joined the batch
        self._finish_at = 0  # the clock when its last token is emitted
        self._shared: list[int] = []  # published blocks it uses, in order
        self._was_admitted = False


class StepResult(NamedTuple):
    """The result of one step: requests that emitted their first token (``started``) and their last.

    ``decode_steps`` above 1 are as many decode-only steps in one result. An empty result (``is_empty``) means
    that nothing can go on until a request comes, is cancelled, or a held one is released.
    """

    duration_s: float
    decode_steps: int
    tokens: int
    started: Sequence[EngineRequest]
    finished: Sequence[EngineRequest]
    preempted: Sequence[EngineRequest]
    is_empty: bool = False


class Totals:
    """Counters since the start; tokens unless the name says otherwise.

    Of prompts ``computed`` are the tokens in chunks, and ``started`` the number that began. ``decoded``
    leaves out the tokens that prompts emit.
    """

    __slots__ = (
        "busy_ms",
        "cached",
        "computed",
        "decoded",
        "external",
        "finished_requests",
        "generated",
        "preemptions",
        "prefix_queries",
        "prompts",
        "started",
        "steps",
    )

    def __init__(self) -> None:
        self.prompts = 0
        self.generated = 0
        self.prefix_queries = 0
        self.cached = 0
        self.external = 0
        self.preemptions = 0
        self.finished_requests = 0
        self.steps = 0
        self.busy_ms = 0.0
        self.decoded = 0
        self.computed = 0
        self.started = 0


Chunk = tuple[EngineRequest, int, int]
"""Tokens of a prompt that one step computes: the request, how many are done before, and how many come now."""

ADMISSION_RESERVE = 0.01
"""The part of all blocks that stays free when a request is admitted beside others, so that these can grow."""


class EngineModel:
    """One engine: ``submit``, ``cancel`` and ``release`` between steps; ``step`` while not ``is_idle``.

    The listener hears of its published blocks.
    """

    def __init__(
        self, settings: EngineSettings, timing: StepTiming, listener: BlockListener | None = None
    ) -> None:
        self.settings = settings
        self.timing = timing
        self.blocks = KvBlocks(settings.total_blocks, listener)
        self.totals = Totals()
        self._reserve = int(settings.total_blocks * ADMISSION_RESERVE)
        self._waiting: OrderedDict[str, EngineRequest] = OrderedDict()
        self._running: dict[str, EngineRequest] = {}
        self._prefilling: dict[str, EngineRequest] = {}
        self._held: dict[str, EngineRequest] = {}
        self._clock = 0
        self._decoding = 0
        self._kv_tokens = 0
        self._filling = [0] * settings.block_tokens  # requests that need a block, by the step modulo its size
        self._finishing: dict[int, dict[str, EngineRequest]] = {}
        self._finish_order: list[int] = []
        self._jitter = UniformDraws(settings.seed)

    @property
    def is_idle(self) -> bool:
        """True when no request waits or runs; some may be held."""
        return not self._running and not self._waiting

    def submit(self, request: EngineRequest) -> None:
        """Queue the request; raises ValueError for one that could never be served, or an id in use."""
        tokens = request.prompt_tokens + request.max_tokens
        if request.prompt_tokens < 1 or request.max_tokens < 1 or tokens > self.settings.context_tokens:
            raise ValueError(
                f"{request.prompt_tokens} prompt and {request.max_tokens} answer tokens: "
                f"expected at least 1 of each, and at most {self.settings.context_tokens} together"
            )
        if self.settings.blocks_for(tokens) > self.settings.total_blocks:
            raise ValueError(f"{tokens} tokens do not fit {self.settings.total_blocks} KV blocks")
        key = request.request_id
        if key in self._waiting or key in self._running or key in self._held:
            raise ValueError(f"request '{key}' is already here")
        self.totals.prompts += request.prompt_tokens
        self._waiting[key] = request

    def cancel(self, request_id: str) -> bool:
        """End the request now, in whatever state; False when it is not here (any more)."""
        request = self._waiting.pop(request_id, None) or self._running.get(request_id)
        if request is None:
            return self.release(request_id)
        request.finish_reason = "abort"
        self._end(request)
        return True

    def release(self, request_id: str) -> bool:
        """Free the blocks of a held request, taken or not; False when it is not held."""
        request = self._held.pop(request_id, None)
        if request is None:
            return False
        self._free(request)
        request.state = RequestState.ENDED
        return True

    def emitted_tokens(self, request: EngineRequest) -> int:
        if request.state is RequestState.DECODING:
            return request._emitted + self._clock - request._joined_at
        return request._emitted

    def load(self) -> WorkerLoad:
        """Return running and waiting requests and KV usage as vLLM exports them; the hit rate since the
        start."""
        totals = self.totals
        return WorkerLoad(
            running_requests=len(self._running),
            request_slots=self.settings.request_slots,
            waiting_requests=len(self._waiting),
            kv_active_blocks=self.blocks.used,
            kv_total_blocks=self.blocks.total,
            kv_usage=self.blocks.used / self.blocks.total,
            prefix_hit_rate=totals.cached / totals.prefix_queries if totals.prefix_queries else 0.0,
            generated_tokens=totals.generated,
            counters=EngineCounters(
                0.0,
                totals.steps,
                totals.decoded,
                totals.computed,
                totals.started,
                totals.busy_ms / 1000,
                self._kv_tokens,
                self.settings.total_blocks * self.settings.block_tokens,
            ),
        )

    def step(self, horizon_s: float = 0.0) -> StepResult:
        """Do one step; its effects are complete when ``duration_s`` has passed.

        With a horizon, in seconds, decode-only steps are done as one until a request finishes, a block is
        lacking, or about the horizon has passed: the same tokens, and the duration of the middle one for
        each.
        """
        preempted: Sequence[EngineRequest] = self._make_room() if self._decoding else ()
        decodes, kv_tokens = self._decoding, self._kv_tokens
        chunks: Sequence[Chunk] = ()
        remote: Sequence[EngineRequest] = ()
        starts = 0
        if self._prefilling or (self._waiting and not preempted):
            chunks, starts, remote = self._schedule(may_admit=not preempted)
        steps, duration_ms = 1, 0.0
        if chunks:
            duration_ms = self.timing.step_ms(decodes, kv_tokens, _spans(chunks), starts)
        elif decodes:
            steps, duration_ms = self._decode_only(decodes, kv_tokens, 0.0 if remote else horizon_s)
        finished: Sequence[EngineRequest] = ()
        started: Sequence[EngineRequest] = ()
        if decodes:
            self._clock += steps
            self._kv_tokens += decodes * steps
            if self._clock in self._finishing:
                finished = self._pop_finished()
        if chunks:
            started, ended = self._complete(chunks)
            finished = [*finished, *ended]
        for request in remote:
            self._join(request, request.prompt_tokens - 1)
        tokens = decodes * steps + len(started)
        if self.settings.jitter:
            duration_ms = self._with_jitter(duration_ms)
        totals = self.totals
        totals.generated += tokens
        totals.steps += steps
        totals.busy_ms += duration_ms
        totals.decoded += decodes * steps
        if chunks:
            totals.computed += sum(size for _, _, size in chunks)
            totals.started += starts
        is_empty = not (decodes or chunks or remote or preempted)
        done = steps if decodes else 0
        return StepResult(duration_ms / 1000, done, tokens, started, finished, preempted, is_empty)

    def _make_room(self) -> list[EngineRequest]:
        """Give decoding requests the blocks their next tokens need, preempting the newest until all fit."""
        preempted: list[EngineRequest] = []
        blocks, filling, place = self.blocks, self._filling, self._clock % self.settings.block_tokens
        while filling[place] > blocks.total - blocks.used:
            preempted.append(self._preempt(next(reversed(self._running.values()))))
        if filling[place]:
            blocks.take(filling[place])
        return preempted

    def _preempt(self, request: EngineRequest) -> EngineRequest:
        self._leave(request)
        self._free(request)
        request.state = RequestState.WAITING
        request.is_remote = False
        request._context = 0
        request._target = request.prompt_tokens + request._emitted
        self._waiting[request.request_id] = request
        self._waiting.move_to_end(request.request_id, last=False)
        self.totals.preemptions += 1
        return request

    def _schedule(self, *, may_admit: bool) -> tuple[list[Chunk], int, list[EngineRequest]]:
        """Choose this step's chunks, the number of new prompts, and remote requests."""
        chunks: list[Chunk] = []
        remote: list[EngineRequest] = []
        starts = 0
        budget = self.settings.batched_tokens - self._decoding
        # At most one prompt is half computed, and the decodes of a step leave a token of its budget for it.
        for request in self._prefilling.values():
            budget -= self._compute(request, budget, chunks)
        slots = self.settings.request_slots
        while may_admit and self._waiting and budget > 0 and len(self._running) < slots:
            request = next(iter(self._waiting.values()))
            if not self._admit(request):
                break
            if request.is_remote:
                remote.append(request)
                budget -= 1
            else:
                starts += 1
                budget -= self._compute(request, budget, chunks)
        return chunks, starts, remote

    def _compute(self, request: EngineRequest, budget: int, chunks: list[Chunk]) -> int:
        done = request._context
        size = min(budget, request._target - done)
        request._context = done + size
        chunks.append((request, done, size))
        if request.block_hashes:
            self._publish(request)
        return size

    def _admit(self, request: EngineRequest) -> bool:
        """Give the request at the head of the queue its blocks, if they are free; then it runs."""
        blocks, size = self.blocks, self.settings.block_tokens
        hashes: Sequence[int] = ()
        if request.block_hashes and self.settings.is_prefix_caching:
            most = (request._target - 1) // size  # one token is always left to compute
            hashes = request.block_hashes[: blocks.matching(request.block_hashes[:most])]
        fresh = -(-(request._target - request.is_remote) // size) - len(hashes)
        idle = blocks.idle_among(hashes) if hashes else 0
        reserve = self._reserve if self._running else 0
        if fresh + idle + reserve > blocks.total - blocks.used:
            return False
        if hashes:
            blocks.share(hashes)
            request._shared = list(hashes)
        blocks.take(fresh)
        request._context = len(hashes) * size
        if not request._was_admitted:
            self._count_admission(request)
        key = request.request_id
        del self._waiting[key]
        self._running[key] = request
        request.state = RequestState.PREFILLING
        if not request.is_remote:
            self._prefilling[key] = request
            return True
        request._context = request.prompt_tokens - 1
        if request.block_hashes:
            self._publish(request)
        return True

    def _count_admission(self, request: EngineRequest) -> None:
        """Count a first admission: the next one of a request that was preempted does not count."""
        request._was_admitted = True
        self.totals.prefix_queries += request.prompt_tokens
        self.totals.cached += request._context
        request.cached_tokens = request._context
        if request.is_remote:
            self.totals.external += request.prompt_tokens - request._context

    def _publish(self, request: EngineRequest) -> None:
        """Publish the prompt's blocks that are full now, for other requests to share.

        Ends at a block that another request has published meanwhile: it and what follows stay private.
        """
        if not self.settings.is_prefix_caching:
            return
        shared = request._shared
        full = min(request._context // self.settings.block_tokens, len(request.block_hashes))
        for block in request.block_hashes[len(shared) : full]:
            if not self.blocks.publish(block):
                return
            shared.append(block)

    def _decode_only(self, decodes: int, kv_tokens: int, horizon_s: float) -> tuple[int, float]:
        """Return how many decode steps to do at once, and the ms of all of them."""
        decode_ms = self.timing.decode_ms
        if horizon_s <= 0.0:
            return 1, decode_ms(decodes, kv_tokens)
        order, finishing = self._finish_order, self._finishing
        while order[0] not in finishing:  # all that were to finish then have left
            heappop(order)
        steps = order[0] - self._clock
        if steps > 1 and horizon_s != math.inf:
            within = math.ceil(horizon_s * 1000 / decode_ms(decodes, kv_tokens))
            steps = max(1, min(steps, within))
        if steps > 1 and not self._take_ahead(steps):
            steps = 1
        return steps, decode_ms(decodes, kv_tokens + decodes * (steps - 1) / 2) * steps

    def _take_ahead(self, steps: int) -> bool:
        """Take the blocks of the steps after this one; False, and none taken, when they are not all free."""
        blocks, filling, size = self.blocks, self._filling, self.settings.block_tokens
        rounds, rest = divmod(steps - 1, size)
        first = (self._clock + 1) % size
        count = rounds * self._decoding + sum(filling[first : first + rest])
        if first + rest > size:
            count += sum(filling[: first + rest - size])
        if count > blocks.total - blocks.used:
            return False
        if count:
            blocks.take(count)
        return True

    def _pop_finished(self) -> list[EngineRequest]:
        """End the requests whose last token is that of this step."""
        order = self._finish_order
        while order and order[0] <= self._clock:
            heappop(order)
        finished = list(self._finishing[self._clock].values())
        for request in finished:
            self._finish(request)
        return finished

    def _complete(self, chunks: Sequence[Chunk]) -> tuple[list[EngineRequest], list[EngineRequest]]:
        """Let requests whose prompt is computed emit a token.

        Return these, and those of them that end with it. The others decode from the next step on.
        """
        started, ended = [], []
        for request, _, _ in chunks:
            if request._context < request._target:
                continue
            started.append(request)
            request._emitted += 1
            if request._emitted >= request.max_tokens:
                self._finish(request)
                ended.append(request)
            else:
                del self._prefilling[request.request_id]
                self._join(request, request._target)
        return started, ended

    def _join(self, request: EngineRequest, context: int) -> None:
        """Let the request decode from the next step on, with ``context`` tokens in KV."""
        key = request.request_id
        request.state = RequestState.DECODING
        request._context = context
        request._joined_at = self._clock
        request._finish_at = finish_at = self._clock + request.max_tokens - request._emitted
        self._decoding += 1
        self._kv_tokens += context
        self._filling[(self._clock - context) % self.settings.block_tokens] += 1
        bucket = self._finishing.get(finish_at)
        if bucket is None:
            bucket = self._finishing[finish_at] = {}
            heappush(self._finish_order, finish_at)
        bucket[key] = request

    def _leave(self, request: EngineRequest) -> None:
        """Take the request off the batch, its context and tokens brought up to date."""
        key = request.request_id
        self._running.pop(key, None)
        if request.state is RequestState.PREFILLING:
            self._prefilling.pop(key, None)
        if request.state is not RequestState.DECODING:
            return
        self._filling[(request._joined_at - request._context) % self.settings.block_tokens] -= 1
        bucket = self._finishing[request._finish_at]
        del bucket[key]
        if not bucket:
            del self._finishing[request._finish_at]
        steps = self._clock - request._joined_at
        request._context += steps
        request._emitted += steps
        self._decoding -= 1
        self._kv_tokens -= request._context

    def _finish(self, request: EngineRequest) -> None:
        self.totals.finished_requests += 1
        if not request.is_held:
            self._end(request)
            return
        self._leave(request)
        request.state = RequestState.HELD
        self._held[request.request_id] = request

    def _end(self, request: EngineRequest) -> None:
        was_waiting = request.state is RequestState.WAITING
        self._leave(request)
        if not was_waiting:
            self._free(request)
        request.state = RequestState.ENDED

    def _free(self, request: EngineRequest) -> None:
        """Release its blocks: for the whole prompt while that is computed, for the tokens in KV after it."""
        tokens = max(request._target - request.is_remote, request._context)
        shared, blocks = request._shared, -(-tokens // self.settings.block_tokens)
        self.blocks.release(blocks - len(shared), shared)
        request._shared = []

    def _with_jitter(self, duration_ms: float) -> float:
        return duration_ms * (1.0 + self.settings.jitter * (2.0 * next(self._jitter) - 1.0))


def _spans(chunks: Sequence[Chunk]) -> list[tuple[int, int]]:
    return [(done, size) for _, done, size in chunks]
