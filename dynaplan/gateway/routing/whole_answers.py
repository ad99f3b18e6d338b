"""Bookings of requests whose answers come whole: no token of them is seen, so they grow by an estimate.

A stream tells when its prompt is computed and how long its answer is. Of an answer that comes whole both are
estimated from the time that it has taken, at the pace of earlier ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dynaplan.gateway.routing.booking import AnswerPace, BookEntry

LOOK_EVERY_S = 0.25
"""Seconds between two looks at the answers on their way: some tokens of each."""


@dataclass
class WaitedFor:
    """One answer that is waited for since ``begun_s``; its worker has ``blocks`` of the prompt to compute."""

    booking: BookEntry
    blocks: int
    begun_s: float
    output_tokens: int = 0
    """The length of the answer, once it has come."""


class WholeAnswers:
    """The requests of one frontend whose whole answers are waited for. ``now_s`` is the loop's clock."""

    def __init__(self, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._pace = AnswerPace()
        self._waiting: dict[int, WaitedFor] = {}
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def waiting(self, booking: BookEntry, *, is_prefilled: bool = False) -> Iterator[WaitedFor]:
        """Have the booking grow while its answer is waited for, inside a ``with`` block.

        With ``is_prefilled`` the prompt is computed already. An answer's length is learnt from if it is set.
        """
        blocks = 0 if is_prefilled else booking.prompt_blocks - booking.overlap_blocks
        if is_prefilled:
            booking.prefilled()
        waited_for = WaitedFor(booking, blocks, self._now_s())
        if booking.block_tokens:
            self._waiting[id(waited_for)] = waited_for
            self._look_later()
        try:
            yield waited_for
            self._pace.ended(blocks, waited_for.output_tokens, self._now_s() - waited_for.begun_s)
        finally:
            self._waiting.pop(id(waited_for), None)

    def look(self) -> None:
        """Book what the answers have probably filled by now."""
        now_s = self._now_s()
        for each in self._waiting.values():
            tokens = self._pace.tokens_after(each.blocks, now_s - each.begun_s)
            if tokens >= each.booking.grows_at_tokens:
                each.booking.prefilled()
                each.booking.decoded(tokens)

    def _look_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_EVERY_S, self._look_on)

    def _look_on(self) -> None:
        self._timer = None
        if self._waiting:
            self.look()
            self._look_later()
