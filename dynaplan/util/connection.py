"""A connection that is made when it is first used, one for all its users."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar


class Closable(Protocol):
    """A connection of any kind, which can be closed."""

    async def close(self) -> None:
        """End the connection; a second call does nothing."""
        ...


T = TypeVar("T", bound=Closable)


class OnFirstUse(Generic[T]):
    """Connects at the first call, and at the next call when connecting has failed.

    A caller that gives up waiting does not break off the attempt, which others may be waiting for.
    """

    def __init__(self, connect: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._connect = connect
        self._connecting: asyncio.Task[T] | None = None

    async def __call__(self) -> T:
        """Return the connection; raise what the attempt to connect raises."""
        if self._connecting is None or (self._connecting.done() and self._connecting.exception()):
            self._connecting = asyncio.create_task(self._connect())
        return await asyncio.shield(self._connecting)

    async def close(self) -> None:
        """Close the connection if there is one; cancel a running attempt."""
        if self._connecting:
            self._connecting.cancel()
            for connected in await asyncio.gather(self._connecting, return_exceptions=True):
                if not isinstance(connected, BaseException):
                    await connected.close()
