"""Watches of a store in a directory: one follower for a process, and a queue for each watch."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable

from dynaplan.store.file.contents import StoreContents
from dynaplan.store.file.disk import StoreDisk
from dynaplan.store.file.notices import FileNotices
from dynaplan.store.file.owners import LeaseOwners
from dynaplan.store.model import Put, Snapshot, WatchEvent
from dynaplan.util.backoff import Backoff
from dynaplan.util.errors import StoreUnavailable
from dynaplan.util.tasks import BackgroundTasks

log = logging.getLogger(__name__)

SHORTEST_PAUSE_S = 1.0
"""Time between two looks at the store while nothing tells of a change."""

FIRST_DELAY_S = 0.1
"""Pause before a store that has gone is made anew: its remover may not have finished."""


class WatchQueue:
    """Events that one watch has not told yet."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._events: asyncio.Queue[WatchEvent | BaseException | None] = asyncio.Queue()
        self._has_begun = False

    def begin(self, contents: StoreContents) -> None:
        """Begin, again if need be, with all keys of the prefix."""
        self._has_begun = True
        self._events.put_nowait(Snapshot(contents.under(self._prefix)))

    def take(self, events: Iterable[WatchEvent | None], contents: StoreContents) -> None:
        """Take changes over, after which the contents are these; None among them: everything may be new."""
        events = tuple(events)
        if not self._has_begun or None in events:
            self.begin(contents)
            return
        for event in events:
            key = event.item.key if isinstance(event, Put) else getattr(event, "key", "")
            if event is not None and key.startswith(self._prefix):
                self._events.put_nowait(event)

    def end(self, error: BaseException | None = None) -> None:
        """End after what is there, with this error if any."""
        self._events.put_nowait(error)

    async def events(self) -> AsyncGenerator[WatchEvent]:
        """Yield them as they come, until the end."""
        while (event := await self._events.get()) is not None:
            if isinstance(event, BaseException):
                raise event
            yield event


class Follower:
    """Looks at the store whenever its log changes, and ends leases when their owners die or their time is
    over.

    ``look`` and ``sweep`` are the store's; ``fail`` is told of an error that no retry cures.
    """

    def __init__(
        self,
        disk: StoreDisk,
        look: Callable[[], Awaitable[None]],
        sweep: Callable[[], Awaitable[float]],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._disk = disk
        self._look = look
        self._sweep = sweep
        self._wake = asyncio.Event()
        self._owners = LeaseOwners(lambda owner: self._owner_died())
        self._notices: FileNotices | None = None
        self._followed: object = None
        self._sweep_at_s = 0.0
        self._tasks = BackgroundTasks(lambda _task, error: fail(error))
        self._tasks.spawn(self._follow(), name="file store")

    def wake(self) -> None:
        """Have the watches look at the log at the next opportunity, without a notice."""
        self._wake.set()

    async def close(self) -> None:
        """End the background task; watches tell nothing more."""
        await self._tasks.cancel()

    async def _follow(self) -> None:
        try:
            await self._look_again_and_again()
        finally:
            self._owners.close()
            self._drop_notices()

    async def _look_again_and_again(self) -> None:
        backoff = Backoff(FIRST_DELAY_S, SHORTEST_PAUSE_S)
        while True:
            self._wake.clear()
            try:
                if self._disk.is_gone():
                    await backoff.pause()
                await self._look()
                if self._arm():
                    await self._look()
                await self._look_after_leases()
            except StoreUnavailable as error:
                log.debug("following is interrupted: %s", error)
                await backoff.pause()
                continue
            backoff.reset()
            await self._pause()

    async def _look_after_leases(self) -> None:
        contents = self._disk.contents
        self._owners.follow(contents.owners)
        now_s = time.monotonic()
        if now_s >= self._sweep_at_s:
            self._sweep_at_s = max(await self._sweep(), now_s + SHORTEST_PAUSE_S)
        elif contents.ttls_s:
            self._sweep_at_s = min(self._sweep_at_s, now_s + min(contents.ttls_s))

    async def _pause(self) -> None:
        """Wait until something is told, or it is time to look by oneself."""
        until_s = self._sweep_at_s
        if self._notices is None or not self._owners.are_all_told:
            until_s = min(until_s, time.monotonic() + SHORTEST_PAUSE_S)
        try:
            async with asyncio.timeout(max(0.0, until_s - time.monotonic()) if until_s < math.inf else None):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _arm(self) -> bool:
        """Have the kernel tell of changes; True when it has only begun to, so that one more look is
        needed.
        """
        if self._followed == self._disk.opened:
            return False
        self._followed = self._disk.opened
        self._drop_notices()
        notices = None
        try:
            notices = FileNotices()
            notices.follow(str(self._disk.path), self._disk.journal_path)
        except OSError as error:
            log.warning(
                "changes in %s are looked for every %g s, since the kernel does not tell of them: %s",
                self._disk.path,
                SHORTEST_PAUSE_S,
                error.strerror,
            )
            if notices:
                notices.close()
            return False
        self._notices = notices
        asyncio.get_running_loop().add_reader(notices.fd, self._noticed)
        return True

    def _noticed(self) -> None:
        if self._notices:
            self._notices.drain()
        self._wake.set()

    def _owner_died(self) -> None:
        self._sweep_at_s = 0.0
        self._wake.set()

    def _drop_notices(self) -> None:
        if self._notices:
            asyncio.get_running_loop().remove_reader(self._notices.fd)
            self._notices.close()
            self._notices = None
