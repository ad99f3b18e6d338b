"""Limits by the minute, and the headers by which clients know them. Pure.

A minute slides: of the minute before the current one that part counts which is not yet a minute old, as if
its requests had come evenly,

    used = now + before * (1 - elapsed / 60)

so nobody gets twice his limit around the turn of a minute. A prompt counts when it is accepted, by estimate,
and the answer when it has ended, with what the engine states of both: what is being answered may go beyond.

The headers are OpenAI's (platform.openai.com/docs/guides/rate-limits); the SDKs of OpenAI and Anthropic wait
for as long as ``retry-after`` says.
"""

from __future__ import annotations

import math
from typing import NamedTuple

WINDOW_S = 60.0


class Window(NamedTuple):
    """A limit and what is used of it, ``elapsed_s`` after the current minute began."""

    limit: int
    now: int
    before: int
    elapsed_s: float

    @property
    def used(self) -> float:
        return self.now + self.before * (1 - self.elapsed_s / WINDOW_S)

    def wait_s(self, amount: int) -> float:
        """Return the seconds until that much more is within the limit; infinite where it never is."""
        room = self.limit - amount
        if room < 0:
            return math.inf
        if self.now <= room:
            return max(0.0, self._falls_to(room - self.now, self.before) - self.elapsed_s)
        return WINDOW_S - self.elapsed_s + self._falls_to(room, self.now)

    @staticmethod
    def _falls_to(left: float, before: int) -> float:
        """Return the second of a minute in which no more than that is left of what was used before it."""
        return WINDOW_S * (1 - left / before) if before > left else 0.0

    @property
    def empty_s(self) -> float:
        """The seconds until nothing of it is used, if nothing comes."""
        left_s = WINDOW_S - self.elapsed_s
        return left_s + WINDOW_S if self.now else left_s if self.before else 0.0


def rate_headers(kind: str, window: Window) -> dict[str, str]:
    """Return OpenAI's headers for a limit of ``requests`` or ``tokens``."""
    return {
        f"x-ratelimit-limit-{kind}": str(window.limit),
        f"x-ratelimit-remaining-{kind}": str(max(0, math.floor(window.limit - window.used))),
        f"x-ratelimit-reset-{kind}": _duration(window.empty_s),
    }


def _duration(seconds: float) -> str:
    """Return a time as OpenAI writes it: ``350ms``, ``12s``, ``1m30s``."""
    if seconds < 1:
        return f"{math.ceil(1000 * seconds)}ms" if seconds else "0s"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
