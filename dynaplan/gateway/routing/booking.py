"""The router's book: the requests and KV blocks in flight at each worker, as far as the router itself knows.

A router does not ask the engines: it counts a request at a worker from the choice until the answer has ended,
and the blocks of its prompt as prefill work until the prompt is computed. While it decodes, its answer fills
blocks too. The live router and the simulated one keep the same book.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from dynaplan.gateway.routing.choosing import Candidate


@dataclass(slots=True)
class WorkerBook:
    """The requests in flight at one worker, and KV blocks of their prompts and answers.

    ``prefill_blocks`` are the part of ``active_blocks`` that the worker has yet to compute.
    """

    in_flight: int = 0
    active_blocks: int = 0
    prefill_blocks: int = 0

    def candidate(self, instance_id: int, overlap_blocks: int, others: WorkerBook | None = None) -> Candidate:
        """Return the worker as a choice; ``overlap_blocks`` of the new prompt are probably in its cache.

        ``others`` is what other routers have there, if they tell.
        """
        in_flight, active, prefill = self.in_flight, self.active_blocks, self.prefill_blocks
        if others:
            in_flight += others.in_flight
            active += others.active_blocks
            prefill += others.prefill_blocks
        return Candidate(instance_id, in_flight, active, prefill, overlap_blocks)


@dataclass
class BookEntry:
    """One request in a worker's book, from the making of this entry until ``close``.

    The answer fills blocks of ``block_tokens``, after the ``begun_tokens`` of the prompt that fill none. 0:
    it is not known how.
    """

    book: WorkerBook
    prompt_blocks: int = 0
    overlap_blocks: int = 0
    block_tokens: int = 0
    begun_tokens: int = 0
    grows_at_tokens: float = field(init=False, default=inf)
    """The length of the answer, in tokens, from which on ``decoded`` is to be called."""
    _prefill_blocks: int = field(init=False, default=0)
    _answer_blocks: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        book = self.book
        self._prefill_blocks = prefill_blocks = self.prompt_blocks - self.overlap_blocks
        book.in_flight += 1
        book.active_blocks += self.prompt_blocks
        book.prefill_blocks += prefill_blocks
        if self.block_tokens:
            self.grows_at_tokens = 1

    @property
    def prefix_hit_rate(self) -> float:
        """The estimated part of the prompt, 0 to 1, that the worker has in its cache."""
        return self.overlap_blocks / self.prompt_blocks if self.prompt_blocks else 0.0

    def prefilled(self) -> None:
        """Note that the prompt is computed: its blocks do not count as prefill work any more."""
        self.book.prefill_blocks -= self._prefill_blocks
        self._prefill_blocks = 0

    def decoded(self, answer_tokens: int) -> None:
        """Note that the answer has this length: the blocks that it fills are in use too."""
        if answer_tokens >= self.grows_at_tokens:
            blocks = -(-(self.begun_tokens + answer_tokens) // self.block_tokens)
            self.book.active_blocks += blocks - self._answer_blocks
            self._answer_blocks = blocks
            self.grows_at_tokens = blocks * self.block_tokens - self.begun_tokens + 1

    def close(self) -> None:
        """Note that the request has left the worker."""
        self.prefilled()
        self.book.in_flight -= 1
        self.book.active_blocks -= self.prompt_blocks + self._answer_blocks
