"""An event loop whose time is virtual, and processes in it that can be killed and stopped.

A process is what runs in its context: the tasks, callbacks and timers that it has begun. kill -9: nothing of
it runs any more, no ``finally`` either. SIGSTOP: what is due is kept, and runs at SIGCONT, as in a process
whose loop stood still; a timer that was cancelled meanwhile does not.
"""

from __future__ import annotations

import asyncio
import contextvars
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

PROCESS: contextvars.ContextVar[Process | None] = contextvars.ContextVar("PROCESS", default=None)
BEGIN_S = 1000.0


class Deadlock(Exception):
    """Nothing is due, now or later: everything waits for something that never comes."""


class Process:
    """One simulated process; ``ends`` are told when it is gone, however it went."""

    def __init__(self, loop: VirtualLoop, pid: int, name: str) -> None:
        self.pid = pid
        self.name = name
        self.gpus: tuple[str, ...] = ()
        self.is_dead = False
        self.is_frozen = False
        self.died_s = 0.0
        self.thawed_s = 0.0
        self.ends: list[Callable[[], Any]] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self._is_ghost = False
        self._loop = loop
        self._parked: list[tuple[list[Any], Callable[..., Any], Any, contextvars.Context]] = []
        self.context = contextvars.copy_context()
        self.context.run(PROCESS.set, self)

    def post(self, callback: Callable[..., Any], *arguments: Any) -> None:
        """Call back in this process, as soon as it runs."""
        self._loop.call_soon(callback, *arguments, context=self.context)

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run the coroutine as this process's main."""
        self.context.run(self._loop.create_task, work)

    def step(
        self, handle: list[Any], context: contextvars.Context, callback: Callable[..., Any], arguments: Any
    ) -> None:
        """Run what is due, unless the process is dead or stopped."""
        if self._is_ghost or not (self.is_frozen or self.is_dead):
            callback(*arguments)
        else:
            self._parked.append((handle, callback, arguments, context))

    def freeze(self) -> None:
        self.is_frozen = True

    def thaw(self) -> None:
        self.is_frozen, self.thawed_s = False, self._loop.time()
        if not self.is_dead:
            self._run_parked()

    def _run_parked(self) -> None:
        parked, self._parked = self._parked, []
        for handle, callback, arguments, context in parked:
            self._loop.call_soon(self._run_late, handle, callback, arguments, context=context)

    @staticmethod
    def _run_late(handle: list[Any], callback: Callable[..., Any], arguments: Any) -> None:
        """Run what was parked, unless it was cancelled since, by what was parked before it maybe."""
        if not handle[0].cancelled():
            callback(*arguments)

    def end(self) -> None:
        """It is gone, by kill -9 or by its own exit; the second time nothing happens."""
        if self.is_dead:
            return
        self.is_dead, self.is_frozen = True, False
        self.died_s = self._loop.time()
        for told in self.ends:
            told()

    async def bury(self) -> None:
        """Unwind its tasks when all is over, so that no coroutine is left; its lines are dead."""
        self._is_ghost = True
        self._run_parked()
        while tasks := self._unfinished():
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=1.0)

    def _unfinished(self) -> set[asyncio.Task[Any]]:
        """Its tasks that are not done; from Python 3.12 on aiohttp begins some eagerly, past the loop."""
        owned = {task for task in self.tasks if not task.done()}
        if not hasattr(asyncio.Task, "get_context"):  # Python 3.11, where none is eager
            return owned
        return owned | {task for task in asyncio.all_tasks() if task.get_context().get(PROCESS) is self}


class _NoFiles(selectors.SelectSelector):
    """Waits for nothing but time, which it moves on."""

    def __init__(self) -> None:
        super().__init__()
        self.loop: VirtualLoop | None = None

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Deadlock
        if timeout > 0:
            assert self.loop
            self.loop.now_s += timeout
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time passes only when nothing is due, and then at once. ``network`` makes its connections."""

    def __init__(self, connect: Callable[..., Coroutine[Any, Any, Any]]) -> None:
        selector = _NoFiles()
        super().__init__(selector)
        selector.loop = self
        self.now_s = BEGIN_S
        self._connect_in_memory = connect
        self.faults: list[str] = []
        self.set_task_factory(_owned_task)
        self.set_exception_handler(self._note_fault)

    def time(self) -> float:
        return self.now_s

    def call_soon(self, callback: Any, *args: Any, context: Any = None) -> Any:
        context = context or contextvars.copy_context()
        process = context.get(PROCESS)
        if process is None:
            return super().call_soon(callback, *args, context=context)
        holder: list[Any] = []
        handle = super().call_soon(process.step, holder, context, callback, args, context=context)
        holder.append(handle)
        return handle

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        context = context or contextvars.copy_context()
        process = context.get(PROCESS)
        if process is None:
            return super().call_at(when, callback, *args, context=context)
        holder: list[Any] = []
        handle = super().call_at(when, process.step, holder, context, callback, args, context=context)
        holder.append(handle)
        return handle

    async def create_connection(self, protocol_factory: Any, *args: Any, **options: Any) -> Any:
        return await self._connect_in_memory(protocol_factory, *args, **options)

    def _note_fault(self, loop: Any, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.faults.append(f"{context.get('message')}: {error!r}")


def _owned_task(loop: Any, work: Any, context: Any = None, **named: Any) -> asyncio.Task[Any]:
    task = asyncio.Task(work, loop=loop, context=context, **named)
    process = PROCESS.get()
    if process:
        process.tasks.append(task)
        if len(process.tasks) > 200:
            process.tasks = [each for each in process.tasks if not each.done()]
    return task
