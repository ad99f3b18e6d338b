"""The statefile on disk: read and replaced as a whole, under a lock."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from dynaplan.fleet.rules.statefile import Document, from_json, to_json
from dynaplan.process.process_table import identify
from dynaplan.util.errors import DeploymentError, StatefileCorrupt, StatefileUnwritable

CLEANUP_TIMEOUT_S = 5.0
"""Longest time in which another process clears up what a killed ``serve`` has left."""

_LOCK_POLL_S = 0.02


class DocumentStore(Protocol):
    """One JSON document, the statefile, replaced as a whole."""

    def read(self) -> Document | None:
        """Return the document, None when there is none; raises StatefileCorrupt."""
        ...

    def write(self, document: Document) -> None:
        """Replace the document as a whole; raises StatefileUnwritable, and the old one stays then."""
        ...

    def remove(self) -> None:
        """Delete the document; nothing happens when there is none."""
        ...

    def set_aside(self) -> Path:
        """Move a document that cannot be read out of the way; return its new path."""
        ...


def state_dir(environ: Mapping[str, str]) -> Path:
    """Return the statefiles' directory: ``DYN_LOCAL_STATE_DIR``, or ``~/.dynamo/state``.

    ``~`` is the home directory of that environment, which may be another process's.
    """
    home = Path(environ.get("HOME") or Path.home())
    chosen = environ.get("DYN_LOCAL_STATE_DIR")
    if not chosen:
        return home / ".dynamo" / "state"
    return (home / chosen[2:] if chosen.startswith("~/") else Path(os.path.expanduser(chosen))).absolute()


def statefile_path(environ: Mapping[str, str], namespace: str) -> Path:
    return state_dir(environ) / f"{namespace}.json"


class StatefileStore:
    """One statefile. Readers need no lock: they always see a whole document.

    There is no previous copy: an old document names GPUs and processes that may have changed hands. A
    document that cannot be read is set aside for its owner to look at.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> Document | None:
        """Return the document, None when there is none; raises StatefileCorrupt, with path and reason."""
        try:
            return from_json(self.path.read_text())
        except FileNotFoundError:
            return None
        except UnicodeDecodeError as error:
            raise StatefileCorrupt(f"{self.path}: it is not text: {error.reason}") from None
        except StatefileCorrupt as error:
            raise StatefileCorrupt(f"{self.path}: {error}") from None
        except OSError as error:
            raise StatefileCorrupt(f"{self.path}: {error.strerror}") from None

    def write(self, document: Document) -> None:
        """Replace the document: afterwards it is on the disk as a whole, or the former one still is.

        Raises StatefileUnwritable when the disk is full, read-only or forbidden.
        """
        with self._errors(), self._lock():
            self._replace(document)

    def remove(self) -> None:
        if not self.path.parent.exists():
            return
        with self._errors(), self._lock():
            for path in (self.path, self._temporary, self._lock_path):
                path.unlink(missing_ok=True)

    def set_aside(self) -> Path:
        """Move a statefile that cannot be read to ``{namespace}.json.corrupt``; return its new path."""
        aside = self.path.with_name(self.path.name + ".corrupt")
        with self._errors():
            os.replace(self.path, aside)
        return aside

    @property
    def _temporary(self) -> Path:
        return self.path.with_name(self.path.name + ".tmp")

    @property
    def _lock_path(self) -> Path:
        return self.path.with_suffix(".lock")

    def _replace(self, document: Document) -> None:
        self._temporary.unlink(missing_ok=True)
        fd = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            with open(fd, "w") as file:
                file.write(to_json(document))
                file.flush()
                os.fsync(fd)
            os.replace(self._temporary, self.path)
        except OSError:
            self._temporary.unlink(missing_ok=True)
            raise
        directory = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    @contextmanager
    def _lock(self) -> Iterator[None]:
        _make_private(self.path.parent)
        fd = _open_locked(self._lock_path, fcntl.LOCK_EX)
        try:
            yield
        finally:
            os.close(fd)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StatefileUnwritable(
                f"cannot write the statefile {self.path}: {error.strerror}",
                hint="Free space or give write permission there, or set DYN_LOCAL_STATE_DIR.",
            ) from error


class NamespaceLock:
    """The right to run a namespace on this machine: held while ``serve`` lives, gone with its process.

    It is a file of its own, ``{namespace}.serve.lock``: ``{namespace}.lock`` is held for single writes
    only, also by Dynamo's tools, so the fleet plugin may not wait for a ``serve`` that holds it.
    """

    def __init__(self, path: Path, owner_pid: int = 0) -> None:
        """``path`` is the statefile's; ``owner_pid`` is named to others, by default this process."""
        self.path = path.with_suffix(".serve.lock")
        self._owner_pid = owner_pid or os.getpid()
        self._fd: int | None = None

    def acquire(self) -> None:
        """Take the lock; raises DeploymentError, naming the holder, or StatefileUnwritable without access.

        Where the holder has ended, and is still being cleared up after, it waits for that.
        """
        try:
            _make_private(self.path.parent)
            fd = self._locked()
        except BlockingIOError:
            namespace = self.path.name.removesuffix(".serve.lock")
            raise DeploymentError(
                f"namespace {namespace} is already running here (pid {self.holder()})",
                hint="Stop it with `dynaplan stop`, or choose another one with --namespace.",
            ) from None
        except OSError as error:
            raise self._unusable(error) from error
        self._fd = fd
        try:
            os.ftruncate(fd, 0)
            os.write(fd, str(self._owner_pid).encode())
        except OSError as error:
            self.release()
            raise self._unusable(error) from error

    def _locked(self) -> int:
        until_s = time.monotonic() + CLEANUP_TIMEOUT_S
        while True:
            try:
                return _open_locked(self.path, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = self.holder()
                if not holder or identify(holder) is not None or time.monotonic() >= until_s:
                    raise
            time.sleep(_LOCK_POLL_S)

    def _unusable(self, error: OSError) -> StatefileUnwritable:
        return StatefileUnwritable(
            f"cannot use {self.path}: {error.strerror}",
            hint="Free space or give write permission there, or set DYN_LOCAL_STATE_DIR.",
        )

    def fileno(self) -> int:
        """Return the descriptor that the lock is tied to, for a process that is to hold it too."""
        assert self._fd is not None
        return self._fd

    def holder(self) -> int:
        """Return the pid of its present or last holder; 0 when that is not known."""
        try:
            return int(self.path.read_text())
        except (OSError, ValueError):
            return 0

    def release(self) -> None:
        """Give the lock back and remove its file; nothing happens when it is not held."""
        if self._fd is None:
            return
        self.path.unlink(missing_ok=True)
        os.close(self._fd)
        self._fd = None

    def __enter__(self) -> NamespaceLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _make_private(directory: Path) -> None:
    """Make the directory for us alone; one that exists already is left as it is."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)


def _open_locked(path: Path, how: int) -> int:
    """Lock the file that has this path now, not one removed meanwhile; return its descriptor."""
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, how)
            if path.exists() and os.path.samestat(os.fstat(fd), path.stat()):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
