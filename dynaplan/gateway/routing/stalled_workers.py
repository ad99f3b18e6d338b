"""Workers that stand still: alive to the machine, with requests in flight, and nothing comes of any of them.

A stopped process (SIGSTOP, a debugger, a swapped-out or wedged engine) keeps its port open: the kernel
takes new connections for it, and whoever sends a request there waits until the deployment ends the worker. A
frontend knows earlier, by what it reads anyhow:

1. **Silent.** Connections to a worker are in use, and for ``STALL_SILENT_S`` nothing was read from any of
   them. That alone means little: a long prompt takes as long, and so does an answer that is not streamed.
2. **Asked.** So its server is asked for ``/health``. A busy engine answers that beside its work, and what it
   answers does not matter: it counts as read, and the worker is asked again when it stays silent.
3. **Stalled.** No answer within ``STALL_HEALTH_S``, while another worker of the same component is not
   stalled. It is not chosen any more; who waits there for a first token is sent elsewhere, which is no death
   of that request; streams that another worker can go on with move there when ``migration-stall`` is over.
   Streams that cannot move wait for the worker, or for its end.
4. **Back.** A stalled worker is asked again and again. Whatever it answers ends the stall.

Not judged: programs that are no known engine, which may serve one request at a time and nothing beside it; an
engine whose server answers while its scheduler hangs, which the worker finds by the engine's own counters.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Sequence

from dynaplan.gateway import timing
from dynaplan.gateway.routing.sleeping_workers import SleepingWorkers
from dynaplan.gateway.upstream import Upstream
from dynaplan.http.connections import Origin, target_of
from dynaplan.store.instances import Instance

log = logging.getLogger(__name__)

Peers = Sequence[Collection[Instance]]
"""The instances by component: workers of one group can take each other's requests."""


class StalledWorkers:
    """Finds the workers that stand still; ``ids`` are their instance ids."""

    def __init__(self, upstream: Upstream, sleeping: SleepingWorkers, migration_stall_s: float) -> None:
        self._upstream = upstream
        self._sleeping = sleeping
        self._migration_stall_s = migration_stall_s
        self._now_s = asyncio.get_running_loop().time
        self._silent_since_s: dict[Origin, float] = {}
        self._asked: set[asyncio.Task[None]] = set()
        self._asked_ids: set[int] = set()
        self._stalled_at_s: dict[int, float] = {}
        self.ids: frozenset[int] = frozenset()

    async def watch(self, peers: Callable[[], Peers], is_judged: Callable[[Instance], bool]) -> None:
        """Look for ever at the instances that ``peers`` returns and ``is_judged`` takes.

        Twice a second, while a worker owes an answer or is stalled.
        """
        try:
            while True:
                if not (self._silent_since_s or self.ids):
                    await self._upstream.wait_for_use()
                await asyncio.sleep(timing.STALL_LOOK_S)
                self.look([[each for each in group if is_judged(each)] for group in peers()])
        finally:
            for task in self._asked:
                task.cancel()

    def look(self, peers: Peers) -> None:
        """Ask workers that have long been silent; break off movable streams of those stalled too long."""
        now_s = self._now_s()
        since_s = self._silent_since_s
        silent = self._upstream.silent_origins()
        self._silent_since_s = {origin: since_s.get(origin, now_s) for origin in silent}
        if not (silent or self.ids):
            return
        for group in peers:
            for each in group:
                self._judge(each, group, now_s)
        for gone in self.ids.difference(each.instance_id for group in peers for each in group):
            self._end_stall(gone, f"the stalled instance {gone:x} has left")

    def _judge(self, instance: Instance, group: Collection[Instance], now_s: float) -> None:
        identity, origin = instance.instance_id, target_of(instance.openai_url).origin
        stalled_at_s = self._stalled_at_s.get(identity)
        if stalled_at_s is None:
            is_silent = now_s - self._silent_since_s.get(origin, now_s) >= timing.STALL_SILENT_S
            if not (is_silent and self._has_other(instance, group)):
                return
        elif now_s - stalled_at_s >= self._migration_stall_s and self._has_other(instance, group):
            self._upstream.break_off_movable(origin, "its worker stands still")
        if identity not in self._asked_ids:
            self._asked_ids.add(identity)
            task = asyncio.create_task(self._ask(instance, group))
            self._asked.add(task)
            task.add_done_callback(self._asked.discard)

    def _has_other(self, instance: Instance, group: Collection[Instance]) -> bool:
        """Return whether another worker could take its requests."""
        return any(each.instance_id not in self.ids for each in group if each is not instance)

    async def _ask(self, instance: Instance, group: Collection[Instance]) -> None:
        identity, origin = instance.instance_id, target_of(instance.openai_url).origin
        try:
            is_answering = await self._upstream.is_answering(instance.openai_url, timing.STALL_HEALTH_S)
        finally:
            self._asked_ids.discard(identity)
        if is_answering:
            self._end_stall(identity, f"{instance.worker} answers again")
        elif identity not in self.ids and origin in self._silent_since_s and self._has_other(instance, group):
            self._begin_stall(instance)

    def _begin_stall(self, instance: Instance) -> None:
        identity = instance.instance_id
        log.warning(
            "%s stands still: it has requests, answers none of them, and does not answer /health in %g s; "
            "it gets no more until it answers",
            instance.worker,
            timing.STALL_HEALTH_S,
        )
        self._stalled_at_s[identity] = self._now_s()
        self.ids = frozenset(self._stalled_at_s)
        self._sleeping.break_off(frozenset((identity,)), "its worker stands still")

    def _end_stall(self, identity: int, message: str) -> None:
        if self._stalled_at_s.pop(identity, None) is not None:
            log.warning("%s", message)
            self.ids = frozenset(self._stalled_at_s)
