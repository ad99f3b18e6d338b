"""Polling with a deadline instead of sleeping for a guess: the only home of real sleeps in the tests."""

from __future__ import annotations

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 30.0
"""Where how long it takes is not the rule: also on a machine that does much else. It costs a failure only."""


async def eventually(
    check: Callable[[], Any], timeout_s: float = PATIENCE_S, interval_s: float = 0.02
) -> Any:
    """The first truthy result of ``check`` (sync or async); AssertionError at the deadline."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        result = check()
        if inspect.isawaitable(result):
            result = await result
        if result:
            return result
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not true within {timeout_s} s: {inspect.getsource(check).strip()}")
        await asyncio.sleep(interval_s)


async def consistently(check: Callable[[], Any], for_s: float, interval_s: float = 0.05) -> None:
    """AssertionError when ``check`` (sync or async) becomes false within ``for_s``: nothing is to happen."""
    end_s = time.monotonic() + for_s
    while time.monotonic() < end_s:
        await asyncio.sleep(interval_s)
        result = check()
        assert await result if inspect.isawaitable(result) else result, (
            f"not true for {for_s} s: {inspect.getsource(check).strip()}"
        )


async def lasting(seconds: float) -> None:
    """Let a fault last: that much time of an outage is what is tested, and there is nothing to wait for."""
    await asyncio.sleep(seconds)


def wait_until(check: Callable[[], Any], timeout_s: float = PATIENCE_S, interval_s: float = 0.05) -> Any:
    """``eventually`` for code without an event loop."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        result = check()
        if result:
            return result
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not true within {timeout_s} s: {inspect.getsource(check).strip()}")
        time.sleep(interval_s)
