"""Keeps the power caps that the owner of the box has set, hour by hour."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from dynaplan.contract.gpus import Gpu, PowerLimit, indices
from dynaplan.contract.holds import WallClock
from dynaplan.contract.power_caps import PowerCap, cap_at
from dynaplan.fleet.earlier_limits import EarlierLimits
from dynaplan.fleet.gpu_devices import PowerLimits
from dynaplan.fleet.rules.power_caps import capped
from dynaplan.util.blocking_read import BlockingRead
from dynaplan.util.clock import Clock

if TYPE_CHECKING:
    from dynaplan.fleet.plugin.ports import Terminal

log = logging.getLogger(__name__)

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
        earlier: EarlierLimits,
        terminal: Terminal,
        wall: WallClock,
        clock: Clock,
        unix_time_s: Callable[[], float] = time.time,
    ) -> None:
        self._caps = caps
        self._driver = driver
        self._gpus = gpus
        self._earlier = earlier
        self._terminal = terminal
        self._wall = wall
        self._clock = clock
        self._unix_time_s = unix_time_s
        self._wanted: Mapping[int, float] = {}
        self._tried: Mapping[int, float] = {}
        self._limits = BlockingRead[Mapping[int, PowerLimit]](driver.read, {})
        self._failures = BlockingRead[Mapping[int, str]](self._set_wanted, {})
        self._said: set[str] = set()

    async def run(self) -> None:
        """Compare and set the limits for ever; without caps, only until the earlier limits are set back."""
        while self._caps or self._earlier.by_gpu:
            await self.look()
            await self._clock.sleep(LOOK_S)

    async def look(self) -> None:
        """Compare the limits with the caps once, and set what differs."""
        limits = await self._limits.value(DRIVER_TIMEOUT_S)
        before = self._earlier.watts
        cap_watts = cap_at(self._caps, self._unix_time_s(), self._wall)
        remembered, self._wanted = capped(limits, before, cap_watts)
        if not self._remember({**before, **remembered}):
            return
        failures = await self._failures.value(DRIVER_TIMEOUT_S) if self._wanted else {}
        if self._wanted and self._tried is not self._wanted:
            return  # the driver does not answer: nobody knows what is set
        self._tell(cap_watts, failures)
        given_back = before.keys() & limits.keys() - remembered.keys() - failures.keys()
        never_set = failures.keys() - before.keys()
        known = {**before, **remembered}.items()
        self._remember({index: watts for index, watts in known if index not in given_back | never_set})

    def _remember(self, watts: Mapping[int, float]) -> bool:
        """Write down the limits to come back to; return whether they are in the file."""
        gpus = {gpu.index: gpu for gpu in (*self._earlier.by_gpu, *self._gpus)}
        try:
            self._earlier.keep({gpus[index]: each for index, each in watts.items()})
        except OSError as error:
            log.warning("no power limit is changed, as those of now cannot be written down: %s", error)
            return False
        return True

    def _set_wanted(self) -> dict[int, str]:
        wanted = self._wanted
        failures = {index: self._driver.set(index, watts) for index, watts in wanted.items()}
        self._tried = wanted
        return {index: why for index, why in failures.items() if why}

    def _tell(self, cap_watts: float | None, failures: Mapping[int, str]) -> None:
        for watts in sorted(set(self._wanted.values())):
            done = [index for index, each in self._wanted.items() if each == watts and index not in failures]
            if done and cap_watts is None:
                self._terminal.report(f"GPU {indices(done)} may draw {watts:.0f} W again.")
            elif done:
                self._terminal.report(f"GPU {indices(done)} may draw {watts:.0f} W now (--power-cap).")
        for why in sorted(set(failures.values()) - self._said):
            self._said.add(why)
            refused = indices([index for index, each in failures.items() if each == why])
            self._terminal.report(
                f"The power limit of GPU {refused} cannot be set: {why}. Root may: `nvidia-smi -pl WATTS`."
            )
