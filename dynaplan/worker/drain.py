"""Leaving without losing a request, and the proof of it in the log."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from dynaplan.store.registration import Registration
from dynaplan.worker.process import Finish, WorkerRuntime
from dynaplan.worker.server import WorkerServer

log = logging.getLogger(__name__)

LINGER_S = 0.25
"""Time for which an idle worker still answers "draining" to routers that have not yet heard of it."""

HOOKS_S = 10.0
"""Longest time for the shutdown hooks, deadline or not, in seconds."""

STOP_S = 40.0
"""Longest time for closing, an engine's own end above all, while the deadline leaves room for it."""

STOP_LEAST_S = 1.0
"""Longest time for closing when the deadline is over, or nothing was ever served."""

FAILED_STOP_S = 5.0
"""Longest time for closing after a failure."""

LOOK_S = 1.5
"""Longest time for counting the held requests."""

POLL_S = 0.05


@dataclass(frozen=True)
class Proof:
    """The fate of the requests that a worker held when it was told to leave."""

    held: int
    cut: int
    took_s: float
    why: str

    def __str__(self) -> str:
        return (
            f"drained: held {self.held} requests when told to leave, {self.held - self.cut} finished, "
            f"{self.cut} cut, in {self.took_s:.3f} s (because {self.why})"
        )


async def drain(
    runtime: WorkerRuntime,
    servers: Sequence[WorkerServer],
    registration: Registration,
    hooks: Sequence[Callable[[], Any]],
    deadline_s: float,
) -> Proof:
    """Refuse new work, deregister, finish the held requests, run the shutdown hooks.

    A router that has not heard of the deregistration yet is refused with a status that makes it try another
    worker. At the deadline the remaining requests are cut, counted and logged. A failure of the worker itself
    ends the waiting too.
    """
    begun_s = runtime.clock.now_s()
    runtime.is_draining = True
    for server in servers:
        await server.drain()
    await _within(LOOK_S, runtime.look())
    held = _held(runtime, servers)
    log.info("draining: %d requests held (because %s)", held, runtime.told_to_leave.result())
    await registration.deregister()
    await _within(deadline_s, _finish(runtime, servers), runtime.failed)
    cut = _held(runtime, servers)
    await _within(HOOKS_S, _call_each(hooks))
    has_time = runtime.ready.is_set() and not runtime.is_hurried
    left_s = begun_s + deadline_s - runtime.clock.now_s() if has_time else 0.0
    await close(runtime, min(max(left_s, STOP_LEAST_S), STOP_S))
    # What came before everybody had heard of the deregistration was held too.
    proof = Proof(max(held, cut), cut, runtime.clock.now_s() - begun_s, runtime.told_to_leave.result())
    log.log(logging.WARNING if cut else logging.INFO, "%s", proof)
    return proof


async def close(runtime: WorkerRuntime, seconds: float) -> None:
    """Await what ``on_stop`` was told, all at once and each only once, no longer than that."""
    closers, runtime.closers = runtime.closers, []
    await _within(seconds, _call_all(closers))


def _held(runtime: WorkerRuntime, servers: Sequence[WorkerServer]) -> int:
    return runtime.held + sum(server.in_flight.count for server in servers)


async def _finish(runtime: WorkerRuntime, servers: Sequence[WorkerServer]) -> None:
    linger = asyncio.ensure_future(runtime.clock.sleep(LINGER_S))
    try:
        await _call_all(runtime.finishers)
        await linger
        for server in servers:
            await server.in_flight.wait_idle()
        while runtime.held:
            await runtime.clock.sleep(POLL_S)
    finally:
        linger.cancel()


async def _within(
    seconds: float, work: Coroutine[Any, Any, None], stop: asyncio.Future[Any] | None = None
) -> None:
    """Await the work, but no longer than that, and only until ``stop``."""
    task = asyncio.create_task(work)
    waited_for = {task, stop} if stop else {task}
    done, _ = await asyncio.wait(waited_for, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    if not done:
        log.error("not done within %g s: going on without", seconds)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _call_each(hooks: Sequence[Callable[[], Any]]) -> None:
    for hook in hooks:
        await _logged(hook)


async def _call_all(hooks: Sequence[Finish]) -> None:
    await asyncio.gather(*map(_logged, hooks))


async def _logged(hook: Finish | Callable[[], Any]) -> None:
    """Call the hook, sync or async; leaving goes on whatever it raises."""
    try:
        result = hook()
        if inspect.isawaitable(result):
            await result
    except Exception:
        log.exception("%s failed while leaving", getattr(hook, "__qualname__", hook))
