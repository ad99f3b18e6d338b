"""Bookings of requests without a stream: they grow by an estimate, since the answer arrives whole.

A stream shows when its prompt is computed and how long its answer is. For a whole answer both are estimated
from the time that it has taken, at the pace of earlier ones (``booking.AnswerPace``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dynaplan.gateway import timing
from dynaplan.routing.booking import AnswerPace, BookEntry


@dataclass
class PendingAnswer:
    """One answer that is awaited since ``started_s``; its worker has ``blocks`` of the prompt to compute."""

    booking: BookEntry
    blocks: int
    started_s: float
    output_tokens: int = 0
    """The length of the answer, once it has arrived."""


class WholeAnswers:
    """Grows the bookings of one frontend's requests that do not stream, by an estimate, until they end.

    ``now_s`` is the loop's clock.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._pace = AnswerPace()
        self._waiting: dict[int, PendingAnswer] = {}
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def waiting(self, booking: BookEntry, *, is_prefilled: bool = False) -> Iterator[PendingAnswer]:
        """Have the booking grow while its answer is waited for, inside a ``with`` block.

        With ``is_prefilled`` the prompt is computed already. Set the answer's ``output_tokens`` before the
        block ends: later estimates learn from it.
        """
        blocks = 0 if is_prefilled else booking.prompt_blocks - booking.overlap_blocks
        if is_prefilled:
            booking.finish_prefill()
        waited_for = PendingAnswer(booking, blocks, self._now_s())
        if booking.block_tokens:
            self._waiting[id(waited_for)] = waited_for
            self._schedule()
        try:
            yield waited_for
            self._pace.observe(blocks, waited_for.output_tokens, self._now_s() - waited_for.started_s)
        finally:
            self._waiting.pop(id(waited_for), None)

    def update(self) -> None:
        """Estimate the tokens of each pending answer so far, and book them at its worker."""
        now_s = self._now_s()
        for each in self._waiting.values():
            tokens = self._pace.estimate_tokens(each.blocks, now_s - each.started_s)
            if tokens >= each.booking.grows_at_tokens:
                each.booking.finish_prefill()
                each.booking.record_decoded(tokens)

    def _schedule(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(timing.WHOLE_ANSWERS_POLL_S, self._poll)

    def _poll(self) -> None:
        self._timer = None
        if self._waiting:
            self.update()
            self._schedule()
