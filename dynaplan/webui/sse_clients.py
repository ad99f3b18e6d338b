"""The SSE clients of a frontend, which are its open pages, and the one process that polls for all of them.

The process is a helper (``dynaplan.process.helper``). It runs while a page is open and a little longer, so
that reloading a page costs nothing. It is asked with ``{"charts": [[span_s, width], ...]}``, the charts that
are shown, whenever these change and every ``FEED_POLL_S`` seconds. The answer is ``{"events": [[name, text],
...]}``, or ``{"error": ...}`` when the deployment cannot be read. A page gets the newest event of each name;
a page that reads slowly misses older ones.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import suppress
from typing import Any, Protocol

from dynaplan.process.helper import HelperFailed, HelperTimeout
from dynaplan.webui.charts import ChartsRequest

log = logging.getLogger(__name__)

LINGER_S = 20.0
"""Seconds for which the process runs on after the last page was closed."""

RETRY_S = 3.0
"""Seconds after which a process that ended, or could not read the deployment, is started again."""

FEED_POLL_S = 3.0
"""Seconds between two questions."""

MAX_CLIENTS = 32
"""The number of pages that may be open at one frontend."""

TROUBLE = "trouble"
"""The event with the reason why there are no others; empty when all is well again."""


class Feed(Protocol):
    """The process that polls the deployment; a ``HelperProcess``."""

    async def ask(self, question: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Return the answer; raises HelperFailed."""

    async def end(self) -> None:
        """End the process; the next question starts another one."""


class SseClients:
    """All open pages of one frontend; ``close`` ends them and the process."""

    def __init__(self, feed: Feed, linger_s: float = LINGER_S, retry_s: float = RETRY_S) -> None:
        self._feed = feed
        self._linger_s, self._retry_s = linger_s, retry_s
        self._clients: dict[_SseClient, ChartsRequest] = {}
        self._newest: dict[str, str] = {}
        self._polling: asyncio.Task[None] | None = None
        self._charts_changed = asyncio.Event()
        self._linger_timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def is_full(self) -> bool:
        """True when no further page may be opened."""
        return len(self._clients) >= MAX_CLIENTS

    async def watch(self, asked: ChartsRequest) -> AsyncGenerator[tuple[str, str]]:
        """Yield events as name and text: first the newest of each name, then new ones, until ``close``."""
        client = _SseClient({name: text for name, text in self._newest.items() if _is_for(name, asked)})
        self._clients[client] = asked
        self._update_polling()
        try:
            while not self._is_closed:
                for name, text in await client.take():
                    yield name, text
        finally:
            del self._clients[client]
            self._update_polling()

    def charts(self, asked: ChartsRequest) -> str | None:
        """Return the newest drawing of these charts; None while there is none."""
        return self._newest.get(asked.name)

    async def close(self) -> None:
        """End the process, and what ``watch`` yields."""
        self._is_closed = True
        for client in self._clients:
            client.wake()
        if self._linger_timer:
            self._linger_timer.cancel()
        self._stop()
        if self._polling:
            await asyncio.gather(self._polling, return_exceptions=True)

    # -- the process -----------------------------------------------------------------------------

    def _update_polling(self) -> None:
        """Poll from the first page on, at once when other charts are shown; stop after the last page."""
        if self._linger_timer:
            self._linger_timer.cancel()
            self._linger_timer = None
        if self._is_closed:
            return
        if self._clients and (self._polling is None or self._polling.done()):
            self._polling = asyncio.create_task(self._poll(), name="page feed")
            self._polling.add_done_callback(lambda _: self._resume_polling())
        if self._clients:
            self._charts_changed.set()
        else:
            self._linger_timer = asyncio.get_running_loop().call_later(self._linger_s, self._stop)

    def _resume_polling(self) -> None:
        """Poll for a page that was opened while the last poll was being cancelled."""
        if self._clients and not self._is_closed:
            self._update_polling()

    def _stop(self) -> None:
        if self._polling:
            self._polling.cancel()

    async def _poll(self) -> None:
        """Ask, and pass the events on, until this is cancelled."""
        try:
            while True:
                self._charts_changed.clear()
                trouble = await self._ask()
                if trouble:
                    self._publish(TROUBLE, json.dumps(trouble))
                    await self._feed.end()
                    await asyncio.sleep(self._retry_s)
                    continue
                if self._newest.get(TROUBLE, '""') != '""':
                    self._publish(TROUBLE, '""')
                with suppress(TimeoutError):
                    async with asyncio.timeout(FEED_POLL_S):  # wait_for may lose a cancellation
                        await self._charts_changed.wait()
        finally:
            self._newest.clear()
            await self._feed.end()

    async def _ask(self) -> str:
        """Get new events from the poller once, and publish them; return "", or the error."""
        shown = sorted({(each.span_s, each.width) for each in self._clients.values()})
        try:
            answer, _ = await self._feed.ask({"charts": shown})
        except HelperTimeout:
            return "The process that polls the deployment does not answer."
        except HelperFailed:
            return "The process that polls the deployment has ended."
        for name, text in answer.get("events", ()):
            self._publish(name, text)
        return str(answer.get("error", ""))

    def _publish(self, name: str, text: str) -> None:
        self._newest[name] = text
        for client, asked in self._clients.items():
            if _is_for(name, asked):
                client.put(name, text)


class _SseClient:
    """One open page: the newest events that it has not got yet."""

    def __init__(self, pending: dict[str, str]) -> None:
        self._pending = pending
        self._wake = asyncio.Event()
        if pending:
            self._wake.set()

    def put(self, name: str, text: str) -> None:
        self._pending.pop(name, None)
        self._pending[name] = text
        self._wake.set()

    def wake(self) -> None:
        self._wake.set()

    async def take(self) -> list[tuple[str, str]]:
        """Wait for events, and return the pending ones; [] when woken without any."""
        await self._wake.wait()
        self._wake.clear()
        taken, self._pending = list(self._pending.items()), {}
        return taken


def _is_for(name: str, asked: ChartsRequest) -> bool:
    """Return whether a page with these charts gets the event: a drawing is for pages that show it."""
    return not name.startswith("charts-") or name == asked.name
