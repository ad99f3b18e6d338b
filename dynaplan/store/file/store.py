"""The key-value store and its leases in a directory."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import random
import secrets
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from dynaplan.process.identity import LeaseOwner
from dynaplan.store.file.contents import FileLease, Record
from dynaplan.store.file.directory import open_store_directory
from dynaplan.store.file.disk import StoreDisk
from dynaplan.store.file.following import Follower, WatchQueue
from dynaplan.store.file.names import bytes_of
from dynaplan.store.file.owners import is_dead, this_process
from dynaplan.store.file.strangers import named
from dynaplan.store.model import KeyValue, Transaction, WatchEvent
from dynaplan.util.errors import PermanentError, StoreUnavailable

log = logging.getLogger(__name__)

VARIABLE = "DYN_FILE_KV"
LOCKED_WITHIN_S = 3.0
"""Longest wait for another writer, which takes less than a millisecond unless it stands still."""

LOOKED_AFTER_EVERY_S = 1.0
"""Shortest time between two looks for leases that have ended, while no process tells of its end by itself."""

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.02


class FileStore:
    """A directory as ``dynaplan.store.port.KeyValueStore`` and ``LeaseKeeper``.

    Files are opened when they are first needed. Calls end within three seconds, also when another writer
    stands still. A lease ends with the process that it was granted to, or that last kept it alive, unless
    that process has closed its store: then it lives for its time.
    """

    def __init__(self, path: Path) -> None:
        self._disk = StoreDisk(path)
        self._is_closed = False
        self._watchers: set[WatchQueue] = set()
        self._follower: Follower | None = None
        self._granted: set[int] = set()
        self._look_after_s = 0.0
        self._has_named_strangers = False

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> FileStore:
        """The store in ``DYN_FILE_KV``, or in ``dynamo_store_kv`` among the temporary files, as the original.

        Raises ConfigError for a directory that others can reach, or on a network file system.
        """
        chosen = environ.get(VARIABLE) or Path(tempfile.gettempdir()) / "dynamo_store_kv"
        path = Path(chosen).expanduser().absolute()
        if os.path.lexists(path):
            try:
                os.close(open_store_directory(path))
            except OSError as error:
                log.debug("%s cannot be used yet: %s", path, error)
        return cls(path)

    async def get(self, key: str) -> KeyValue | None:
        """The key, or None when it is absent."""
        await self._look()
        return self._disk.contents.items.get(key)

    async def list(self, prefix: str) -> tuple[KeyValue, ...]:
        """Every key under the prefix, in key order."""
        await self._look()
        return self._disk.contents.under(prefix)

    async def put(self, key: str, value: str, lease: int = 0) -> None:
        """Write the key; raises PermanentError when the lease does not exist."""
        await self.commit(Transaction(puts={key: value}, lease=lease))

    async def delete(self, key: str) -> None:
        """Remove the key; nothing happens when it is absent."""
        await self.commit(Transaction(deletes=(key,)))

    async def commit(self, transaction: Transaction) -> bool:
        """Carry the transaction out as a whole; False when its expectation fails."""
        _check_text(transaction)
        async with self._locked():
            contents = self._disk.contents
            for key, revision in transaction.expected.items():
                item = contents.items.get(key)
                if (item.revision if item else 0) != revision:
                    return False
            lease = transaction.lease
            if transaction.puts and lease and lease not in contents.leases:
                raise PermanentError("requested lease not found")
            gone = [key for key in transaction.deletes if key in contents.items]
            if transaction.puts or gone:
                self._disk.write({"put": transaction.puts, "delete": gone, "lease": lease})
        return True

    def watch(self, prefix: str) -> AsyncIterator[WatchEvent]:
        """A Snapshot, then every change, without a gap, until the store is closed."""
        return self._events(prefix)

    async def grant(self, ttl_s: int) -> int:
        """A new lease, which this process owns."""
        async with self._locked():
            contents = self._disk.contents
            lease = FileLease(secrets.randbits(62) + 1, ttl_s, contents.free_slot(), this_process())
            self._disk.marks.renew(lease.slot, lease.lease, time.monotonic() + ttl_s)
            self._disk.write({"grant": lease.to_record()})
        self._granted.add(lease.lease)
        return lease.lease

    async def keep_alive(self, lease: int) -> float:
        """Renew the lease; its time to live in seconds, 0.0 when it no longer exists.

        The process that does becomes its owner. The key files get the present time, as the original's readers
        expect.
        """
        async with self._locked():
            held = self._disk.contents.leases.get(lease)
            if held is None:
                self._granted.discard(lease)
                return 0.0
            self._disk.renew(lease)
            if held.owner != this_process():
                self._disk.write(_owned(lease, this_process()))
        self._granted.add(lease)
        return float(held.ttl_s)

    async def revoke(self, lease: int) -> None:
        """End the lease and delete its keys; nothing happens when it no longer exists."""
        async with self._locked():
            self._end(lease, "revoked")
        self._granted.discard(lease)

    async def identity(self) -> str:
        """Return the random mark in the first line of the log, made with it."""
        await self._look()
        return self._disk.contents.identity

    async def close(self) -> None:
        """End every watch. Leases that this process owns live for their time from now on."""
        if self._is_closed:
            return
        if self._follower:
            await self._follower.close()
        try:
            await self._let_go()
        except (StoreUnavailable, PermanentError) as error:
            log.debug("leases end with this process: %s", error)
        self._is_closed = True
        for watcher in self._watchers:
            watcher.end()
        self._disk.close()

    async def _let_go(self) -> None:
        """Give up the ownership of all leases that still exist."""
        if not self._granted:
            return
        async with self._locked():
            for lease in self._granted & self._disk.contents.leases.keys():
                self._disk.write(_owned(lease, None))

    async def _events(self, prefix: str) -> AsyncGenerator[WatchEvent]:
        if self._is_closed:
            return
        watcher = WatchQueue(prefix)
        self._watchers.add(watcher)
        if self._follower is None:
            self._follower = Follower(self._disk, self._look, self._sweep, self._fail)
        self._follower.wake()
        try:
            async for event in watcher.events():
                yield event
        finally:
            self._watchers.discard(watcher)
            if not self._watchers and self._follower:
                follower, self._follower = self._follower, None
                await follower.close()

    async def _look(self) -> None:
        """Bring the contents up to date; end leases whose end nobody would notice otherwise."""
        self._check_open()
        with self._errors("read"):
            is_there = self._disk.look()
        self._tell()
        if not is_there:
            async with self._locked():
                pass
        if not self._has_named_strangers:
            await self._name_strangers()
        if self._follower is None and time.monotonic() >= self._look_after_s:
            try:
                await self._sweep()
            except StoreUnavailable as error:
                log.debug("ended leases stay for now: %s", error)

    async def _name_strangers(self) -> None:
        """Name files that are not the store's once, as far as the store can be locked."""
        self._has_named_strangers = True
        try:
            if self._disk.strangers():
                async with self._locked():  # Now nobody is drawing.
                    found = self._disk.strangers()
                if found:
                    log.warning(
                        "not written by the store in %s, and ignored: %s", self._disk.path, named(found)
                    )
        except StoreUnavailable as error:
            log.debug("files of others are not looked for: %s", error)

    async def _sweep(self) -> float:
        """End the leases of dead owners and those whose time is over; return when to look again, at the
        latest.

        That is a time of the monotonic clock.
        """
        now_s = time.monotonic()
        self._look_after_s = now_s + LOOKED_AFTER_EVERY_S
        leases = self._disk.contents.leases
        if not leases:
            return math.inf
        with self._errors("read"):
            ends_s = self._disk.ends()
        if self._ended(ends_s, now_s):
            async with self._locked():
                ends_s = self._disk.ends()
                for lease, why in self._ended(ends_s, time.monotonic()).items():
                    log.info("lease %x %s", lease, why)
                    self._end(lease, why)
        return min((ends_s[lease] for lease in leases if lease in ends_s), default=now_s)

    def _ended(self, ends_s: Mapping[int, float], now_s: float) -> dict[int, str]:
        """Lease -> why it has ended, of the ones that are still there."""
        contents = self._disk.contents
        dead = {owner for owner in contents.owners if is_dead(owner)}
        ended = {}
        for lease in contents.leases.values():
            if lease.owner in dead:
                ended[lease.lease] = "died"
            elif not 0 < ends_s.get(lease.lease, math.inf) - now_s <= lease.ttl_s:
                # Also what another boot's clock said.
                ended[lease.lease] = "expired"
        return ended

    def _end(self, lease: int, why: str) -> None:
        contents = self._disk.contents
        if lease in contents.leases:
            keys = sorted(contents.keys_of.get(lease, ()))
            self._disk.write({"end": lease, "why": why, "delete": keys})

    @asynccontextmanager
    async def _locked(self) -> AsyncGenerator[None]:
        """The right to write, with contents that are up to date. Nothing in it may wait."""
        self._check_open()
        with self._errors("written"):
            await self._lock()
            try:
                self._disk.settle()
                yield
            finally:
                self._disk.unlock()
                self._tell()

    async def _lock(self) -> None:
        give_up_s = time.monotonic() + LOCKED_WITHIN_S
        pause_s = _FIRST_PAUSE_S
        while not self._disk.try_lock():
            if time.monotonic() > give_up_s:
                where = f"the store in {self._disk.path}"
                raise StoreUnavailable(f"another process keeps {where} locked for {LOCKED_WITHIN_S:g} s")
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            self._check_open()

    @contextmanager
    def _errors(self, done: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or str(error)
            raise StoreUnavailable(f"the store in {self._disk.path} cannot be {done}: {reason}") from error

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreUnavailable(f"the store in {self._disk.path} is closed")

    def _tell(self) -> None:
        """Hand what has changed to the watches."""
        if not self._disk.has_contents:
            return
        events, self._disk.events = self._disk.events, []
        for watcher in self._watchers:
            watcher.take(events, self._disk.contents)

    def _fail(self, error: BaseException) -> None:
        """End the watches there are; the next one tries again."""
        self._follower = None
        for watcher in self._watchers:
            watcher.end(error)


def _owned(lease: int, owner: LeaseOwner | None) -> Record:
    return {"own": lease, "owner": owner.to_record() if owner else None}


def _check_text(transaction: Transaction) -> None:
    """Raise PermanentError for text that stands for no bytes, and for an empty key."""
    try:
        for text in (*transaction.puts, *transaction.puts.values()):
            bytes_of(text)
    except UnicodeEncodeError as error:
        raise PermanentError(f"a key or value is no text: {error.reason}") from error
    if "" in transaction.puts:
        raise PermanentError("a key must not be empty")
