"""Watches one engine: its load, and whether it still does anything."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping

from dynaplan.engines.server.metrics import EngineMetrics
from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.util.clock import Clock
from dynaplan.util.errors import TemporaryError

log = logging.getLogger(__name__)

METRICS_POLL_S = 1.0
"""Seconds between two readings."""

METRICS_TIMEOUT_S = 5.0
"""Seconds that one reading may take."""

MAX_STEP_S = METRICS_POLL_S + METRICS_TIMEOUT_S + 2.0
"""Seconds that one poll adds at most to the time without progress.

More time passes between two polls only when this process itself stood still.
"""


class EngineWatchdog:
    """Reads an engine's signals once a second, from ``start`` to ``stop``.

    ``read`` asks the engine; any exception means that the engine did not answer. The engine is hung when for
    ``hang_timeout_s`` seconds it has not answered, or has had requests while no progress counter moved; 0
    means never. Where it ``waits_for_others``, for KV entries that another engine computes or fetches,
    requests that only wait do not count. ``request_slots`` goes into the load.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[EngineMetrics]],
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
        self._signals = EngineMetrics()
        self._last_progress: tuple[float, ...] = ()
        self._stuck_s = 0.0
        self._polled_s = clock.now_s()
        self._hung = asyncio.Event()
        self._logged_missing: set[str] = set()
        self._polling: asyncio.Task[None] | None = None

    @property
    def signals(self) -> EngineMetrics:
        """The last reading; all 0 before the first."""
        return self._signals

    def start(self) -> None:
        """Begin to poll; from now on the engine must answer."""
        self._stuck_s = 0.0
        self._polled_s = self._clock.now_s()
        if self._polling is None:
            self._polling = asyncio.create_task(self._poll_forever(), name="engine watch")

    def stop(self) -> None:
        """End polling: from now on the engine is not found to be hung."""
        if self._polling is not None:
            self._polling.cancel()
            self._polling = None

    def load(self) -> WorkerLoad:
        return self._signals.load(self._request_slots)

    def metrics(self) -> Mapping[str, float]:
        return self._signals.samples

    async def count_requests(self) -> int:
        """Count the engine's requests now, running and waiting; TemporaryError when it cannot be asked."""
        try:
            signals = await self._read_now()
        except Exception as error:
            raise TemporaryError(f"the engine does not tell its load: {_describe(error)}") from error
        return signals.running + signals.waiting

    async def wait_until_hung(self) -> str:
        """Wait until the engine is hung; returns the reason."""
        await self._hung.wait()
        return f"no progress and no idleness seen for {self._stuck_s:.0f} s (hang-timeout)"

    async def poll(self) -> None:
        try:
            signals = await self._read_now()
        except Exception as error:
            log.debug("the engine does not answer: %s", _describe(error))
            is_well = False
        else:
            has_moved = signals.progress != self._last_progress
            requests = signals.running + (0 if self._waits_for_others else signals.waiting)
            is_idle = requests == 0 or signals.is_asleep
            is_well = is_idle or has_moved or not signals.progress  # no counter: it cannot be judged
            self._last_progress = signals.progress
        self._add_stuck_time(is_well)

    def _add_stuck_time(self, is_well: bool) -> None:
        """Add the time since the last poll to the time without progress, which begins anew if all is well.

        Time in which this process did not run is not counted against the engine.
        """
        now_s = self._clock.now_s()
        step_s, self._polled_s = min(now_s - self._polled_s, MAX_STEP_S), now_s
        self._stuck_s = 0.0 if is_well else self._stuck_s + step_s
        if 0 < self._hang_timeout_s <= self._stuck_s:
            self._hung.set()

    async def _read_now(self) -> EngineMetrics:
        async with asyncio.timeout(METRICS_TIMEOUT_S):
            signals = await self._read()
        self._signals = signals
        self._log_missing(signals)
        return signals

    def _log_missing(self, signals: EngineMetrics) -> None:
        """Log each missing signal once, as soon as the engine has any."""
        is_silent = not signals.samples and not any(signals.progress) and not signals.running
        new = set() if is_silent else set(signals.missing) - self._logged_missing
        if new:
            self._logged_missing |= new
            log.warning("this engine version does not tell, so it counts as 0: %s", "; ".join(sorted(new)))

    async def _poll_forever(self) -> None:
        while True:
            await self.poll()
            await self._clock.sleep(METRICS_POLL_S)


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__
