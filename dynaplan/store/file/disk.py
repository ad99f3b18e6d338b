"""A store's files: opened, locked, read on and written, without waiting for anything.

::

    {directory}/v1/instances/...     the picture: a file for each key
    {directory}/.dynaplan/
        journal/log                  every change, in order: the store itself
        lock                         held while writing; in it, what is drawn and until when each lease lives
        staging/                     files that are not in place yet
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

from dynaplan.store.file.contents import Record, StoreContents
from dynaplan.store.file.directory import open_store_directory
from dynaplan.store.file.log import LogDamaged, StoreLog, line_of, write_all
from dynaplan.store.file.marks import StoreMarks
from dynaplan.store.file.picture import KeyPicture
from dynaplan.store.file.strangers import strangers
from dynaplan.store.model import WatchEvent

log = logging.getLogger(__name__)

PRIVATE = ".dynaplan"
COMPACTED_ABOVE_BYTES = 256 * 1024
"""Bytes of records, beside twice the size of the header, above which the log is begun anew."""

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_READING_WRITING = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC


class StoreDisk:
    """The files of one store, and its contents. Methods raise OSError, ConfigError for an unsafe directory.

    ``events`` gathers what has changed for watches; None among them says that everything may have.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.journal_path = str(path / PRIVATE / "journal")
        self.events: list[WatchEvent | None] = []
        self._lock_path = str(path / PRIVATE / "lock")
        self._log_path = f"{self.journal_path}/log"
        self._was_open = False
        self._is_drawn = True
        self.opened = 0
        self._log: StoreLog | None = None
        self._contents: StoreContents | None = None
        self._directories: dict[str, int] = {}
        self._lock: int | None = None
        self._picture: KeyPicture | None = None

    @property
    def contents(self) -> StoreContents:
        """The keys and leases as they were last read from the log; only when it is open."""
        assert self._contents is not None
        return self._contents

    @property
    def marks(self) -> StoreMarks:
        """The marks beside the log; only when locked."""
        assert self._lock is not None
        return StoreMarks(self._lock)

    @property
    def picture(self) -> KeyPicture:
        """The key files, which are drawn from the log; only when they are open."""
        assert self._picture is not None
        return self._picture

    @property
    def has_contents(self) -> bool:
        """True once the store has been read."""
        return self._contents is not None

    def is_gone(self) -> bool:
        """Tell whether the store has been there, and is not any more."""
        return self._log is not None and not os.path.lexists(self._log_path)

    def ends(self) -> dict[int, float]:
        """Return lease -> until when it lives, in seconds of the monotonic clock."""
        try:
            fd = os.open(self._lock_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return {}
        try:
            return StoreMarks(fd).ends()
        finally:
            os.close(fd)

    def strangers(self) -> tuple[str, ...]:
        """Return the files in the directory that are not the store's."""
        return strangers(self.path, PRIVATE, self.contents.items)

    def look(self) -> bool:
        """Read what others have written. False when the store is not there, or is damaged: lock it, then."""
        try:
            if self._log is None or not self._log.is_at(self._log_path):
                self._read_to_the_end()
                self._open_log()
            self._read_on()
        except (FileNotFoundError, LogDamaged):
            return False
        return True

    def try_lock(self) -> bool:
        """Take the right to write, on files that are made if need be; False while another process has it."""
        while True:
            if self._lock is None:
                self._open_files()
            assert self._lock is not None
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            try:
                if os.path.samestat(os.stat(self._lock_path, follow_symlinks=False), os.fstat(self._lock)):
                    return True
            except FileNotFoundError:
                pass
            # The directory was removed, or replaced by another one.
            self._close_files()

    def unlock(self) -> None:
        """Give the right to write back."""
        if self._lock is not None:
            # Not by closing: a child that is being started shares the descriptor for a moment.
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    def settle(self) -> None:
        """Bring the contents up to date, and finish or undo what a killed writer began; only when locked."""
        if not self.look():
            self._begin_anew()
        self.picture.discard()
        drawn = self.marks.drawn()
        if drawn == 0:
            self._renew_all()
        self._is_drawn = drawn == self.contents.number
        if not self._is_drawn:
            self._draw_the_rest(drawn)

    def write(self, change: Record) -> None:
        """Add a record to the log, and draw it; only when locked and settled."""
        assert self._log is not None
        contents, picture = self.contents, self.picture
        puts, gone = contents.keys_in(change)
        try:
            staged = picture.stage(puts)
            self._log.append({"number": contents.number + 1, **change})
        except OSError:
            picture.discard()
            raise
        self._read_on()
        self._draw(staged, gone)
        if self._log.offset > 2 * self._log.header_size + COMPACTED_ABOVE_BYTES:
            self._compact()

    def renew(self, lease: int) -> None:
        """Let a lease begin its time again, and its files seem to be new; only when locked and settled."""
        held = self.contents.leases[lease]
        self.marks.renew(held.slot, lease, time.monotonic() + held.ttl_s)
        if missing := self.picture.touch(self.contents.keys_of.get(lease, ())):
            self._draw(self.picture.stage({key: self.contents.items[key].value for key in missing}), ())

    def close(self) -> None:
        """Close the descriptors of log, lock and directories; the next call opens them again."""
        self._close_files()
        if self._log is not None:
            self._log.close()
            os.close(self._directories.pop("journal"))
            self._log = None

    def _read_on(self) -> None:
        assert self._log is not None
        for record in self._log.read_on():
            self.events += self.contents.apply(record)

    def _read_to_the_end(self) -> None:
        """Read what the former log still holds: then the new one goes on where it ended."""
        try:
            if self._log is not None:
                self._read_on()
        except LogDamaged as error:
            log.debug("the former log ends early: %s", error)

    def _open_log(self) -> None:
        """Open the log that is there now, and go on with it if it continues the former one."""
        self._safe_root()
        directory = os.open(self.journal_path, _DIRECTORY)
        try:
            opened = StoreLog(directory, "log")
        except BaseException:
            os.close(directory)
            raise
        former, self._log = self._log, opened
        if former is not None:
            former.close()
            os.close(self._directories.pop("journal"))
        self._directories["journal"] = directory
        self.opened += 1
        known, header = self._contents, opened.header
        if known and (known.identity, known.number) == (header["identity"], header["number"]):
            return
        self._contents = StoreContents(header)
        self.events.append(None)

    def _safe_root(self) -> None:
        """Check the directory, without making it."""
        if not os.path.lexists(self.path):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self.path))
        os.close(open_store_directory(self.path))

    def _open_files(self) -> None:
        """Open all that a writer needs, and make what is missing; the log is not touched."""
        try:
            root = open_store_directory(self.path, makes_parents=not self._was_open)
            self._directories["root"] = root
            private = self._directories["private"] = _made_directory(root, PRIVATE)
            staging = self._directories["staging"] = _made_directory(private, "staging")
            os.close(_made_directory(private, "journal"))
            self._lock = os.open("lock", _READING_WRITING, 0o600, dir_fd=private)
        except BaseException:
            self._close_files()
            raise
        self._picture = KeyPicture(root, staging, str(self.path))
        self._was_open = True

    def _close_files(self) -> None:
        for name in ("root", "private", "staging"):
            if name in self._directories:
                os.close(self._directories.pop(name))
        if self._lock is not None:
            os.close(self._lock)
        self._lock = self._picture = None

    def _begin_anew(self) -> None:
        """Make a log where none is, or where it is damaged: then with what could be read, set aside."""
        contents: Record = {"number": 0, "leases": [], "items": []}
        if os.path.lexists(self._log_path):
            kept = f"damaged-{secrets.token_hex(4)}"
            os.rename(self._log_path, str(self.path / PRIVATE / kept))
            if self._contents is not None:
                contents = self._contents.header()
            log.error("the log of the store in %s was damaged; it is kept as %s/%s", self.path, PRIVATE, kept)
        self.marks.set_drawn(0)
        # Another identity: each registration is written again.
        self._put_log({**contents, "identity": secrets.token_hex(8)})
        if not self.look():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._log_path)

    def _put_log(self, header: Record) -> None:
        staging = self._directories["staging"]
        fd = os.open("log", _NEW, 0o600, dir_fd=staging)
        try:
            write_all(fd, line_of(header))
        finally:
            os.close(fd)
        os.rename("log", self._log_path, src_dir_fd=staging)

    def _compact(self) -> None:
        """Begin the log anew with the same contents: readers go on in it without a gap."""
        if not self._is_drawn:
            return  # What is not drawn yet is known from the log alone.
        try:
            self._put_log(self.contents.header())
        except OSError as error:
            log.debug("the log in %s grows on: %s", self.path, error)
            return
        self.look()

    def _renew_all(self) -> None:
        """Give every lease its whole time: somebody has removed the file in which it stood."""
        now_s = time.monotonic()
        for lease in self.contents.leases.values():
            self.marks.renew(lease.slot, lease.lease, now_s + lease.ttl_s)

    def _draw(self, staged: Mapping[str, str], gone: tuple[str, ...]) -> None:
        """Put the files of the last record in place; the next writer does, where the disk does not allow
        it.
        """
        try:
            self.picture.unveil(staged, gone)
            if self._is_drawn:
                self.marks.set_drawn(self.contents.number)
        except OSError as error:
            self._not_drawn(error)

    def _draw_the_rest(self, drawn: int) -> None:
        """Draw what a killed writer, or one without space, has written to the log only."""
        assert self._log is not None
        contents = self.contents
        keys = {item.key for item in contents.items.values() if item.revision > drawn}
        if drawn < self._log.header["number"]:
            keys = set(contents.items)
        gone: set[str] = set()
        for record in self._log.records_after(drawn):
            gone.update(record.get("put", ()), record.get("delete", ()))
        try:
            staged = self.picture.stage({key: contents.items[key].value for key in keys})
        except OSError as error:
            self._not_drawn(error)
            return
        self._is_drawn = True
        self._draw(staged, tuple(gone - contents.items.keys()))

    def _not_drawn(self, error: OSError) -> None:
        self._is_drawn = False
        log.warning("the key files in %s are not up to date: %s", self.path, error.strerror)


def _made_directory(above: int, name: str) -> int:
    try:
        os.mkdir(name, 0o700, dir_fd=above)
    except FileExistsError:
        pass
    return os.open(name, _DIRECTORY, dir_fd=above)
