"""Claims: the GPUs that each deployment of this machine holds, of any namespace and user.

One small file per claim in a directory that everybody may write to and where nobody may remove the
files of others (mode 1777). A claim belongs to the user that its file belongs to, and counts as long as the
arbiter it names runs; so nobody can end another's claim, and what a crash has left counts for nothing. It is
removed when the same user next claims a GPU. Simulated GPUs are each deployment's own: they are shared, and
claimed from others, only where ``DYNAPLAN_NODE_DIR`` names the directory.
What it cannot prevent: another user of the machine may claim GPUs that it does not use, and the owner of
the directory, the first user or root, may remove claims. Containers keep off each other's GPUs only
if they share the directory and the pids of the machine.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from dynaplan.fleet.gpus import SIMULATED_UUID
from dynaplan.fleet.statefile_store import state_dir
from dynaplan.process.identity import ProcessIdentity
from dynaplan.process.node_directory import HINT, NODE_VARIABLE, node_dir, open_node_directory
from dynaplan.process.port_holders import user_name
from dynaplan.process.process_table import environment_of, is_alive
from dynaplan.process.signals import signals_held
from dynaplan.util.documents import parse_object
from dynaplan.util.errors import DeploymentError

log = logging.getLogger(__name__)


MAX_NAMESPACE = 80
"""The most characters of a namespace that are shown: another user may have written it."""

MAX_CLAIM_BYTES = 4096
"""The most bytes of a file that are read."""


class Claims(Protocol):
    """The claims of one deployment on GPUs of this machine, by UUID. Methods raise DeploymentError."""

    def claim(self, uuids: Iterable[str]) -> set[str]:
        """Claim these GPUs; return the subset that is now ours."""
        ...

    def release(self, uuids: Iterable[str]) -> None:
        """Give these GPUs back; nothing happens for one that is not this process's."""
        ...

    def foreign(self, uuids: Iterable[str]) -> dict[str, str]:
        """Return the subset that other living arbiters hold: UUID -> the holder, in words."""
        ...


class NodeClaims:
    """The claims of one arbiter. Methods raise DeploymentError when the directory is unusable or unsafe.

    A cleaner of temporary files may take the directory away: what this object has claimed and not released is
    claimed again at the next look, unless somebody else has claimed it meanwhile.
    ``worker`` is the name of a worker without a ``serve``, whose own process stands for the arbiter.
    """

    def __init__(
        self,
        arbiter: ProcessIdentity,
        namespace: str,
        directory: Path | None = None,
        lock_timeout_s: float = 5.0,
        worker: str = "",
    ) -> None:
        self._arbiter = arbiter
        self._namespace = namespace
        self._directory = directory or node_dir(os.environ)
        is_shared = directory is not None or bool(os.environ.get(NODE_VARIABLE))
        self._simulated_suffix = "" if is_shared else _suffix_of(namespace)
        self._lock_timeout_s = lock_timeout_s
        self._claimed: set[str] = set()
        self._worker = worker

    def claim(self, uuids: Iterable[str]) -> set[str]:
        """Claim these GPUs; return all but the ones that another living arbiter holds."""
        with self._locked() as directory:
            self._remove_void(directory)
            foreign = self._held(directory)
            obtained = {uuid for uuid in uuids if self._name(uuid) not in foreign}
            for uuid in obtained:
                self._write(directory, self._name(uuid))
        self._claimed |= {self._name(uuid) for uuid in obtained}
        return obtained

    def release(self, uuids: Iterable[str]) -> None:
        """Give these GPUs back; the claims of another living arbiter are left alone."""
        with self._locked() as directory:
            for name in map(self._name, uuids):
                document = _read(directory, _file_name(name, os.getuid()))
                if document is not None and not self._is_foreign(ProcessIdentity.from_record(document)):
                    os.unlink(_file_name(name, os.getuid()), dir_fd=directory)
                self._claimed.discard(name)

    def foreign(self, uuids: Iterable[str]) -> dict[str, str]:
        """Return the subset that other living arbiters hold: UUID -> the holder, in words."""
        with self._locked() as directory:
            held = self._held(directory)
            self._restore_claims(directory, held)
        return {uuid: held[name] for uuid in uuids if (name := self._name(uuid)) in held}

    def _name(self, uuid: str) -> str:
        """Return the name that a GPU is claimed by: a simulated one is named with its deployment."""
        return uuid + self._simulated_suffix if uuid.startswith(SIMULATED_UUID) else uuid

    def files(self, uuids: Iterable[str]) -> list[tuple[Path, str]]:
        """Return the file of each claim, and the text in it as long as the claim is this arbiter's."""
        mark = json.dumps(asdict(self._arbiter))[1:-1]
        return [(self._directory / _file_name(self._name(uuid), os.getuid()), mark) for uuid in uuids]

    def _remove_void(self, directory: int) -> None:
        """Remove what deployments of this user have left that were killed."""
        for name in os.listdir(directory):
            document = _read(directory, name)
            if document is None or document["uid"] != os.getuid():
                continue
            arbiter = ProcessIdentity.from_record(document)
            if arbiter != self._arbiter and not is_alive(arbiter):
                with suppress(OSError):
                    os.unlink(name, dir_fd=directory)

    def _restore_claims(self, directory: int, held: Mapping[str, str]) -> None:
        """Write claims of ours again that have vanished; those that others hold now (``held``) are lost."""
        there = {
            uuid for uuid in self._claimed if self._is_own(_read(directory, _file_name(uuid, os.getuid())))
        }
        for uuid in sorted(self._claimed - there):
            if uuid in held:
                log.error("the claim on %s had vanished, and meanwhile it is %s", uuid, held[uuid])
                self._claimed.discard(uuid)
                continue
            self._write(directory, uuid)
            log.warning("the claim on %s in %s had vanished: it is made again", uuid, self._directory)

    def _is_own(self, document: Mapping[str, Any] | None) -> bool:
        return document is not None and ProcessIdentity.from_record(document) == self._arbiter

    def _held(self, directory: int) -> dict[str, str]:
        """UUID -> holder of every claim that counts and is not ours."""
        held = {}
        for name in os.listdir(directory):
            document = _read(directory, name)
            if document is None:
                continue
            arbiter = ProcessIdentity.from_record(document)
            if self._is_foreign(arbiter):
                held[document["uuid"]] = _holder(document, arbiter.pid)
        return held

    def _is_foreign(self, arbiter: ProcessIdentity) -> bool:
        return arbiter != self._arbiter and is_alive(arbiter)

    def _write(self, directory: int, uuid: str) -> None:
        """Replace our user's claim file of that GPU."""
        name = _file_name(uuid, os.getuid())
        document = {"uuid": uuid, "namespace": self._namespace, "uid": os.getuid(), **asdict(self._arbiter)}
        if self._worker:
            document["worker"] = self._worker
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        # A file that a signal left without its text would be nobody's, and stay.
        with signals_held():
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=directory)
            fd = os.open(name, flags, 0o644, dir_fd=directory)
            with open(fd, "w") as file:
                os.fchmod(fd, 0o644)
                file.write(json.dumps(document))

    @contextmanager
    def _locked(self) -> Iterator[int]:
        """The directory, opened and locked against every other arbiter of the machine."""
        try:
            directory = open_node_directory(self._directory)
            try:
                self._lock(directory)
                yield directory
            finally:
                os.close(directory)
        except OSError as error:
            message = f"cannot keep deployments off each other's GPUs in {self._directory}: {error.strerror}"
            raise DeploymentError(message, hint=HINT) from error

    def _lock(self, directory: int) -> None:
        """Lock the directory itself, with a deadline: another user could hold it for ever."""
        deadline_s = time.monotonic() + self._lock_timeout_s
        while True:
            try:
                fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    raise
                time.sleep(0.01)


def claimants(directory: Path | None = None) -> dict[int, tuple[str, Path | None]]:
    """Return the living arbiters that have claims there: pid -> deployment and user in words, and a path.

    A worker that claims for itself is no arbiter. The path is the directory of its statefile; None where the
    process may not be inspected, or its environment has a path that is relative to where it runs.

    Whatever is in the way, a directory that is not there included, is "none": this is for messages only.
    """
    found: dict[int, tuple[str, Path | None]] = {}
    try:
        fd = os.open(
            directory or node_dir(os.environ), os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        )
    except OSError:
        return found
    try:
        for document in (_read(fd, name) for name in os.listdir(fd)):
            if (
                document is not None
                and not document.get("worker")
                and is_alive(arbiter := ProcessIdentity.from_record(document))
            ):
                namespace = str(document["namespace"])[:MAX_NAMESPACE]
                where = _state_dir_of(arbiter.pid)
                found[arbiter.pid] = f"deployment {namespace!r} of {user_name(document['uid'])}", where
    finally:
        os.close(fd)
    return found


def _suffix_of(namespace: str) -> str:
    """Return what tells a deployment's simulated GPUs from those of others: of its user, home and name."""
    owner = f"{os.getuid()} {state_dir(os.environ)}"
    return f"@{namespace}-{hashlib.sha256(owner.encode()).hexdigest()[:12]}"


def _state_dir_of(pid: int) -> Path | None:
    environment = environment_of(pid)
    chosen = environment.get("DYN_LOCAL_STATE_DIR", "/")
    return state_dir(environment) if "HOME" in environment and chosen[0] in "/~" else None


def _file_name(uuid: str, uid: int) -> str:
    return f"{uuid.replace('/', '_')}.{uid}.json"


def _read(directory: int, name: str) -> dict[str, Any] | None:
    """The claim in that file; None when it is none, or is not by the user that it says."""
    text, uid = _text_of(directory, name)
    try:
        document = parse_object(text)
        ProcessIdentity.from_record(document)
        is_own = name == _file_name(document["uuid"], uid) and "namespace" in document
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return {**document, "uid": uid} if is_own else None


def _text_of(directory: int, name: str) -> tuple[bytes, int]:
    """The beginning of a file, and the user that it belongs to; nothing of what is no plain file."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return b"", -1
    try:
        status = os.fstat(fd)
        return (os.read(fd, MAX_CLAIM_BYTES) if stat.S_ISREG(status.st_mode) else b""), status.st_uid
    finally:
        os.close(fd)


def _holder(document: Mapping[str, Any], pid: int) -> str:
    """Return ``claimed by deployment 'two' (serve pid 123, user alice)``, or the like of a worker alone."""
    if document.get("worker"):
        worker = str(document["worker"])[:MAX_NAMESPACE]
        return f"claimed by worker {worker!r} (pid {pid}, {user_name(document['uid'])})"
    namespace = str(document["namespace"])[:MAX_NAMESPACE]
    return f"claimed by deployment {namespace!r} (serve pid {pid}, {user_name(document['uid'])})"
