"""What every test session needs."""

from __future__ import annotations

import asyncio


def pytest_configure() -> None:
    # pytest-asyncio asks for the current event loop, which makes one that nobody closes, unless it was set.
    asyncio.set_event_loop(None)
