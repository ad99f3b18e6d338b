"""Back-off: pauses between attempts that grow while the other side stays away."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable


class Backoff:
    """The first pause takes ``first_s`` seconds, each later one twice as long, ``longest_s`` at most.

    ``sleep`` awaits a number of seconds: ``Clock.sleep`` where tests run in virtual time.
    """

    def __init__(
        self,
        first_s: float,
        longest_s: float,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._sleep = sleep
        self._next_s = first_s
        self.is_first = True
        """True until the first pause, and again after ``reset``: the time to log that attempts fail."""

    async def pause(self) -> None:
        """Wait the next delay; the one after it is twice as long, up to the longest."""
        delay_s = self._next_s
        self._next_s = min(2 * delay_s, self._longest_s)
        self.is_first = False
        await self._sleep(delay_s)

    def reset(self) -> None:
        """Begin with the first pause again: an attempt has succeeded."""
        self._next_s = self._first_s
        self.is_first = True


def jittered_sleep(event: asyncio.Event) -> Callable[[float], Awaitable[None]]:
    """Return a ``sleep`` that ends when the event is set, or after half to all of its time.

    So not all clients of a server try again at once.
    """

    async def sleep(delay_s: float) -> None:
        try:
            async with asyncio.timeout(delay_s * random.uniform(0.5, 1.0)):
                await event.wait()
        except TimeoutError:
            pass

    return sleep
