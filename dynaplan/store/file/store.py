"""The key-value store and its leases in a directory.

The database has a thread of its own, so that no disk holds up the event loop. Where another process has the
right to write, a call tries again until its time is over: it waits for nobody in that thread, and others'
calls pass.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import sqlite3
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import TypeVar

from dynaplan.store.file.database import StoreDatabase, refuse_old_form
from dynaplan.store.file.directory import open_store_directory
from dynaplan.store.file.following import POLL_S, Follower
from dynaplan.store.hub import WatchHub
from dynaplan.store.model import KeyValue, Transaction, WatchEvent
from dynaplan.util.errors import DynaplanError, PermanentError, StoreUnavailable

log = logging.getLogger(__name__)
T = TypeVar("T")

VARIABLE = "DYN_FILE_KV"

ANSWER_S = 2.9
"""Seconds in which every call ends, also when the disk stands still."""

LOCKED_WITHIN_S = 2.5
"""Longest wait for another writer, which takes less than a millisecond unless it stands still."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02
_BUSY = frozenset({sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})
_DAMAGED = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})


class FileStore:
    """A directory as ``dynaplan.store.port.KeyValueStore`` and ``LeaseKeeper``.

    Files are opened when they are first needed. Calls end within three seconds, also when another writer
    stands still. A lease ends with the process that it was granted to, or that last kept it alive, unless
    that process has closed its store: then it lives for its time.
    """

    def __init__(self, path: Path) -> None:
        self._database = StoreDatabase(path)
        self._thread = ThreadPoolExecutor(1, "file store")
        self._hub = WatchHub()
        self._follower: Follower | None = None
        self._watches = 0
        self._granted: set[int] = set()
        self._look_after_s = 0.0
        self._is_closed = False

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> FileStore:
        """The store in ``DYN_FILE_KV``, or in ``dynamo_store_kv`` among the temporary files, as the original.

        Raises ConfigError for a directory that others can reach, on a network file system, or of an earlier
        version.
        """
        chosen = environ.get(VARIABLE) or Path(tempfile.gettempdir()) / "dynamo_store_kv"
        path = Path(chosen).expanduser().absolute()
        if os.path.lexists(path):
            try:
                os.close(open_store_directory(path))
                refuse_old_form(path)
            except OSError as error:
                log.debug("%s cannot be used yet: %s", path, error)
        return cls(path)

    async def get(self, key: str) -> KeyValue | None:
        """The key, or None when it is absent."""
        await self._end_leases_if_nobody_does()
        return await self.call(partial(self._database.get, key))

    async def list(self, prefix: str) -> tuple[KeyValue, ...]:
        """Every key under the prefix, in key order."""
        await self._end_leases_if_nobody_does()
        return await self.call(partial(self._database.list, prefix))

    async def put(self, key: str, value: str, lease: int = 0) -> None:
        """Write the key; raises PermanentError when the lease does not exist."""
        await self.commit(Transaction(puts={key: value}, lease=lease))

    async def delete(self, key: str) -> None:
        """Remove the key; nothing happens when it is absent."""
        await self.commit(Transaction(deletes=(key,)))

    async def commit(self, transaction: Transaction) -> bool:
        """Carry the transaction out as a whole; False when its expectation fails."""
        if "" in transaction.puts:
            raise PermanentError("a key must not be empty")
        return await self.call(partial(self._database.commit, transaction))

    def watch(self, prefix: str) -> AsyncIterator[WatchEvent]:
        """A Snapshot, then every change, without a gap, until the store is closed."""
        return self._events(prefix)

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
        """End the lease and delete its keys; nothing happens when it no longer exists."""
        await self.call(partial(self._database.revoke, lease))
        self._granted.discard(lease)

    async def identity(self) -> str:
        """Return the random mark that was made with the database."""
        return await self.call(self._database.identity)

    async def close(self) -> None:
        """End every watch. Leases that this process owns live for their time from now on."""
        if self._is_closed:
            return
        if self._follower:
            await self._follower.close()
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
            await asyncio.wait_for(closed, ANSWER_S)
        except (TimeoutError, sqlite3.Error) as error:
            log.debug("%s was not closed: %s", self._place, error)

    async def call(self, what: Callable[[], T]) -> T:
        """Return what a method of the database does, tried anew while another process writes.

        Raises StoreUnavailable in time; a write may be carried out after that.
        """
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._tried(what)
        except TimeoutError as error:
            raise StoreUnavailable(f"{self._place} does not answer: its disk stands still") from error
        except UnicodeEncodeError as error:
            raise PermanentError(f"a key or value is no text: {error.reason}") from error
        except OSError as error:
            raise StoreUnavailable(f"{self._place} cannot be used: {error.strerror or error}") from error
        except sqlite3.Error as error:
            raise StoreUnavailable(f"{self._place} cannot be used: {error}") from error

    async def _tried(self, what: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        give_up_s, pause_s, was_damaged = loop.time() + LOCKED_WITHIN_S, _FIRST_PAUSE_S, False
        while True:
            if self._is_closed:
                raise StoreUnavailable(f"{self._place} is closed")
            try:
                return await loop.run_in_executor(self._thread, what)
            except sqlite3.Error as error:
                code = getattr(error, "sqlite_errorcode", 0) & 0xFF
                if code in _DAMAGED and not was_damaged:
                    was_damaged = True
                    await loop.run_in_executor(self._thread, self._database.set_aside)
                elif code not in _BUSY:
                    raise
                elif loop.time() > give_up_s:
                    raise StoreUnavailable(
                        f"another process keeps {self._place} locked for {LOCKED_WITHIN_S:g} s"
                    ) from error
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    @property
    def _place(self) -> str:
        return f"the store in {self._database.directory}"

    async def _events(self, prefix: str) -> AsyncGenerator[WatchEvent]:
        if self._is_closed:
            return
        self._watches += 1
        try:
            if self._follower is None or not self._follower.is_running:
                self._follower = Follower(self.call, self._database, self._hub)
            else:
                await self._follower.catch_up()
            async with aclosing(self._hub.watch(prefix)) as events:
                async for event in events:
                    yield event
        finally:
            self._watches -= 1
            if not self._watches and self._follower:
                follower, self._follower = self._follower, None
                await follower.close()

    async def _end_leases_if_nobody_does(self) -> None:
        """End leases whose end nobody follows; where that fails they stay for now."""
        if self._follower is not None or time.monotonic() < self._look_after_s:
            return
        self._look_after_s = time.monotonic() + POLL_S
        try:
            await self.call(self._database.end_leases)
        except StoreUnavailable as error:
            log.debug("ended leases stay for now: %s", error)
