"""Tasks whose end no caller waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

PATIENCE_S = 2.0
"""Time for which ``close`` lets unfinished tasks run before it cancels them."""


class Background:
    """Runs coroutines as tasks and keeps them alive. They must handle their own errors."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Start the coroutine as a task."""
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Wait for all tasks, at most ``PATIENCE_S``, and cancel the rest."""
        if not self._tasks:
            return
        _, late = await asyncio.wait(self._tasks, timeout=PATIENCE_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)
