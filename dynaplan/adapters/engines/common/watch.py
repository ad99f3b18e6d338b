"""Watches one engine: its load, and whether it still does anything."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from dynaplan.adapters.engines.common.signals import Signals
from dynaplan.domain.errors import TemporaryError
from dynaplan.domain.worker_load import WorkerLoad
from dynaplan.ports import Clock

log = logging.getLogger(__name__)

POLL_S = 1.0
READ_TIMEOUT_S = 5.0
LONGEST_STEP_S = POLL_S + READ_TIMEOUT_S + 2.0
"""What one poll can add to the time without progress: more passes only while this process stands still."""


class EngineWatch:
    """Reads an engine's signals once a second, from ``start`` to ``stop``.

    ``read`` asks the engine now; whatever it raises means that the engine did not answer. An engine is hung
    when for ``hang_timeout_s`` it has had requests and no progress counter has moved, or it has not answered;
    0 means never. An idle engine is not hung, nor is a busy one. Where it ``waits_for_others``, for KV
    entries that another engine computes or fetches, requests that only wait are no sign. ``request_slots``
    goes into the load.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[Signals]],
        clock: Clock,
        hang_timeout_s: float,
        request_slots: int = 0,
        *,
        waits_for_others: bool = False,
    ) -> None:
        self._read = read
        self._clock = clock
        self._hang_timeout_s = hang_timeout_s
        self._request_slots = request_slots
        self._waits_for_others = waits_for_others
        self._signals = Signals()
        self._judged_progress: tuple[float, ...] = ()
        self._stuck_s = 0.0
        self._polled_s = clock.now_s()
        self._hung = asyncio.Event()
        self._told_missing: set[str] = set()
        self._polling: asyncio.Task[None] | None = None

    @property
    def signals(self) -> Signals:
        """The last reading; all 0 before the first."""
        return self._signals

    def start(self) -> None:
        """Begin to poll; from now on the engine is expected to answer."""
        self._stuck_s = 0.0
        self._polled_s = self._clock.now_s()
        if self._polling is None:
            self._polling = asyncio.create_task(self._poll_for_ever(), name="engine watch")

    async def stop(self) -> None:
        """End polling; nothing is found to be hung any more."""
        polling, self._polling = self._polling, None
        if polling is not None:
            polling.cancel()
            await asyncio.gather(polling, return_exceptions=True)

    def load(self) -> WorkerLoad:
        """The load at the last reading."""
        return self._signals.load(self._request_slots)

    def metrics(self) -> Mapping[str, float]:
        """The samples of the last reading, by the engine's own names."""
        return self._signals.samples

    async def requests(self) -> int:
        """How many requests the engine has now, running and waiting; TemporaryError when it does not tell."""
        try:
            signals = await self._fresh()
        except Exception as error:
            raise TemporaryError(f"the engine does not tell its load: {_words(error)}") from error
        return signals.running + signals.waiting

    async def hung(self) -> str:
        """Return when the engine is hung: why, in words; until then it does not return."""
        await self._hung.wait()
        return f"no progress and no idleness seen for {self._stuck_s:.0f} s (hang-timeout)"

    async def poll(self) -> None:
        """One reading, and what follows from it."""
        try:
            signals = await self._fresh()
        except Exception as error:
            log.debug("the engine does not answer: %s", _words(error))
            is_well = False
        else:
            has_moved = signals.progress != self._judged_progress
            requests = signals.running + (0 if self._waits_for_others else signals.waiting)
            is_well = requests == 0 or has_moved or not signals.progress  # none: it cannot be told
            self._judged_progress = signals.progress
        self._judge(is_well)

    def _judge(self, is_well: bool) -> None:
        """Time that this process did not run in is not the engine's: a step has a longest length."""
        now_s = self._clock.now_s()
        step_s, self._polled_s = min(now_s - self._polled_s, LONGEST_STEP_S), now_s
        self._stuck_s = 0.0 if is_well else self._stuck_s + step_s
        if 0 < self._hang_timeout_s <= self._stuck_s:
            self._hung.set()

    async def _fresh(self) -> Signals:
        async with asyncio.timeout(READ_TIMEOUT_S):
            signals = await self._read()
        self._signals = signals
        self._tell_missing(signals)
        return signals

    def _tell_missing(self, signals: Signals) -> None:
        """Once per signal, as soon as the engine tells anything."""
        is_silent = not signals.samples and not any(signals.progress) and not signals.running
        new = set() if is_silent else set(signals.missing) - self._told_missing
        if new:
            self._told_missing |= new
            log.warning("this engine version does not tell, so it counts as 0: %s", "; ".join(sorted(new)))

    async def _poll_for_ever(self) -> None:
        while True:
            await self.poll()
            await self._clock.sleep(POLL_S)


def _words(error: Exception) -> str:
    return str(error) or type(error).__name__
