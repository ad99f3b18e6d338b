"""The database of a store in a directory: SQLite in WAL mode, as one connection sees it.

::

    {directory}/sqlite/store.db, store.db-wal, store.db-shm
    {directory}/sqlite/changed       touched after each commit, for inotify
    {directory}/sqlite/renewals      when each lease expires

    table     a row is
    store     the store itself, the only row: its identity, counters of changes
    item      a key
    change    a change of a key, for watches; the oldest are deleted above ``HISTORY_BYTES``
    lease     a lease, its owner and its slot among the renewals

Every change of a key has a *position*, the bytes of all changes up to it. A watch that knows all up to a
position reads on from there, unless changes after it have been deleted (``forgotten``): then it starts over.

Renewals have a file of their own: they are no changes that wake watches, and each overwrites the last one, so
that a full disk does not end leases. Their times are of the machine's monotonic clock, which all processes
share, and which stands still while the machine is suspended.

The directory is private, on this machine's own disk or memory, and not behind a link.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import sqlite3
import stat
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from stat import S_IFREG
from urllib.parse import quote

from dynaplan.process.identity import LeaseOwner
from dynaplan.store.lease_owners import is_dead, this_process
from dynaplan.store.model import Deleted, KeyValue, Put, Transaction
from dynaplan.util.errors import ConfigError, DeploymentError, PermanentError

log = logging.getLogger(__name__)

HISTORY_BYTES = 4 * 1024 * 1024
ROW_BYTES = 64
"""What a change counts for beside its key and value."""

CHECKPOINT_PAGES = 256
"""Pages of 4 KiB in the WAL above which a writer copies them into the database."""

CACHE_KIB = 256

_VERSION = 1
_SCHEMA = (
    "CREATE TABLE store (identity TEXT, revision INTEGER, position INTEGER, forgotten INTEGER,"
    " lease_changes INTEGER)",
    "CREATE TABLE item (key BLOB PRIMARY KEY, value BLOB, revision INTEGER, lease INTEGER)",
    "CREATE INDEX item_of_lease ON item (lease)",
    "CREATE TABLE change (position INTEGER PRIMARY KEY, key BLOB, value BLOB, revision INTEGER,"
    " lease INTEGER)",
    "CREATE TABLE lease (lease INTEGER PRIMARY KEY, ttl_s INTEGER, slot INTEGER UNIQUE, owner TEXT)",
    f"PRAGMA user_version = {_VERSION}",
)
_RENEWAL = struct.Struct("<Qd")


@dataclass(frozen=True)
class Changes:
    """What has changed since a position of a store; ``items`` are all keys where that is not known."""

    identity: str
    position: int
    lease_changes: int
    events: tuple[Put | Deleted, ...] = ()
    items: tuple[KeyValue, ...] | None = None


@dataclass(frozen=True)
class Lease:
    """A lease that lives until ``ends_s`` of the monotonic clock; it ends earlier with its owner, if any."""

    lease: int
    ttl_s: int
    owner: LeaseOwner | None
    ends_s: float


class StoreDatabase:
    """One connection, which is opened when needed, and again when the directory was replaced.

    No method waits for another writer: sqlite3.OperationalError then, and the caller tries again. Each raises
    sqlite3.Error, OSError, DeploymentError for a directory that is not safe, or ConfigError for one of
    another version. Each that writes does so as a whole or not at all.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.sqlite_dir = directory / "sqlite"
        self.changed_file = self.sqlite_dir / "changed"
        self._database_path = str(self.sqlite_dir / "store.db")
        self._sql: sqlite3.Connection | None = None
        self._stat: os.stat_result | None = None
        self._is_read_only = False

    @property
    def file_id(self) -> tuple[int, int] | None:
        """The device and inode of the database that was opened last; None before."""
        return (self._stat.st_dev, self._stat.st_ino) if self._stat else None

    def is_removed(self) -> bool:
        """Tell whether the store has been there, and is not any more."""
        return self._stat is not None and not os.path.lexists(self._database_path)

    def identity(self) -> str:
        """Return the random mark that was made with the database."""
        return str(self._connection().execute("SELECT identity FROM store").fetchone()[0])

    def get(self, key: str) -> KeyValue | None:
        rows = self._connection().execute("SELECT * FROM item WHERE key = ?", (_bytes(key),))
        return next((_item(*row) for row in rows), None)

    def list(self, prefix: str) -> tuple[KeyValue, ...]:
        start, items = _bytes(prefix), []
        for row in self._connection().execute("SELECT * FROM item WHERE key >= ? ORDER BY key", (start,)):
            if not row[0].startswith(start):
                break
            items.append(_item(*row))
        return tuple(sorted(items, key=lambda item: item.key))

    def changes(self, identity: str, position: int) -> Changes:
        """Return what has changed since that position in the store's sequence of changes.

        All keys instead where the store has another identity, or has forgotten changes since then.
        """
        sql = self._connection()
        with _transaction(sql, "BEGIN"):
            now, last, forgotten, leases = sql.execute(
                "SELECT identity, position, forgotten, lease_changes FROM store"
            ).fetchone()
            if now != identity or not forgotten <= position <= last:
                items = tuple(_item(*row) for row in sql.execute("SELECT * FROM item ORDER BY key"))
                return Changes(now, last, leases, items=items)
            rows = sql.execute(
                "SELECT key, value, revision, lease FROM change WHERE position > ? ORDER BY position",
                (position,),
            )
            events = tuple(Deleted(_text(row[0])) if row[1] is None else Put(_item(*row)) for row in rows)
            return Changes(now, last, leases, events)

    def commit(self, transaction: Transaction) -> bool:
        """Carry the transaction out; False when its expectation fails.

        Raises PermanentError when its lease does not exist.
        """
        with self._writing() as sql:
            for key, revision in transaction.expected.items():
                if self._revision_of(sql, key) != revision:
                    return False
            if transaction.puts and transaction.lease:
                _require_lease(sql, transaction.lease)
            gone = [key for key in transaction.deletes if self._revision_of(sql, key)]
            if transaction.puts or gone:
                self._write(sql, transaction.puts, gone, transaction.lease)
        return True

    def grant(self, ttl_s: int) -> int:
        """Make a lease that this process owns."""
        lease = secrets.randbits(62) + 1
        with self._writing() as sql:
            (slot,) = sql.execute("SELECT coalesce(max(slot) + 1, 0) FROM lease").fetchone()
            self._renew(slot, lease, ttl_s)
            sql.execute("INSERT INTO lease VALUES (?, ?, ?, ?)", (lease, ttl_s, slot, _this_process()))
            _count_lease_change(sql)
        return lease

    def keep_alive(self, lease: int) -> float:
        """Renew the lease, and make this process its owner; return its time to live, 0.0 without it."""
        with self._writing() as sql:
            for ttl_s, slot, owner in sql.execute(
                "SELECT ttl_s, slot, owner FROM lease WHERE lease = ?", (lease,)
            ).fetchall():
                self._renew(slot, lease, ttl_s)
                if owner != _this_process():
                    self._set_owner(sql, lease, _this_process())
                return float(ttl_s)
        return 0.0

    def disown(self, leases: Iterable[int]) -> None:
        """Let these leases live until their time is over, even when this process ends before."""
        with self._writing() as sql:
            for lease in leases:
                self._set_owner(sql, lease, None)

    def revoke(self, lease: int) -> None:
        with self._writing() as sql:
            self._end(sql, lease)

    def expire_leases(self) -> tuple[Lease, ...]:
        """End the leases of dead owners and those whose time is over; return the others."""
        leases = self._leases(self._connection())
        if not _find_expired(leases):
            return leases
        with self._writing() as sql:
            for lease, why in _find_expired(self._leases(sql)).items():
                log.info("lease %x %s", lease, why)
                self._end(sql, lease)
            return self._leases(sql)

    def quarantine(self) -> None:
        """Move a database away that is damaged: the next call makes another one."""
        if self._stat is None or not self._is_in_place():
            return
        kept = self.directory / f"damaged-{secrets.token_hex(4)}"
        os.rename(self.sqlite_dir, kept)
        log.error(
            "the store in %s was damaged: it starts empty, and the damaged one is kept in %s",
            self.directory,
            kept,
        )

    def close(self) -> None:
        sql, self._sql = self._sql, None
        if sql is not None:
            sql.close()

    def _connection(self) -> sqlite3.Connection:
        """Return the open connection; opened anew where the file was replaced, or was read-only."""
        if self._sql is not None and self._is_in_place() and not self._is_read_only:
            return self._sql
        self.close()
        self._sql = sql = self._open()
        try:
            self._prepare(sql)
        except BaseException:
            self.close()
            raise
        return sql

    def _is_in_place(self) -> bool:
        assert self._stat is not None
        try:
            return os.path.samestat(os.stat(self._database_path, follow_symlinks=False), self._stat)
        except (FileNotFoundError, NotADirectoryError):
            return False

    def _open(self) -> sqlite3.Connection:
        root = open_store_directory(self.directory, makes_parents=self._stat is None)
        try:
            reject_old_layout(self.directory)
            self._is_read_only = bool(os.fstatvfs(root).f_flag & os.ST_RDONLY)
        finally:
            os.close(root)
        if not self._is_read_only:
            self.sqlite_dir.mkdir(mode=0o700, exist_ok=True)
            _make_file(self.changed_file)
            _make_file(self._database_path)
        self._stat = os.stat(self._database_path, follow_symlinks=False)
        # SQLite reads a WAL on a read-only disk only where its other files are there, which the last to close
        # has removed.
        how = "immutable=1" if self._is_read_only else "mode=rw"
        address = f"file:{quote(self._database_path)}?{how}"
        return sqlite3.connect(address, uri=True, timeout=0, isolation_level=None, check_same_thread=False)

    def _prepare(self, sql: sqlite3.Connection) -> None:
        """Choose how the connection works; make the tables in a new database."""
        sql.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
        (version,) = sql.execute("PRAGMA user_version").fetchone()
        if version not in (0, _VERSION):
            raise ConfigError(
                f"the directory of the file store, {self.directory}, is of another version of dynaplan",
                hint="Remove it when nothing uses it any more, or set DYN_FILE_KV to another one.",
            )
        if self._is_read_only:
            return
        if not version:
            # A new one is made without syncing: what a power failure leaves of it ``quarantine`` sets aside.
            sql.execute("PRAGMA synchronous = OFF")
        if sql.execute("PRAGMA journal_mode = WAL").fetchone() != ("wal",):
            raise sqlite3.OperationalError("SQLite's WAL needs a file system with shared memory")
        sql.execute(f"PRAGMA wal_autocheckpoint = {CHECKPOINT_PAGES}")
        if not version:
            _make_tables(sql)
        # From here on synced at checkpoints: a power failure loses the last commits, and damages nothing.
        sql.execute("PRAGMA synchronous = NORMAL")

    @contextmanager
    def _writing(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection inside a write transaction, and report the commit if the block has written.

        The block runs in the database that is at the path now: one replaced meanwhile is opened anew first.
        """
        while True:
            sql = self._connection()
            before = sql.total_changes
            with _transaction(sql, "BEGIN IMMEDIATE"):
                if is_in_place := self._is_in_place():
                    yield sql
            if is_in_place:
                if sql.total_changes != before:
                    self._notify()
                return

    def _notify(self) -> None:
        """Report the commit. Its write to the WAL would not do: that comes before others can see it."""
        try:
            os.utime(self.changed_file)
        except OSError as error:
            log.debug("a change is not reported: %s", error)

    def _revision_of(self, sql: sqlite3.Connection, key: str) -> int:
        rows = sql.execute("SELECT revision FROM item WHERE key = ?", (_bytes(key),))
        return next((int(revision) for (revision,) in rows), 0)

    def _write(
        self, sql: sqlite3.Connection, puts: Mapping[str, str], gone: Iterable[str], lease: int = 0
    ) -> None:
        """Write keys and delete others in one revision; forget the oldest changes."""
        revision, position = sql.execute("SELECT revision + 1, position FROM store").fetchone()
        rows = [(_bytes(key), _bytes(value), revision, lease) for key, value in puts.items()]
        sql.executemany("REPLACE INTO item VALUES (?, ?, ?, ?)", rows)
        lost = [(_bytes(key),) for key in gone]
        sql.executemany("DELETE FROM item WHERE key = ?", lost)
        for key, value, *others in (*rows, *((key, None, revision, 0) for (key,) in lost)):
            position += len(key) + len(value or b"") + ROW_BYTES
            sql.execute("INSERT INTO change VALUES (?, ?, ?, ?, ?)", (position, key, value, *others))
        forgotten = max(0, position - HISTORY_BYTES)
        sql.execute("DELETE FROM change WHERE position <= ?", (forgotten,))
        sql.execute(
            "UPDATE store SET revision = ?, position = ?, forgotten = ?", (revision, position, forgotten)
        )

    def _leases(self, sql: sqlite3.Connection) -> tuple[Lease, ...]:
        """Every lease; one whose renewal is not known, as its file was removed, gets its whole time again."""
        rows = sql.execute("SELECT lease, ttl_s, slot, owner FROM lease").fetchall()
        ends_s = self._renewals() if rows else {}
        leases = []
        for lease, ttl_s, slot, owner in rows:
            until_s = ends_s.get(lease) or self._renew(slot, lease, ttl_s)
            leases.append(Lease(lease, ttl_s, _owner(owner) if owner else None, until_s))
        return tuple(leases)

    def _set_owner(self, sql: sqlite3.Connection, lease: int, owner: str | None) -> None:
        if sql.execute("UPDATE lease SET owner = ? WHERE lease = ?", (owner, lease)).rowcount:
            _count_lease_change(sql)

    def _end(self, sql: sqlite3.Connection, lease: int) -> None:
        if not sql.execute("DELETE FROM lease WHERE lease = ?", (lease,)).rowcount:
            return
        _count_lease_change(sql)
        keys = [
            _text(key)
            for (key,) in sql.execute("SELECT key FROM item WHERE lease = ? ORDER BY key", (lease,))
        ]
        if keys:
            self._write(sql, {}, keys)

    def _renew(self, slot: int, lease: int, ttl_s: int) -> float:
        """Write the lease's end, ``ttl_s`` from now, to its slot of the renewals; return it."""
        ends_s = time.monotonic() + ttl_s
        with self._renewals_file(os.O_WRONLY | os.O_CREAT) as fd:
            os.pwrite(fd, _RENEWAL.pack(lease, ends_s), slot * _RENEWAL.size)
        return ends_s

    def _renewals(self) -> dict[int, float]:
        """Lease -> its end; leases that exist no more may be among them."""
        try:
            with self._renewals_file(os.O_RDONLY) as fd:
                data = os.pread(fd, os.fstat(fd).st_size, 0)
        except FileNotFoundError:
            return {}
        return dict(_RENEWAL.iter_unpack(data[: len(data) - len(data) % _RENEWAL.size]))

    @contextmanager
    def _renewals_file(self, flags: int) -> Iterator[int]:
        fd = os.open(self.sqlite_dir / "renewals", flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            yield fd
        finally:
            os.close(fd)


def reject_old_layout(directory: Path) -> None:
    """Raise ConfigError for the directory of a store as versions before SQLite made it."""
    if (directory / ".dynaplan" / "journal").is_dir():
        raise ConfigError(
            f"the directory of the file store, {directory}, has the form of an earlier version",
            hint=f"Stop what uses it, then `rm -r {directory}`: all that runs registers anew. "
            "Or set DYN_FILE_KV to another directory.",
        )


@contextmanager
def _transaction(sql: sqlite3.Connection, begin: str) -> Iterator[None]:
    sql.execute(begin)
    try:
        yield
        sql.execute("COMMIT")
    except BaseException:
        sql.rollback()
        raise


def _make_file(path: str | Path) -> None:
    """Make a file that only its owner can read; SQLite gives the files beside its own the same mode.

    It is not opened for that: closing a database's file gives up all locks that this process has on it.
    """
    try:
        os.mknod(path, 0o600 | S_IFREG)
    except FileExistsError:
        pass


def _make_tables(sql: sqlite3.Connection) -> None:
    with _transaction(sql, "BEGIN IMMEDIATE"):
        if sql.execute("PRAGMA user_version").fetchone() == (0,):
            for statement in _SCHEMA:
                sql.execute(statement)
            sql.execute("INSERT INTO store VALUES (?, 0, 0, 0, 0)", (secrets.token_hex(8),))


def _require_lease(sql: sqlite3.Connection, lease: int) -> None:
    if not sql.execute("SELECT 1 FROM lease WHERE lease = ?", (lease,)).fetchone():
        raise PermanentError("requested lease not found")


def _count_lease_change(sql: sqlite3.Connection) -> None:
    sql.execute("UPDATE store SET lease_changes = lease_changes + 1")


def _find_expired(leases: Iterable[Lease]) -> dict[int, str]:
    """Lease -> why it has ended, of those that have.

    One that ends later than a ttl from now was written by another boot's clock, and has expired, too.
    """
    dead = {owner for owner in {lease.owner for lease in leases} if owner and is_dead(owner)}
    now_s = time.monotonic()
    return {
        lease.lease: "died" if lease.owner in dead else "expired"
        for lease in leases
        if lease.owner in dead or not 0 < lease.ends_s - now_s <= lease.ttl_s
    }


def _this_process() -> str:
    return _record(this_process())


@lru_cache(8)
def _record(owner: LeaseOwner) -> str:
    return json.dumps(owner.to_record())


@lru_cache(1024)
def _owner(text: str) -> LeaseOwner:
    return LeaseOwner.from_record(json.loads(text))


def _bytes(text: str) -> bytes:
    """The bytes that a key or a value stands for; raises UnicodeEncodeError for half a character."""
    return text.encode(errors="surrogateescape")


def _text(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


def _item(key: bytes, value: bytes, revision: int, lease: int) -> KeyValue:
    return KeyValue(_text(key), _text(value), revision, lease)


HINT = (
    "Set DYN_FILE_KV to a directory of your own on this machine, mode 0700, or to one that is not there yet."
)

OTHERS_MAY = stat.S_IRWXG | stat.S_IRWXO

SHARED_FILE_SYSTEMS = re.compile(
    "9p|afs|beegfs|ceph|cifs|gfs2|glusterfs|gpfs|lustre|ncpfs|nfs4?|ocfs2|orangefs|pvfs2|smb[23]|smbfs"
    r"|fuse\.(?!fuse-overlayfs$|ext4$|ntfs-3g$).*"
)
"""Types of file systems to which several machines may write: locks and inotify do not reach all
of them. Some of FUSE, a file system in a process of this machine, have disks of its own."""


def open_store_directory(path: Path, *, makes_parents: bool = False) -> int:
    """Open the directory, made with mode 0700 if need be; return a descriptor that is not inherited.

    Raises DeploymentError for one that others can reach, and OSError for one that cannot be used now.
    """
    if makes_parents:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except OSError:
        # A read-only file system raises that although the directory exists.
        if not path.is_dir():
            raise
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (NotADirectoryError, FileNotFoundError) as error:
        if path.is_symlink() or path.exists():
            raise _unsafe_directory(path, "is a link or a file, not a directory") from error
        raise
    except OSError as error:
        if path.is_symlink():
            raise _unsafe_directory(path, "is a link") from error
        raise
    try:
        _check(path, os.fstat(fd))
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise _unsafe_directory(path, f"belongs to another user (uid {status.st_uid})")
    if status.st_mode & OTHERS_MAY:
        mode = stat.S_IMODE(status.st_mode)
        raise _unsafe_directory(
            path, f"can be reached by other users (mode {mode:04o}); `chmod 700` closes it"
        )
    kind = file_system_of(_mounts(), status.st_dev)
    if SHARED_FILE_SYSTEMS.fullmatch(kind):
        raise _unsafe_directory(path, f"is on a network file system ({kind}), where changes are not noticed")


def file_system_of(mountinfo: str, device: int) -> str:
    """Return the type of the mounted file system with that device number; empty when it is not listed.

    ``mountinfo`` is the text of ``/proc/self/mountinfo``: the third field of a line is ``major:minor``,
    and the type follows the field ``-``.
    """
    wanted = f"{os.major(device)}:{os.minor(device)}"
    for line in mountinfo.splitlines():
        mount, _, source = line.partition(" - ")
        fields = mount.split()
        if len(fields) > 2 and fields[2] == wanted and source:
            return source.split()[0]
    return ""


def _mounts() -> str:
    try:
        return Path("/proc/self/mountinfo").read_text(errors="replace")
    except OSError:
        return ""


def _unsafe_directory(path: Path, why: str) -> DeploymentError:
    """Make the error of a directory as it is at this moment; it may be right again in the next one."""
    return DeploymentError(f"the directory of the file store, {path}, {why}", hint=HINT)
