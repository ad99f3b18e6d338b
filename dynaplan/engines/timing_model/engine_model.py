"""The simulated engine: continuous batching over paged KV, step by step. Time is what a step returns.

Each step decodes one token for every running request whose prompt is computed, and spends the rest of the
token budget on prompt chunks, first come first served. A prompt gets all its blocks when it is admitted, less
those its prefix shares; a decoding request gets a block whenever it fills one. When none is free, the request
admitted last gives up its blocks; later, before all others, it computes prompt and answer so far again.

A step costs the same however many requests decode: what changes for all of them by one per step (tokens
emitted, context, KV tokens) is kept as the difference to ``_clock``, the number of decode steps so far, and
what happens to one of them waits for its step: its last token in a heap (``_last_tokens``), the steps in
which it fills a block, which are a block's tokens apart, in one of as many counts (``_filling``).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from heapq import heapify, heappop, heappush

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


WAITING, PREFILLING, DECODING, HELD, ENDED = RequestState  # to look one up in the enum takes 0.1 µs


class EngineRequest:
    """One request, and once it is submitted its state, which only its model changes.

    ``block_hashes`` are the chained hashes of the prompt's full blocks (none: nothing is shared).
    ``is_remote`` says that the prompt's KV entries come from another engine; ``is_held`` that its own are
    kept after the last token until ``release``. ``finish_reason`` is as given, or "abort".
    """

    __slots__ = (
        "_context",
        "_emitted",
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
        self.state = WAITING
        self._target = prompt_tokens  # tokens to compute before the next one is emitted
        self._context = 0  # tokens in KV; while decoding: when it joined the batch
        self._emitted = 0  # likewise
        self._joined_at = 0  # the clock when it joined the batch
        self._shared: list[int] = []  # published blocks it uses, in order
        self._was_admitted = False


class Totals:
    """What an engine has done since its start.

    A request that was preempted counts again in ``computed_tokens`` and in both numbers of prompts. Each
    completed prompt emits a token, which is not among ``decoded_tokens``.
    """

    __slots__ = (
        "busy_ms",
        "cached_tokens",
        "completed_prompts",
        "computed_tokens",
        "decoded_tokens",
        "external_tokens",
        "finished_requests",
        "preemptions",
        "prompt_tokens",
        "queried_tokens",
        "started_prompts",
        "steps",
    )

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.queried_tokens = 0
        self.cached_tokens = 0
        self.external_tokens = 0
        self.preemptions = 0
        self.finished_requests = 0
        self.steps = 0
        self.busy_ms = 0.0
        self.decoded_tokens = 0
        self.computed_tokens = 0
        self.started_prompts = 0
        self.completed_prompts = 0

    @property
    def generated_tokens(self) -> int:
        return self.decoded_tokens + self.completed_prompts


Chunk = tuple[int, int]
"""Tokens of a prompt that one step computes: how many are done before, and how many come now."""

ADMISSION_RESERVE = 0.01
"""The part of all blocks that stays free when a request is admitted beside others, so that these can grow."""


class EngineModel:
    """One engine: ``submit``, ``cancel`` and ``release`` between steps; ``step`` while not ``is_idle``.

    The listener hears of its published blocks. Three attributes tell of the last call of ``step``:
    ``steps_done`` is how many it did, ``first_token_requests`` emitted their first token (after a preemption
    the next one) in the first of these, ``finished`` emitted their last.
    """

    def __init__(
        self, settings: EngineSettings, timing: StepTiming, listener: BlockListener | None = None
    ) -> None:
        self.settings = settings
        self.timing = timing
        self.blocks = KvBlocks(settings.total_blocks, listener)
        self.totals = Totals()
        self.steps_done = 0
        self.first_token_requests: tuple[EngineRequest, ...] = ()
        self.finished: tuple[EngineRequest, ...] = ()
        self._block_tokens = settings.block_tokens
        self._most_tokens = min(settings.context_tokens, settings.total_blocks * settings.block_tokens)
        self._reserve = int(settings.total_blocks * ADMISSION_RESERVE)
        self._waiting: OrderedDict[str, EngineRequest] = OrderedDict()
        self._running: dict[str, EngineRequest] = {}
        self._half_computed: EngineRequest | None = None
        self._remote_joined: tuple[EngineRequest, ...] = ()  # last: the next step emits their first token
        self._held: dict[str, EngineRequest] = {}
        self._clock = 0
        self._decoding = 0
        self._kv_tokens = 0
        self._filling = [0] * settings.block_tokens  # requests that need a block, by the step modulo its size
        self._last_tokens: list[tuple[int, int, EngineRequest]] = []  # heap: the clock then, order of joining
        self._joins = 0
        self._jitter = settings.jitter
        self._jitter_draws = UniformDraws(settings.seed)

    @property
    def is_idle(self) -> bool:
        """True when no request waits or runs; some may be held."""
        return not self._running and not self._waiting

    def submit(self, request: EngineRequest) -> None:
        """Queue the request; raises ValueError for one that could never be served, or an id in use."""
        prompt, answer = request.prompt_tokens, request.max_tokens
        if prompt < 1 or answer < 1 or prompt + answer > self._most_tokens:
            raise ValueError(self._why_never(request))
        key = request.request_id
        if key in self._waiting or key in self._running or key in self._held:
            raise ValueError(f"request '{key}' is already here")
        self.totals.prompt_tokens += prompt
        self._waiting[key] = request

    def _why_never(self, request: EngineRequest) -> str:
        """Say why the engine could never serve the request."""
        prompt, answer, most = request.prompt_tokens, request.max_tokens, self.settings.context_tokens
        if prompt < 1 or answer < 1 or prompt + answer > most:
            return (
                f"{prompt} prompt and {answer} answer tokens: "
                f"expected at least 1 of each, and at most {most} together"
            )
        return f"{prompt + answer} tokens do not fit {self.settings.total_blocks} KV blocks"

    def cancel(self, request_id: str) -> bool:
        """End the request now, in whatever state; False when it is not here (any more)."""
        request = self._waiting.pop(request_id, None)
        if request is None:
            if request_id not in self._running:
                return self.release(request_id)
            request = self._running[request_id]
            self._leave(request)
        request.finish_reason = "abort"
        request.state = ENDED
        return True

    def release(self, request_id: str) -> bool:
        """Free the blocks of a held request, taken or not; False when it is not held."""
        request = self._held.pop(request_id, None)
        if request is None:
            return False
        self._free(request)
        request.state = ENDED
        return True

    def emitted_tokens(self, request: EngineRequest) -> int:
        if request.state is DECODING:
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
            prefix_hit_rate=totals.cached_tokens / totals.queried_tokens if totals.queried_tokens else 0.0,
            generated_tokens=totals.generated_tokens,
            counters=EngineCounters(
                0.0,
                totals.steps,
                totals.decoded_tokens,
                totals.computed_tokens,
                totals.started_prompts,
                totals.busy_ms / 1000,
                self._kv_tokens,
                self.settings.total_blocks * self.settings.block_tokens,
            ),
        )

    def step(self, horizon_s: float = 0.0) -> float | None:
        """Do one step, and return its duration in seconds, after which its effects are complete.

        None means that nothing can go on until a request comes, is cancelled, or a held one is released.
        With a horizon, decode-only steps until a request finishes, or about the horizon has passed, are done
        as one where their blocks are free, and the duration of all is returned. The tokens are the same, and
        each step is taken to last as long as the middle one.
        """
        if self._waiting or self._half_computed:
            return self._mixed_step(horizon_s)
        if self._decoding:
            return self._do_decode_steps(horizon_s)
        return None

    def _mixed_step(self, horizon_s: float) -> float | None:
        """Do a step that may compute prompts; no request is admitted where one is preempted."""
        is_crowded = False
        if self._decoding and not self._take_blocks(self._clock, 1):
            is_crowded = True
            self._make_room()
            self._take_blocks(self._clock, 1)
        chunks, starts, computed, remote = self._schedule(may_admit=not is_crowded)
        if chunks:
            duration_ms = self.timing.step_ms(self._decoding, self._kv_tokens, chunks, starts)
            duration_s = self._end_steps(1, duration_ms)
        elif self._decoding:
            duration_s = self._do_decode_steps(0.0 if remote else horizon_s, taken=1)
        elif remote or is_crowded:
            duration_s = self._end_steps(1, 0.0)
        else:
            return None
        if computed:
            self._complete(computed)
        for request in remote:
            self._join(request, request.prompt_tokens - 1)
        self._remote_joined = tuple(remote)
        return duration_s

    def _take_blocks(self, clock: int, steps: int) -> bool:
        """Take the blocks that decodes fill in so many steps from that of ``clock`` on.

        False, and none taken, when they are not all free.
        """
        filling, size, blocks = self._filling, self._block_tokens, self.blocks
        rounds, rest = divmod(steps, size)
        first = clock % size
        end = first + rest
        count = rounds * self._decoding + sum(filling[first:end])
        if end > size:
            count += sum(filling[: end - size])
        if count > blocks.free:
            return False
        if count:
            blocks.take(count)
        return True

    def _make_room(self) -> None:
        """Preempt the newest requests until the others can have the blocks for their next tokens."""
        place = self._clock % self._block_tokens
        while self._filling[place] > self.blocks.free:
            request = next(reversed(self._running.values()))
            self._leave(request)
            request.state = WAITING
            request.is_remote = False
            request._context = 0
            request._target = request.prompt_tokens + request._emitted
            self._waiting[request.request_id] = request
            self._waiting.move_to_end(request.request_id, last=False)
            self.totals.preemptions += 1

    def _schedule(
        self, *, may_admit: bool
    ) -> tuple[list[Chunk], int, list[EngineRequest], list[EngineRequest]]:
        """Choose this step's chunks.

        Return them, the number of prompts that begin, those that are computed with it, and remote requests.
        """
        chunks: list[Chunk] = []
        computed: list[EngineRequest] = []
        remote: list[EngineRequest] = []
        starts = 0
        budget = self.settings.batched_tokens - self._decoding
        # At most one prompt is half computed, and the decodes of a step leave a token of its budget for it.
        if self._half_computed:
            budget -= self._compute(self._half_computed, budget, chunks, computed)
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
                budget -= self._compute(request, budget, chunks, computed)
        self.totals.started_prompts += starts
        return chunks, starts, computed, remote

    def _compute(
        self, request: EngineRequest, budget: int, chunks: list[Chunk], computed: list[EngineRequest]
    ) -> int:
        """Add the request's next chunk, of at most ``budget`` tokens; return its tokens."""
        done, target = request._context, request._target
        size = target - done if target - done < budget else budget
        request._context = done + size
        chunks.append((done, size))
        self.totals.computed_tokens += size
        if done + size == target:
            computed.append(request)
            self._half_computed = None
        else:
            self._half_computed = request
        if request.block_hashes:
            self._publish(request)
        return size

    def _admit(self, request: EngineRequest) -> bool:
        """Give the request at the head of the queue its blocks, if they are free; then it runs."""
        blocks, size = self.blocks, self._block_tokens
        hashes: Sequence[int] = ()
        idle = 0
        if request.block_hashes and self.settings.is_prefix_caching:
            most = (request._target - 1) // size  # one token is always left to compute
            hashes = request.block_hashes[: blocks.matching(request.block_hashes[:most])]
            idle = blocks.idle_among(hashes)
        fresh = -(-(request._target - request.is_remote) // size) - len(hashes)
        if fresh + idle + (self._reserve if self._running else 0) > blocks.free:
            return False
        if hashes:
            blocks.share(hashes)
            request._shared = list(hashes)
        blocks.take(fresh)
        key = request.request_id
        del self._waiting[key]
        self._running[key] = request
        request.state = PREFILLING
        request._context = context = len(hashes) * size
        if not request._was_admitted:  # one that was preempted does not count again
            request._was_admitted = True
            request.cached_tokens = context
            totals = self.totals
            totals.queried_tokens += request.prompt_tokens
            totals.cached_tokens += context
            if request.is_remote:
                totals.external_tokens += request.prompt_tokens - context
        if request.is_remote:
            request._context = request.prompt_tokens - 1
            if request.block_hashes:
                self._publish(request)
        return True

    def _publish(self, request: EngineRequest) -> None:
        """Publish the prompt's blocks that are full now, for other requests to share.

        Ends at a block that another request has published meanwhile: it and what follows stay private.
        """
        if not self.settings.is_prefix_caching:
            return
        shared = request._shared
        full = min(request._context // self._block_tokens, len(request.block_hashes))
        for block in request.block_hashes[len(shared) : full]:
            if not self.blocks.publish(block):
                return
            shared.append(block)

    def _do_decode_steps(self, horizon_s: float, taken: int = 0) -> float:
        """Do one decode-only step, with a horizon several, and return the duration of all in seconds.

        The blocks for the first ``taken`` of them (0 or 1) are taken already.
        """
        decodes, kv_tokens, clock = self._decoding, self._kv_tokens, self._clock
        decode_ms = self.timing.decode_ms
        steps, duration_ms = 1, decode_ms(decodes, kv_tokens)
        if horizon_s > 0.0:
            steps = self._last_tokens[0][0] - clock
            if steps * duration_ms > 1000 * horizon_s:
                steps = math.ceil(1000 * horizon_s / duration_ms)
        if steps > taken and not self._take_blocks(clock + taken, steps - taken):
            steps = 1
            if not taken and not self._take_blocks(clock, 1):
                self._make_room()
                return self._do_decode_steps(horizon_s) if self._decoding else self._end_steps(1, 0.0)
        if steps > 1:
            duration_ms = steps * decode_ms(decodes, kv_tokens + decodes * (steps - 1) / 2)
        return self._end_steps(steps, duration_ms)

    def _end_steps(self, steps: int, duration_ms: float) -> float:
        """Let all that decode emit a token in each of the steps; return their duration in seconds."""
        totals, finishing = self.totals, self._last_tokens
        self.steps_done = steps
        self.first_token_requests, self._remote_joined = self._remote_joined, ()
        self.finished = ()
        if finishing:
            tokens = self._decoding * steps
            self._kv_tokens += tokens
            totals.decoded_tokens += tokens
            self._clock = clock = self._clock + steps
            while finishing and finishing[0][0] == clock:
                request = heappop(finishing)[2]
                self._stop_decoding(request)
                self._finish(request)
        if self._jitter:
            duration_ms *= 1.0 + self._jitter * (2.0 * next(self._jitter_draws) - 1.0)
        totals.steps += steps
        totals.busy_ms += duration_ms
        return duration_ms / 1000

    def _complete(self, computed: Sequence[EngineRequest]) -> None:
        """Let requests whose prompt is computed emit a token; they decode from the next step on."""
        self.totals.completed_prompts += len(computed)
        self.first_token_requests = (*computed, *self.first_token_requests)
        for request in computed:
            request._emitted += 1
            if request._emitted >= request.max_tokens:
                self._finish(request)
            else:
                self._join(request, request._target)

    def _join(self, request: EngineRequest, context: int) -> None:
        """Let the request decode from the next step on, with ``context`` tokens in KV."""
        clock = self._clock
        request.state = DECODING
        request._context = context
        request._joined_at = clock
        self._decoding += 1
        self._kv_tokens += context
        self._filling[(clock - context) % self._block_tokens] += 1
        self._joins += 1
        heappush(self._last_tokens, (clock + request.max_tokens - request._emitted, self._joins, request))

    def _stop_decoding(self, request: EngineRequest) -> None:
        """Take the request off the batch, its context and tokens brought up to date."""
        self._filling[(request._joined_at - request._context) % self._block_tokens] -= 1
        steps = self._clock - request._joined_at
        request._context += steps
        request._emitted += steps
        self._decoding -= 1
        self._kv_tokens -= request._context

    def _leave(self, request: EngineRequest) -> None:
        """Take a running request that has not finished off the engine, and free its blocks."""
        del self._running[request.request_id]
        if request is self._half_computed:
            self._half_computed = None
        else:
            self._last_tokens = [each for each in self._last_tokens if each[2] is not request]
            heapify(self._last_tokens)
            self._remote_joined = tuple(each for each in self._remote_joined if each is not request)
            self._stop_decoding(request)
        self._free(request)

    def _finish(self, request: EngineRequest) -> None:
        """Take a request that has emitted its last token off the engine; a held one keeps its blocks."""
        self.totals.finished_requests += 1
        self.finished += (request,)
        del self._running[request.request_id]
        if request.is_held:
            request.state = HELD
            self._held[request.request_id] = request
        else:
            self._free(request)
            request.state = ENDED

    def _free(self, request: EngineRequest) -> None:
        """Release its blocks: for the whole prompt while that is computed, for the tokens in KV after it."""
        tokens, shared = request._target - request.is_remote, request._shared
        if request._context > tokens:
            tokens = request._context
        self.blocks.release(-(-tokens // self._block_tokens) - len(shared), shared)
        request._shared = []
