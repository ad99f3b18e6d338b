"""Background tasks: their owner holds them, hears of their errors, and ends them.

The event loop does none of the three: it keeps a weak reference to a task, and logs an exception in it only
when the task is collected.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

log = logging.getLogger(__name__)


def log_failure(task: asyncio.Task[Any], error: BaseException) -> None:
    log.error("%s failed", task.get_name(), exc_info=error)


class BackgroundTasks:
    """The tasks that an object has started and nobody awaits.

    ``failed(task, error)`` is called when one of them ends with an exception. A cancellation is no failure.
    """

    def __init__(self, failed: Callable[[asyncio.Task[Any], BaseException], None] = log_failure) -> None:
        self._failed = failed
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str | None = None) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def finish(self, within_s: float | None = None) -> None:
        """Wait for all of them, also for tasks started meanwhile; cancel the late ones after that time."""
        loop = asyncio.get_running_loop()
        deadline_s = None if within_s is None else loop.time() + within_s
        while self._tasks:
            left_s = None if deadline_s is None else max(0.0, deadline_s - loop.time())
            await asyncio.wait(set(self._tasks), timeout=left_s)
            if deadline_s is not None and loop.time() >= deadline_s:
                break
        await self.cancel()

    async def cancel(self) -> None:
        """Cancel all of them and wait until they have ended."""
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if error:
            self._failed(task, error)
