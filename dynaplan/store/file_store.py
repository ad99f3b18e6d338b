"""The key-value store and its leases in a directory.

1. **Call.** The database has a thread of its own, so that no disk blocks the event loop. While another
   process holds the write lock, a call is retried until its time is over: the thread itself never waits, and
   other calls pass.
2. **Watch.** A commit is reported by inotify, or found by polling; what has changed since then is read and
   fed to the watches of this process.
3. **Lease.** Whoever has a watch ends the leases that expire or whose owner dies; without a watch anywhere, a
   read does.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import math
import os
import random
import sqlite3
import tempfile
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from dynaplan.config.settings.servers import FILE_VARIABLE
from dynaplan.store.file_database import StoreDatabase, open_store_directory, reject_old_layout
from dynaplan.store.hub import WatchHub
from dynaplan.store.lease_owners import OwnerWatcher
from dynaplan.store.model import KeyValue, Transaction, WatchEvent
from dynaplan.store.timing import (
    FILE_CALL_TIMEOUT_S,
    FILE_LEASE_READ_MIN_S,
    FILE_LOCK_RETRY_MAX_S,
    FILE_LOCK_RETRY_MIN_S,
    FILE_LOCK_TIMEOUT_S,
    FILE_POLL_S,
    FILE_RECREATE_AFTER_S,
    FILE_UNREPORTED_MAX_S,
)
from dynaplan.util.backoff import Backoff
from dynaplan.util.errors import DeploymentError, DynaplanError, PermanentError, StoreUnavailable
from dynaplan.util.tasks import BackgroundTasks

log = logging.getLogger(__name__)
T = TypeVar("T")

_BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


class FileStore:
    """A directory as ``dynaplan.store.port.KeyValueStore`` and ``LeaseStore``.

    Files are opened at the first call. Calls end within three seconds, also when another writer
    stands still. A lease ends with the process that it was granted to, or that last kept it alive, unless
    that process has closed its store: then it lives for its time.
    """

    def __init__(self, path: Path) -> None:
        self._database = StoreDatabase(path)
        self._thread = ThreadPoolExecutor(1, "file store")
        self._hub = WatchHub()
        self._watcher: FileWatcher | None = None
        self._watches = 0
        self._granted: set[int] = set()
        self._check_leases_at_s = 0.0
        self._is_closed = False

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> FileStore:
        """The store in ``DYN_FILE_KV``, or, as in Dynamo, in ``dynamo_store_kv`` among the temporary files.

        Raises DeploymentError for a directory that others can reach or on a network file system, ConfigError
        for one of an earlier version.
        """
        chosen = environ.get(FILE_VARIABLE) or Path(tempfile.gettempdir()) / "dynamo_store_kv"
        path = Path(os.path.expanduser(chosen)).absolute()
        if os.path.lexists(path):
            try:
                os.close(open_store_directory(path))
                reject_old_layout(path)
            except OSError as error:
                log.debug("%s cannot be used yet: %s", path, error)
        return cls(path)

    async def get(self, key: str) -> KeyValue | None:
        await self._expire_leases_if_unwatched()
        return await self.call(partial(self._database.get, key))

    async def list(self, prefix: str) -> tuple[KeyValue, ...]:
        await self._expire_leases_if_unwatched()
        return await self.call(partial(self._database.list, prefix))

    async def put(self, key: str, value: str, lease: int = 0) -> None:
        await self.commit(Transaction(puts={key: value}, lease=lease))

    async def delete(self, key: str) -> None:
        await self.commit(Transaction(deletes=(key,)))

    async def commit(self, transaction: Transaction) -> bool:
        if "" in transaction.puts:
            raise PermanentError("a key must not be empty")
        return await self.call(partial(self._database.commit, transaction))

    async def watch(self, prefix: str) -> AsyncGenerator[WatchEvent]:
        if self._is_closed:
            return
        self._watches += 1
        try:
            if self._watcher is None or not self._watcher.is_running:
                self._watcher = FileWatcher(self.call, self._database, self._hub)
            else:
                await self._watcher.catch_up()
            async with aclosing(self._hub.watch(prefix)) as events:
                async for event in events:
                    yield event
        finally:
            self._watches -= 1
            if not self._watches and self._watcher:
                watcher, self._watcher = self._watcher, None
                await watcher.close()

    async def grant(self, ttl_s: int) -> int:
        """A new lease, which this process owns."""
        lease = await self.call(partial(self._database.grant, ttl_s))
        self._granted.add(lease)
        return lease

    async def keep_alive(self, lease: int) -> float:
        """Renew the lease; its time to live in seconds, 0.0 when it no longer exists.

        The process that does becomes its owner.
        """
        left_s = await self.call(partial(self._database.keep_alive, lease))
        (self._granted.add if left_s else self._granted.discard)(lease)
        return left_s

    async def revoke(self, lease: int) -> None:
        await self.call(partial(self._database.revoke, lease))
        self._granted.discard(lease)

    async def identity(self) -> str:
        """Return the random mark that was made with the database."""
        return await self.call(self._database.identity)

    async def close(self) -> None:
        """End every watch. Leases that this process owns live for their time from now on."""
        if self._is_closed:
            return
        if self._watcher:
            await self._watcher.close()
        try:
            if self._granted:
                await self.call(partial(self._database.disown, tuple(self._granted)))
        except DynaplanError as error:
            log.debug("leases end with this process: %s", error)
        self._is_closed = True
        self._hub.close()
        closed = asyncio.get_running_loop().run_in_executor(self._thread, self._database.close)
        self._thread.shutdown(wait=False)
        try:
            async with asyncio.timeout(FILE_CALL_TIMEOUT_S):
                await closed
        except (TimeoutError, sqlite3.Error) as error:
            log.debug("%s was not closed: %s", self._name, error)

    async def call(self, what: Callable[[], T]) -> T:
        """Return the result of a method of the database, retried while another process writes.

        Raises StoreUnavailable when the database cannot be used, or is not done within FILE_CALL_TIMEOUT_S: a
        write may still be carried out after that. Raises PermanentError for a key or value that is no text,
        and, until the database was opened once, DeploymentError for a directory that is not safe.
        """
        try:
            async with asyncio.timeout(FILE_CALL_TIMEOUT_S):
                return await self._retry_while_locked(what)
        except TimeoutError as error:
            raise StoreUnavailable(f"{self._name} does not answer: its disk stands still") from error
        except UnicodeEncodeError as error:
            raise PermanentError(f"a key or value is no text: {error.reason}") from error
        except OSError as error:
            raise StoreUnavailable(f"{self._name} cannot be used: {error.strerror or error}") from error
        except DeploymentError as error:
            if self._database.file_id is None:
                raise
            raise StoreUnavailable(str(error.args[0]), hint=error.hint) from error  # it has been right before
        except sqlite3.Error as error:
            raise StoreUnavailable(f"{self._name} cannot be used: {error}") from error

    async def _retry_while_locked(self, what: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        give_up_s, pause_s, was_damaged = loop.time() + FILE_LOCK_TIMEOUT_S, FILE_LOCK_RETRY_MIN_S, False
        while True:
            if self._is_closed:
                raise StoreUnavailable(f"{self._name} is closed")
            try:
                return await loop.run_in_executor(self._thread, what)
            except sqlite3.Error as error:
                code = getattr(error, "sqlite_errorcode", 0) & 0xFF
                if code in _DAMAGED and not was_damaged:
                    was_damaged = True
                    await loop.run_in_executor(self._thread, self._database.quarantine)
                elif code not in _BUSY:
                    raise
                elif loop.time() > give_up_s:
                    raise StoreUnavailable(
                        f"another process keeps {self._name} locked for {FILE_LOCK_TIMEOUT_S:g} s"
                    ) from error
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, FILE_LOCK_RETRY_MAX_S)

    @property
    def _name(self) -> str:
        return f"the store in {self._database.directory}"

    async def _expire_leases_if_unwatched(self) -> None:
        """End expired leases unless a watch does; when that fails they stay for now."""
        if self._watcher is not None or time.monotonic() < self._check_leases_at_s:
            return
        self._check_leases_at_s = time.monotonic() + FILE_POLL_S
        try:
            await self.call(self._database.expire_leases)
        except StoreUnavailable as error:
            log.debug("ended leases stay for now: %s", error)


_IN_ATTRIB, _IN_DELETE = 0x4, 0x200
_GONE = 0x400 | 0x800
"""``IN_DELETE_SELF`` and ``IN_MOVE_SELF``."""
_READ_BYTES = 65536


class DatabaseCall(Protocol):
    """Runs a method of the database where it may block, and returns its result."""

    def __call__(self, what: Callable[[], T]) -> Awaitable[T]:
        """Raise StoreUnavailable where a later call may succeed."""
        ...


class FileWatcher:
    """Reads what has changed whenever a commit is reported; ends leases that expire or whose owner dies.

    An error that no retry cures ends the watches and this.
    """

    def __init__(self, call: DatabaseCall, database: StoreDatabase, hub: WatchHub) -> None:
        self._call = call
        self._database = database
        self._hub = hub
        self._identity = ""
        self._lease_changes = -1
        self._leases_read_s = -math.inf
        self._read_leases_at_s = 0.0
        self._reading = asyncio.Lock()
        self._wake = asyncio.Event()
        self._owners = OwnerWatcher(lambda _: self._on_owner_death())
        self._inotify: Inotify | None = None
        self._watched_file: object = None
        self._tasks = BackgroundTasks(lambda _, error: hub.fail(error))
        self._tasks.spawn(self._follow(), name="file store")

    @property
    def is_running(self) -> bool:
        """False after an error that no retry cures, and when closed."""
        return len(self._tasks) > 0

    async def catch_up(self) -> None:
        """Read all that was written before now; when that fails, keep what is known."""
        try:
            await self._read_changes()
        except StoreUnavailable as error:
            log.debug("a watch begins with what is known: %s", error)

    async def close(self) -> None:
        """Stop reading the store's changes; watches get no more, and new ones wait."""
        self._hub.invalidate()
        await self._tasks.cancel()

    async def _follow(self) -> None:
        backoff = Backoff(FILE_RECREATE_AFTER_S, FILE_POLL_S)
        try:
            while True:
                self._wake.clear()
                try:
                    if self._database.is_removed():
                        await backoff.pause()
                    await self._read_changes()
                    if self._start_inotify():
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
            self._stop_inotify()

    async def _read_changes(self) -> None:
        async with self._reading:
            found = await self._call(partial(self._database.changes, self._identity, self._hub.version))
            if found.identity != self._identity or found.lease_changes != self._lease_changes:
                soon_s = self._leases_read_s + FILE_LEASE_READ_MIN_S
                self._read_leases_at_s = min(self._read_leases_at_s, soon_s)
            self._identity, self._lease_changes = found.identity, found.lease_changes
            if found.items is None:
                self._hub.apply(found.events, found.position)
            else:
                self._hub.replace(found.items, found.position)

    async def _read_leases(self) -> None:
        """End the expired leases, and watch the processes that own the others.

        Nothing happens before the next lease may have expired.
        """
        if time.monotonic() < self._read_leases_at_s:
            return
        leases = await self._call(self._database.expire_leases)
        now_s = self._leases_read_s = time.monotonic()
        first_s = min((lease.ends_s for lease in leases), default=math.inf)
        self._read_leases_at_s = max(first_s, now_s + FILE_POLL_S)
        self._owners.follow({lease.owner for lease in leases if lease.owner})
        if not self._owners.are_all_watched:
            self._read_leases_at_s = min(self._read_leases_at_s, now_s + FILE_POLL_S)

    async def _wait(self) -> None:
        """Wait for a report, or until the next poll."""
        longest_s = FILE_UNREPORTED_MAX_S if self._inotify else FILE_POLL_S
        wait_s = min(self._read_leases_at_s - time.monotonic(), longest_s)
        try:
            async with asyncio.timeout(max(0.0, wait_s)):
                await self._wake.wait()
        except TimeoutError:
            pass

    def _start_inotify(self) -> bool:
        """Have the kernel report changes; True when it has only just started, and one more read is needed."""
        if self._watched_file == self._database.file_id:
            return False
        self._watched_file = self._database.file_id
        self._stop_inotify()
        inotify = None
        try:
            inotify = Inotify()
            inotify.follow(self._database.directory, self._database.changed_file)
        except OSError as error:
            log.warning(
                "changes in %s are polled every %g s, since the kernel does not report them: %s",
                self._database.directory,
                FILE_POLL_S,
                error.strerror,
            )
            if inotify:
                inotify.close()
            return False
        self._inotify = inotify
        asyncio.get_running_loop().add_reader(inotify.fd, self._on_change)
        return True

    def _on_change(self) -> None:
        if self._inotify:
            self._inotify.drain()
        self._wake.set()

    def _on_owner_death(self) -> None:
        self._read_leases_at_s = 0.0
        self._wake.set()

    def _stop_inotify(self) -> None:
        if self._inotify:
            asyncio.get_running_loop().remove_reader(self._inotify.fd)
            self._inotify.close()
            self._inotify = None


class Inotify:
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
        """Discard the pending notifications."""
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
