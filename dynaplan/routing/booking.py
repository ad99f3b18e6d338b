"""Bookings: the requests and KV blocks in flight at each worker, as far as the router itself knows.

A router does not ask the engines: it counts a request at a worker from the choice until the answer has ended,
and the blocks of its prompt as prefill work until the prompt is computed. While it decodes, its answer fills
blocks too; of an answer that is not streamed ``AnswerPace`` estimates how far it is. The live router and the
simulated one book alike.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf

from dynaplan.routing.routing_logic import Candidate


@dataclass(slots=True)
class WorkerBook:
    """The requests in flight at one worker, and KV blocks of their prompts and answers.

    ``prefill_blocks`` are the part of ``active_blocks`` that the worker has yet to compute.
    """

    in_flight: int = 0
    active_blocks: int = 0
    prefill_blocks: int = 0

    def candidate(self, instance_id: int, overlap_blocks: int, others: WorkerBook | None = None) -> Candidate:
        """Return the worker as the router sees it.

        ``overlap_blocks`` of the prompt are probably cached there. ``others`` is the book that other routers
        have of it, if they report it.
        """
        in_flight, active, prefill = self.in_flight, self.active_blocks, self.prefill_blocks
        if others:
            in_flight += others.in_flight
            active += others.active_blocks
            prefill += others.prefill_blocks
        return Candidate(instance_id, in_flight, active, prefill, overlap_blocks)


@dataclass(slots=True)
class BookEntry:
    """One request in a worker's book, from the making of this entry until ``close``.

    The answer fills blocks of ``block_tokens`` (0: unknown), after ``partial_block_tokens`` at the prompt's
    end, which fill none.
    """

    book: WorkerBook
    prompt_blocks: int = 0
    overlap_blocks: int = 0
    block_tokens: int = 0
    partial_block_tokens: int = 0
    grows_at_tokens: float = field(init=False, default=inf)
    """The length of the answer, in tokens, from which on ``record_decoded`` is to be called."""
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

    def finish_prefill(self) -> None:
        """Note that the prompt is computed: its blocks do not count as prefill work any more."""
        self.book.prefill_blocks -= self._prefill_blocks
        self._prefill_blocks = 0

    def record_decoded(self, answer_tokens: int) -> None:
        """Note that the answer has this length: the blocks that it fills are in use too."""
        if answer_tokens >= self.grows_at_tokens:
            blocks = -(-(self.partial_block_tokens + answer_tokens) // self.block_tokens)
            self.book.active_blocks += blocks - self._answer_blocks
            self._answer_blocks = blocks
            self.grows_at_tokens = blocks * self.block_tokens - self.partial_block_tokens + 1

    def close(self) -> None:
        book = self.book
        book.in_flight -= 1
        book.prefill_blocks -= self._prefill_blocks
        book.active_blocks -= self.prompt_blocks + self._answer_blocks
        self._prefill_blocks = 0


FADE = 0.98
"""Weight of the answers before, for each new one: those of the last 50 count."""

NEARLY_ALIKE = 1e-6
"""Share of the product of the squares below which the determinant is taken for 0."""


class AnswerPace:
    """Estimates how many tokens a running answer has that is sent whole, by the pace of earlier ones.

    Of a whole answer only its end is seen: the seconds t after which it came, its tokens n, and the blocks p
    of its prompt that the worker had to compute. Over recent answers the two costs of

        t = a p + b n        a: seconds per block of a prompt,  b: seconds per token of an answer

    are the least squares' (normal equations), older answers fading. Waiting is in both, as it is for the next
    one. Where that has no solution with a and b above 0 (one answer, or all alike), all of the time is taken
    for decoding: a = 0, b = sum of t n / sum of n n. An answer is not taken to be longer than the average.
    """

    def __init__(self) -> None:
        self._answers = self._tokens = 0.0
        self._pp = self._pn = self._nn = self._pt = self._nt = 0.0

    def observe(self, blocks: int, tokens: int, seconds: float) -> None:
        """Note an answer of that many tokens, before which those blocks were computed."""
        if tokens > 0:
            self._answers = FADE * self._answers + 1
            self._tokens = FADE * self._tokens + tokens
            self._pp = FADE * self._pp + blocks * blocks
            self._pn = FADE * self._pn + blocks * tokens
            self._nn = FADE * self._nn + tokens * tokens
            self._pt = FADE * self._pt + blocks * seconds
            self._nt = FADE * self._nt + tokens * seconds

    def estimate_tokens(self, blocks: int, seconds: float) -> int:
        """Return the tokens that an answer with so many blocks to compute has after ``seconds``.

        0: not known.
        """
        if not self._answers:
            return 0
        per_block_s, per_token_s = self._costs()
        if per_token_s <= 0:
            return 0
        longest = self._tokens / self._answers
        return int(min(max(0.0, seconds - per_block_s * blocks) / per_token_s, longest))

    def _costs(self) -> tuple[float, float]:
        determinant = self._pp * self._nn - self._pn * self._pn
        if determinant > NEARLY_ALIKE * self._pp * self._nn:
            per_block_s = (self._pt * self._nn - self._nt * self._pn) / determinant
            per_token_s = (self._nt * self._pp - self._pt * self._pn) / determinant
            if per_block_s > 0 and per_token_s > 0:
                return per_block_s, per_token_s
        return 0.0, self._nt / self._nn
