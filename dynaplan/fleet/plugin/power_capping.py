"""Keeps the power caps that the owner of the box has set, hour by hour."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from dynaplan.contract.gpus import Gpu, indices
from dynaplan.contract.holds import WallClock
from dynaplan.contract.power_caps import PowerCap, cap_at
from dynaplan.fleet.capped_limits import DeploymentCaps, LimitResults
from dynaplan.fleet.gpu_devices import PowerLimits
from dynaplan.util.blocking_call import BlockingCall
from dynaplan.util.clock import Clock
from dynaplan.util.errors import DeploymentError

if TYPE_CHECKING:
    from dynaplan.fleet.plugin.ports import Terminal

LOOK_S = 5.0
"""Seconds between two looks: caps begin and end, and others may change a limit."""

DRIVER_TIMEOUT_S = 10.0


class PowerCapping:
    """Sets the power limits of GPUs by the caps of the hour; reports each change, and each refusal, once."""

    def __init__(
        self,
        caps: Sequence[PowerCap],
        gpus: Sequence[Gpu],
        driver: PowerLimits,
        limits: DeploymentCaps,
        terminal: Terminal,
        wall: WallClock,
        clock: Clock,
        unix_time_s: Callable[[], float] = time.time,
    ) -> None:
        self._caps = caps
        self._gpus = gpus
        self._driver = driver
        self._limits = limits
        self._terminal = terminal
        self._wall = wall
        self._clock = clock
        self._unix_time_s = unix_time_s
        self._changing = BlockingCall[LimitResults | None](self._change, None)
        self._told: LimitResults | None = None
        self._watts: dict[int, float] = {}
        self._said: set[str] = set()

    async def run(self) -> None:
        """Compare and set the limits for ever; without caps, only until the earlier limits are set back."""
        uuids = {gpu.uuid for gpu in self._gpus}
        while self._caps or any(gpu.uuid in uuids for gpu in self._limits.own()):
            await self.look()
            await self._clock.sleep(LOOK_S)

    async def look(self) -> None:
        """Compare the limits with the caps once, and set what differs."""
        changes = await self._changing.latest_value(DRIVER_TIMEOUT_S)
        if changes and changes is not self._told:  # else nobody knows yet what is set
            self._told = changes
            self._tell(changes)

    def _cap_watts(self) -> float | None:
        return cap_at(self._caps, self._unix_time_s(), self._wall)

    def _change(self) -> LimitResults | None:
        try:
            return self._limits.change(self._driver, self._gpus, self._cap_watts())
        except (OSError, DeploymentError) as error:
            why = f"the limit of before cannot be written down: {error}"
            return LimitResults({}, {gpu.index: why for gpu in self._gpus})

    def _tell(self, changes: LimitResults) -> None:
        ending = " again." if self._cap_watts() is None else " now (--power-cap)."
        news = {index: watts for index, watts in changes.done.items() if self._watts.get(index) != watts}
        self._watts |= news
        for watts in sorted(set(news.values())):
            done = indices([index for index, each in news.items() if each == watts])
            self._terminal.report(f"GPU {done} may draw {watts:.0f} W{ending}")
        for why in sorted(set(changes.failures.values()) - self._said):
            self._said.add(why)
            refused = indices([index for index, each in changes.failures.items() if each == why])
            self._terminal.report(
                f"The power limit of GPU {refused} cannot be set: {why}. Root may: `nvidia-smi -pl WATTS`."
            )
