"""The hand-offs that an engine holds until the decode side has taken them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

log = logging.getLogger(__name__)

HOLD_S = 60.0
"""Seconds after which a hand-off expires that is never released: its frontend has died."""


class HeldHandOffs:
    """The requests whose KV entries are held here until a decode worker has read them.

    ``let_go`` is called with the id of each request whose hold ends, by release or after ``hold_s``.
    """

    def __init__(self, let_go: Callable[[str], None] | None = None, hold_s: float = HOLD_S) -> None:
        self._let_go = let_go
        self._hold_s = hold_s
        self._held: dict[str, asyncio.TimerHandle] = {}
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self.expired = 0

    @property
    def held(self) -> int:
        return len(self._held)

    def hold(self, request_id: str) -> None:
        """Hold the request's KV entries for ``hold_s``; that begins anew when the queue delivers it again."""
        if request_id in self._held:
            self._held[request_id].cancel()
        self._held[request_id] = asyncio.get_running_loop().call_later(self._hold_s, self._expire, request_id)
        self._is_empty.clear()

    def release(self, request_id: str) -> None:
        """End the hold; nothing happens when there is none."""
        timer = self._held.pop(request_id, None)
        if timer is None:
            return
        timer.cancel()
        if not self._held:
            self._is_empty.set()
        if self._let_go is not None:
            self._let_go(request_id)

    def release_all(self) -> None:
        """End every hold, as if each had been taken: the engine may free their KV entries."""
        for request_id in list(self._held):
            self.release(request_id)

    async def wait_empty(self) -> None:
        """Wait, with no limit, until every hold was taken or has run out."""
        await self._is_empty.wait()

    def _expire(self, request_id: str) -> None:
        log.warning("nobody took the KV entries of %s within %g s; letting go", request_id, self._hold_s)
        self.expired += 1
        self.release(request_id)
