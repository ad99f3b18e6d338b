"""The machine's own clock."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class SystemClock:
    """Monotonic time of the machine."""

    now_s = staticmethod(time.monotonic)  # itself: it is read for every token

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class Clock(Protocol):
    """Monotonic time in seconds, which a test can replace."""

    def now_s(self) -> float:
        """Return the seconds on a clock that never goes back."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return when that many seconds have passed."""
        ...
