"""The machine's own clock."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class SystemClock:
    """Monotonic time of the machine; see ``dynaplan.process.ports.Clock``."""

    def now_s(self) -> float:
        """Return seconds since an arbitrary moment; they never go back."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Sleep on the running event loop."""
        await asyncio.sleep(seconds)


class Clock(Protocol):
    """Monotonic time in seconds, which a test can replace."""

    def now_s(self) -> float:
        """Return the seconds on a clock that never goes back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return when that many seconds have passed."""
        ...


def system_clock() -> Clock:
    """Return the machine's monotonic clock, in seconds, which no setting of the time moves."""

    return SystemClock()
