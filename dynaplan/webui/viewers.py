"""The open pages of a frontend, and the one process that looks at the deployment for all of them.

The process runs while a page is open and a little longer, so that reloading a page costs nothing. It writes a
line for each event, ``NAME TAB TEXT``, and reads lines that say which charts are shown: JSON lists of
``[span_s, width]``. It ends when its input does, so it cannot outlive the frontend. A page gets the newest
event of each name; a page that reads slowly misses older ones.
"""

from __future__ import annotations

import asyncio
import json
import logging
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress

from dynaplan.process.helper_process import end_helper
from dynaplan.webui.live_charts import ChartsAsked

log = logging.getLogger(__name__)

LINGER_S = 20.0
"""Seconds for which the process goes on when the last page was closed."""

AGAIN_S = 3.0
"""Seconds after which a process that ended by itself is started again."""

LONGEST_LINE = 1 << 24
"""The most bytes of one event."""

MOST_VIEWERS = 32
"""The number of pages that may be open at one frontend."""

TROUBLE = "trouble"
"""The event that says why there are no others; empty when all is well again."""

Start = Callable[[], Awaitable[Process]]
"""Starts the process, with pipes for its input and its output."""


class Viewers:
    """All open pages of one frontend; ``close`` ends them and the process."""

    def __init__(self, start: Start, linger_s: float = LINGER_S, again_s: float = AGAIN_S) -> None:
        self._start = start
        self._linger_s, self._again_s = linger_s, again_s
        self._viewers: dict[_Viewer, ChartsAsked] = {}
        self._newest: dict[str, str] = {}
        self._process: Process | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._leaving: asyncio.TimerHandle | None = None
        self._is_closed = False

    @property
    def is_full(self) -> bool:
        """True while the page is open as often as it may be."""
        return len(self._viewers) >= MOST_VIEWERS

    async def watch(self, asked: ChartsAsked) -> AsyncGenerator[tuple[str, str]]:
        """Yield the events, name and text, from the newest of each on; end when this is closed."""
        viewer = _Viewer({name: text for name, text in self._newest.items() if _is_for(name, asked)})
        self._viewers[viewer] = asked
        self._wanted()
        try:
            while not self._is_closed:
                for name, text in await viewer.taken():
                    yield name, text
        finally:
            del self._viewers[viewer]
            self._wanted()

    def charts(self, asked: ChartsAsked) -> str | None:
        """Return the newest drawing of these charts; None while there is none."""
        return self._newest.get(asked.name)

    async def close(self) -> None:
        """End the process, and what ``watch`` yields."""
        self._is_closed = True
        for viewer in self._viewers:
            viewer.wake()
        if self._leaving:
            self._leaving.cancel()
        await self._end()

    # -- the process -----------------------------------------------------------------------------

    def _wanted(self) -> None:
        """Start the process for the first page, tell it which charts are shown; end it after the last one."""
        if self._leaving:
            self._leaving.cancel()
            self._leaving = None
        if self._is_closed:
            return
        if self._viewers and (self._keeper is None or self._keeper.done()):
            self._keeper = asyncio.create_task(self._keep(), name="page feed")
        if self._viewers:
            self._tell()
        else:
            self._leaving = asyncio.get_running_loop().call_later(self._linger_s, self._stop)

    def _stop(self) -> None:
        if self._keeper:
            self._keeper.cancel()

    async def _end(self) -> None:
        if self._keeper:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)

    async def _keep(self) -> None:
        """Keep one process running, until this is cancelled."""
        try:
            while True:
                self._process = await self._start()
                self._tell()
                try:
                    await self._pass_on(self._process)
                finally:
                    process, self._process = self._process, None
                    if process.stdin:
                        process.stdin.close()
                    await end_helper(process)
                self._give(TROUBLE, json.dumps("The process that looks at the deployment has ended."))
                await asyncio.sleep(self._again_s)
        finally:
            self._newest.clear()

    async def _pass_on(self, process: Process) -> None:
        assert process.stdout
        while line := await process.stdout.readline():
            name, _, text = line.decode(errors="replace").rstrip("\n").partition("\t")
            self._give(name, text)

    def _give(self, name: str, text: str) -> None:
        self._newest[name] = text
        for viewer, asked in self._viewers.items():
            if _is_for(name, asked):
                viewer.give(name, text)

    def _tell(self) -> None:
        """Write which charts are shown; nothing while no process runs."""
        if self._process and self._process.stdin:
            asked = sorted({(each.span_s, each.width) for each in self._viewers.values()})
            with suppress(ConnectionError, RuntimeError):
                self._process.stdin.write(json.dumps(asked).encode() + b"\n")


class _Viewer:
    """One open page: the newest events that it has not got yet."""

    def __init__(self, pending: dict[str, str]) -> None:
        self._pending = pending
        self._wake = asyncio.Event()
        if pending:
            self._wake.set()

    def give(self, name: str, text: str) -> None:
        self._pending.pop(name, None)
        self._pending[name] = text
        self._wake.set()

    def wake(self) -> None:
        self._wake.set()

    async def taken(self) -> list[tuple[str, str]]:
        """Wait for events and take them; nothing when only woken."""
        await self._wake.wait()
        self._wake.clear()
        taken, self._pending = list(self._pending.items()), {}
        return taken


def _is_for(name: str, asked: ChartsAsked) -> bool:
    """Tell whether a page with these charts gets the event: a drawing is for pages that show it."""
    return not name.startswith("charts-") or name == asked.name
