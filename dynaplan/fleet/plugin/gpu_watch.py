"""Watches the health of the deployment's GPUs, and keeps the standings of those that are ill."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from dynaplan.contract.gpu_standing import SET_APART, GpuStandings
from dynaplan.contract.gpus import GpuHealth
from dynaplan.fleet.rules.gpu_health import HealthJudge, changes, judged
from dynaplan.graph.lifecycle import Role, Worker
from dynaplan.util.blocking_call import BlockingCall
from dynaplan.util.clock import Clock

if TYPE_CHECKING:
    from dynaplan.fleet.plugin.document import Statefile
    from dynaplan.fleet.plugin.ports import Terminal
    from dynaplan.fleet.plugin.store_link import StoreLink

log = logging.getLogger(__name__)

HEALTH_POLL_S = 2.0
"""Seconds between two readings; a driver that does not answer is waited for, and the last one counts."""

DRIVER_TIMEOUT_S = 10.0


class GpuWatch:
    """Watches the GPUs' health, and sets ill ones apart; ``apart`` is index -> why, as of the last ``judge``.

    ``read`` returns the health, and may block. Which GPUs are apart is kept in the store and the statefile:
    a person may change it, and it outlives this process. ``capped`` returns the GPUs whose power dynaplan
    has limited: their low clock is no symptom.
    """

    def __init__(
        self,
        read: Callable[[], Mapping[int, GpuHealth]],
        clock: Clock,
        capped: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self._reading = BlockingCall[Mapping[int, GpuHealth]](read, {})
        self._readings: Mapping[int, GpuHealth] = {}
        self._clock = clock
        self._capped = capped
        self._judge = HealthJudge()
        self._known: GpuStandings | None = None
        self.events: tuple[str, ...] = ()

    async def run(self, wake: asyncio.Event) -> None:
        """Read the health for ever; wake the reconciler when it has changed."""
        while True:
            readings = await self._reading.latest_value(DRIVER_TIMEOUT_S)
            if readings != self._readings:
                self._readings = readings
                wake.set()
            await self._clock.sleep(HEALTH_POLL_S)

    def note_ends(self, before: Iterable[Worker], after: Mapping[str, Worker]) -> None:
        """Remember engines that have ended unasked."""
        self._judge.note_ends(before, after, self._clock.now_s())

    def judge(
        self,
        fleet: Collection[Worker],
        usable: Collection[int],
        statefile: Statefile,
        link: StoreLink,
        terminal: Terminal,
    ) -> dict[int, str]:
        """Decide which GPUs are set apart now, write it down, and report it; index -> why."""
        text = statefile.planner_keys.get(SET_APART, "")
        try:
            before = GpuStandings.from_text(text)
        except ValueError as error:
            log.warning("which GPUs are set apart cannot be read: %s", error)
            before = GpuStandings()
        least = min((each.gpu_request for each in fleet if each.role is Role.DECODE and each.gpus), default=0)
        capped = {index for index in self._capped() if index in self._readings}
        # A capped GPU is slow because we want it so.
        readings = {
            **self._readings,
            **{index: replace(self._readings[index], is_throttled=True) for index in capped},
        }
        symptoms = self._judge.symptoms(readings, fleet, self._clock.now_s())
        after = judged(before, symptoms, usable, max(least, 1.0), time.time())
        if after != before:
            link.replace(SET_APART, text, after.to_text())
        for line in changes(self._known if self._known is not None else before, after):
            terminal.report(line)
            self.events = (*self.events[-15:], line)
        self._known = after
        return after.apart
