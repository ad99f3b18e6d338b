"""Follows the database of a store: feeds the hub of its watches, and ends leases."""

from __future__ import annotations

import asyncio
import ctypes
import logging
import math
import os
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from dynaplan.store.file.database import StoreDatabase
from dynaplan.store.file.owners import LeaseOwners
from dynaplan.store.hub import WatchHub
from dynaplan.util.backoff import Backoff
from dynaplan.util.errors import StoreUnavailable
from dynaplan.util.tasks import BackgroundTasks

log = logging.getLogger(__name__)
T = TypeVar("T")

POLL_S = 1.0
"""Time between two looks at the database or at its leases, while the kernel does not report their changes."""

UNREPORTED_S = 10.0
"""Longest delay of a change whose writer was killed after its commit, before it touched the file."""

LEASES_READ_AFTER_S = 0.25
"""Shortest time between two looks at the leases, however often they change."""

RECREATED_AFTER_S = 0.1
"""Pause before a store that was removed is made anew: who removes it may not have finished."""

_IN_ATTRIB, _IN_DELETE = 0x4, 0x200
_GONE = 0x400 | 0x800
"""``IN_DELETE_SELF`` and ``IN_MOVE_SELF``."""
_READ_BYTES = 65536


class Call(Protocol):
    """Runs a method of the database where it may block, and returns its result."""

    def __call__(self, what: Callable[[], T]) -> Awaitable[T]:
        """Raise StoreUnavailable where a later call may succeed."""
        ...


class Follower:
    """Reads what has changed whenever a commit is reported; ends leases that expire or whose owner dies.

    An error that no retry cures ends the watches and this.
    """

    def __init__(self, call: Call, database: StoreDatabase, hub: WatchHub) -> None:
        self._call = call
        self._database = database
        self._hub = hub
        self._identity = ""
        self._lease_changes = -1
        self._leases_read_s = -math.inf
        self._read_leases_at_s = 0.0
        self._reading = asyncio.Lock()
        self._wake = asyncio.Event()
        self._owners = LeaseOwners(lambda _: self._owner_died())
        self._notices: FileNotices | None = None
        self._noticed: object = None
        self._tasks = BackgroundTasks(lambda _, error: hub.fail(error))
        self._tasks.spawn(self._follow(), name="file store")

    @property
    def is_running(self) -> bool:
        """False after an error that no retry cures, and when closed."""
        return len(self._tasks) > 0

    async def catch_up(self) -> None:
        """Know all that was written before now; where that fails, what is known has to do."""
        try:
            await self._read_changes()
        except StoreUnavailable as error:
            log.debug("a watch begins with what is known: %s", error)

    async def close(self) -> None:
        """Follow no more: the hub gets no changes."""
        self._hub.forget()
        await self._tasks.cancel()

    async def _follow(self) -> None:
        backoff = Backoff(RECREATED_AFTER_S, POLL_S)
        try:
            while True:
                self._wake.clear()
                try:
                    if self._database.is_gone():
                        await backoff.pause()
                    await self._read_changes()
                    if self._listen():
                        await self._read_changes()
                    await self._read_leases()
                except StoreUnavailable as error:
                    log.debug("following is interrupted: %s", error)
                    await backoff.pause()
                    continue
                backoff.reset()
                await self._wait()
        finally:
            self._owners.close()
            self._stop_listening()

    async def _read_changes(self) -> None:
        async with self._reading:
            found = await self._call(partial(self._database.changes, self._identity, self._hub.version))
            if found.identity != self._identity or found.lease_changes != self._lease_changes:
                soon_s = self._leases_read_s + LEASES_READ_AFTER_S
                self._read_leases_at_s = min(self._read_leases_at_s, soon_s)
            self._identity, self._lease_changes = found.identity, found.lease_changes
            if found.items is None:
                self._hub.apply(found.events, found.position)
            else:
                self._hub.replace(found.items, found.position)

    async def _read_leases(self) -> None:
        """End leases that are over, when it is time to; follow the owners of the others."""
        if time.monotonic() < self._read_leases_at_s:
            return
        leases = await self._call(self._database.end_leases)
        now_s = self._leases_read_s = time.monotonic()
        first_s = min((lease.ends_s for lease in leases), default=math.inf)
        self._read_leases_at_s = max(first_s, now_s + POLL_S)
        self._owners.follow({lease.owner for lease in leases if lease.owner})
        if not self._owners.are_all_told:
            self._read_leases_at_s = min(self._read_leases_at_s, now_s + POLL_S)

    async def _wait(self) -> None:
        """Wait until something is reported, or it is time to look."""
        longest_s = UNREPORTED_S if self._notices else POLL_S
        wait_s = min(self._read_leases_at_s - time.monotonic(), longest_s)
        try:
            async with asyncio.timeout(max(0.0, wait_s)):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _listen(self) -> bool:
        """Have the kernel report changes; True when it has only begun to, and one more look is needed."""
        if self._noticed == self._database.opened:
            return False
        self._noticed = self._database.opened
        self._stop_listening()
        notices = None
        try:
            notices = FileNotices()
            notices.follow(self._database.directory, self._database.changed)
        except OSError as error:
            log.warning(
                "changes in %s are polled every %g s, since the kernel does not report them: %s",
                self._database.directory,
                POLL_S,
                error.strerror,
            )
            if notices:
                notices.close()
            return False
        self._notices = notices
        asyncio.get_running_loop().add_reader(notices.fd, self._changed)
        return True

    def _changed(self) -> None:
        if self._notices:
            self._notices.drain()
        self._wake.set()

    def _owner_died(self) -> None:
        self._read_leases_at_s = 0.0
        self._wake.set()

    def _stop_listening(self) -> None:
        if self._notices:
            asyncio.get_running_loop().remove_reader(self._notices.fd)
            self._notices.close()
            self._notices = None


class FileNotices:
    """An inotify descriptor, to be given to an event loop. Raises OSError when the kernel has none left.

    Python's standard library has no access to inotify. Which file it was does not matter here.
    """

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self.fd = self._checked(self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))

    def follow(self, directory: Path, changed: Path) -> None:
        """Report that the file is touched, or its directory or the one above is gone. Raises OSError."""
        for path, mask in ((directory, _GONE), (changed.parent, _GONE | _IN_DELETE), (changed, _IN_ATTRIB)):
            self._checked(self._libc.inotify_add_watch(self.fd, os.fsencode(path), mask))

    def drain(self) -> None:
        """Take the notices that have come."""
        try:
            while len(os.read(self.fd, _READ_BYTES)) > _READ_BYTES // 2:
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Close the inotify descriptor; it reports no change any more."""
        os.close(self.fd)

    def _checked(self, result: int) -> int:
        if result < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return result
