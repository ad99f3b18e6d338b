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
from collections.abc import Mapping
from functools import cache
from typing import NamedTuple

WINDOW_S = 60.0


class Used(NamedTuple):
    """What all frontends have counted of a key: ``_before`` is the minute before, ``now`` the current one."""

    in_flight: int = 0
    requests_now: int = 0
    requests_before: int = 0
    tokens_now: int = 0
    tokens_before: int = 0


class LimitUse(NamedTuple):
    """What is used of a limit, as a person is told: ``58 of 60 requests/min``."""

    kind: str
    used: int
    limit: int


class MinuteUsage(NamedTuple):
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
        if self.now + self.before <= room:
            return 0.0
        if self.now <= room:
            return max(0.0, self._falls_to(room - self.now, self.before) - self.elapsed_s)
        return WINDOW_S - self.elapsed_s + self._falls_to(room, self.now)

    @staticmethod
    def _falls_to(left: float, before: int) -> float:
        """Return the second of a minute in which no more than that is left of what was used before it."""
        return WINDOW_S * (1 - left / before) if before > left else 0.0


_HEADERS = {
    kind: tuple(f"x-ratelimit-{what}-{kind}" for what in ("limit", "remaining", "reset"))
    for kind in ("requests", "tokens")
}


def rate_headers(
    limits: Mapping[str, int], used: Used, elapsed_s: float, *, requests: int = 0, tokens: int = 0
) -> dict[str, str]:
    """Return OpenAI's headers for limits of ``requests`` and ``tokens`` once so many more are used."""
    amounts = {
        "requests": (used.requests_now + requests, used.requests_before),
        "tokens": (used.tokens_now + tokens, used.tokens_before),
    }
    left_s, headers = WINDOW_S - elapsed_s, {}
    for kind, most in limits.items():
        now, before = amounts[kind]
        left = most - now - before * left_s / WINDOW_S
        empty_s = left_s + WINDOW_S if now else left_s if before else 0.0
        limit, remaining, reset = _HEADERS[kind]
        headers[limit] = str(most)
        headers[remaining] = str(int(left)) if left > 0 else "0"
        headers[reset] = _duration(math.ceil(empty_s))
    return headers


@cache
def _duration(seconds: int) -> str:
    """Return a time as OpenAI writes it: ``12s``, ``1m30s``."""
    minutes, rest = divmod(seconds, 60)
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
