"""The memory of the fleet's GPUs: which GPU is really free, whatever its last worker or others do with it.

A driver takes back the memory of a dead process in its own time, for seconds after the process is gone. So a
GPU counts as free when it was seen empty after its last worker had gone. The driver is asked in a thread,
since it may hang with a broken GPU; when no answer comes the GPUs count as free, as their claims say.
"""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

from dynaplan.fleet.gpus import Gpu, GpuUse
from dynaplan.fleet.rules.busy_gpus import busy_gpus
from dynaplan.graph.lifecycle import Worker
from dynaplan.util.clock import Clock

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
"""Longest time between two looks at the memory, in seconds."""

ANSWER_WITHIN_S = 10.0
"""Time after which a driver that does not answer is not waited for, in seconds."""

BEING_FREED_S = 30.0
"""Time for which memory that is still in use after a worker's end is thought to be that worker's."""

NEVER_S = -math.inf
NOT_SEEN = "its memory has not been looked at since its last worker ended"


class GpuMemory:
    """Follows the memory in use. ``read`` blocks; ``wake`` is set when a GPU became free or busy."""

    def __init__(
        self,
        gpus: Sequence[Gpu],
        read: Callable[[], Mapping[int, GpuUse]],
        clock: Clock,
        wake: asyncio.Event,
    ) -> None:
        self._gpus = gpus
        self._read = read
        self._clock = clock
        self._wake = wake
        self._look = threading.Event()
        self._busy: Mapping[int, str] = {}
        self._seen_at_s = NEVER_S
        self._is_silent = False
        self._asked_since_s: float | None = None
        self._held_at_s: dict[int, float] = {}

    async def run(self) -> None:
        """Look again and again, for ever; at once when somebody waits for it."""
        loop, is_over = asyncio.get_running_loop(), threading.Event()

        def look_on() -> None:
            while not is_over.is_set():
                self._look.clear()
                self._look_once(loop)
                self._look.wait(LOOK_EVERY_S)

        # Not asyncio's threads, for which a process waits at its end. A look that brings no news stays in it:
        # to wake the loop once a second would cost more than the look.
        threading.Thread(target=look_on, name="GPU memory", daemon=True).start()
        try:
            await loop.create_future()
        finally:
            is_over.set()
            self._look.set()

    async def look(self) -> None:
        """Read the memory once. A driver that does not answer is asked again when it has answered this."""
        await asyncio.to_thread(self._look_once, asyncio.get_running_loop())

    def _look_once(self, loop: asyncio.AbstractEventLoop) -> None:
        began_s = self._clock.now_s()
        try:
            busy = busy_gpus(self._gpus, self._read())
        except Exception:  # else nobody would ever look again
            log.exception("the memory of GPUs was not read")
            return
        if self._asked_since_s is None and busy.keys() == self._busy.keys():
            self._busy, self._seen_at_s = busy, began_s
            return
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(self._learn, busy, began_s)

    def _learn(self, busy: Mapping[int, str], began_s: float) -> None:
        self._busy, self._seen_at_s, self._asked_since_s, self._is_silent = busy, began_s, None, False
        self._wake.set()

    def busy(self, fleet: Iterable[Worker]) -> dict[int, str]:
        """Return the GPUs that cannot be handed on now: index -> why. A running worker's own are left out.

        A GPU that has not been looked at since it was last held is among them, and is looked at as soon as
        may be.
        """
        now_s = self._clock.now_s()
        held = {index for worker in fleet if worker.pid for index in worker.gpus}
        self._held_at_s |= dict.fromkeys(held, now_s)
        busy = {index: why for index, why in self._busy.items() if index not in held}
        unseen = [
            gpu.index
            for gpu in self._gpus
            if gpu.index not in held and self._held_at_s.get(gpu.index, NEVER_S) >= self._seen_at_s
        ]
        if not unseen:
            return busy
        if self._asked_since_s is None:
            self._asked_since_s = now_s
            self._look.set()
        if now_s - self._asked_since_s < ANSWER_WITHIN_S:
            return {**dict.fromkeys(unseen, NOT_SEEN), **busy}
        if not self._is_silent:
            self._is_silent = True
            log.warning("the driver does not tell the memory of GPUs: they count as free")
        return {}

    def is_being_freed(self, index: int) -> bool:
        """Tell whether a worker of this fleet held the GPU until a moment ago."""
        return self._clock.now_s() - self._held_at_s.get(index, NEVER_S) < BEING_FREED_S
