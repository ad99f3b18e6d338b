"""The data of the engine model: a request, the result of a step, the totals."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple


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
    """Counters since the start; tokens unless the name says otherwise."""

    __slots__ = (
        "cached",
        "external",
        "finished_requests",
        "generated",
        "preemptions",
        "prefix_queries",
        "prompts",
    )

    def __init__(self) -> None:
        self.prompts = 0
        self.generated = 0
        self.prefix_queries = 0
        self.cached = 0
        self.external = 0
        self.preemptions = 0
        self.finished_requests = 0
