"""The machine's own clock."""

from __future__ import annotations

import asyncio
import time


class SystemClock:
    """Monotonic time of the machine; see ``dynaplan.ports.box.Clock``."""

    def now_s(self) -> float:
        """Return seconds since an arbitrary moment; they never go back."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Sleep on the running event loop."""
        await asyncio.sleep(seconds)
