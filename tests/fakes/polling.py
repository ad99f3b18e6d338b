"""Waiting for something to become true, with a deadline instead of a guess."""

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
