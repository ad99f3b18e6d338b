"""A call that may hang, as one of a broken GPU's driver does, without hanging who makes it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


class BlockingCall(Generic[T]):
    """Makes a call in a thread, one at a time.

    Not in asyncio's pool of threads: a call that hangs would occupy one of these few, and the process could
    not end.
    """

    def __init__(self, call: Callable[[], T], default: T) -> None:
        self._call = call
        self._last = default
        self._ended: asyncio.Future[None] | None = None

    async def latest_value(self, timeout_s: float) -> T:
        """Wait for the call that goes on, or for a new one, and return its value.

        If it fails, or takes longer than ``timeout_s``: the value of the last one that succeeded,
        however late, at first ``default``.
        """
        if self._ended is None or self._ended.done():
            loop = asyncio.get_running_loop()
            self._ended = loop.create_future()
            threading.Thread(target=self._run, args=(loop, self._ended), daemon=True).start()
        await asyncio.wait({self._ended}, timeout=timeout_s)
        return self._last

    def _run(self, loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None]) -> None:
        try:
            self._last = self._call()
        except Exception:
            log.exception("a call failed")
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(ended.set_result, None)
