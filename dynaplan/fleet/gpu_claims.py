"""Claims: which deployment on this machine uses which GPU, across namespaces and users.

One small file per claim in a directory that everybody may write to and where nobody may remove the
files of others (mode 1777). A claim names its deployment's arbiter, the process that stands for the
deployment (``serve`` or its supervisor), and counts while that runs. It belongs to the owner of its file, so
nobody can forge or end another's; claims left by a crash are ignored, and removed when the same user next
claims a GPU. Each deployment has simulated GPUs of its own; with ``DYNAPLAN_NODE_DIR`` deployments share
them, and compete for them as for real ones. What it cannot prevent: another user of the machine may claim
GPUs that it does not use, and the owner of the directory, the first user or root, may remove claims.
Containers keep off each other's GPUs only if they share the directory and the PID namespace of the machine.
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

from dynaplan.contract.gpus import SIMULATED_UUID
from dynaplan.fleet.statefile_store import state_dir
from dynaplan.process.identity import ProcessIdentity
from dynaplan.process.node_directory import HINT, NODE_VARIABLE, node_dir, open_node_directory
from dynaplan.process.port_holders import user_name
from dynaplan.process.process_table import environment_of, is_alive
from dynaplan.process.signals import signals_blocked
from dynaplan.util.documents import parse_object
from dynaplan.util.errors import DeploymentError

log = logging.getLogger(__name__)


MAX_SHOWN_NAMESPACE_CHARS = 80
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

    def held_by_others(self, uuids: Iterable[str]) -> dict[str, str]:
        """Return the GPUs that other running deployments have claimed: UUID -> description of the owner."""
        ...


class NodeClaims:
    """The claims of one arbiter. Methods raise DeploymentError when the directory is unusable or unsafe.

    systemd-tmpfiles or the like may delete the directory: ``held_by_others`` writes our claims again, unless
    somebody else has claimed the GPU meanwhile.
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
        self._simulated_suffix = "" if is_shared else _simulated_suffix_of(namespace)
        self._lock_timeout_s = lock_timeout_s
        self._claimed: set[str] = set()
        self._worker = worker

    def claim(self, uuids: Iterable[str]) -> set[str]:
        """Claim these GPUs; return the subset that is now ours."""
        with self._locked() as directory:
            self._remove_stale_claims(directory)
            of_others = self._claims_of_others(directory)
            obtained = {uuid for uuid in uuids if self._claim_key(uuid) not in of_others}
            for uuid in obtained:
                self._write(directory, self._claim_key(uuid))
        self._claimed |= {self._claim_key(uuid) for uuid in obtained}
        return obtained

    def release(self, uuids: Iterable[str]) -> None:
        """Give these GPUs back; claims of another running arbiter are left alone."""
        with self._locked() as directory:
            for name in map(self._claim_key, uuids):
                document = _read(directory, _claim_file_name(name, os.getuid()))
                if document is not None and not self._is_live_other(ProcessIdentity.from_record(document)):
                    os.unlink(_claim_file_name(name, os.getuid()), dir_fd=directory)
                self._claimed.discard(name)

    def held_by_others(self, uuids: Iterable[str]) -> dict[str, str]:
        """Return the GPUs that other running deployments have claimed: UUID -> description of the owner."""
        with self._locked() as directory:
            of_others = self._claims_of_others(directory)
            self._restore_claims(directory, of_others)
        return {uuid: of_others[name] for uuid in uuids if (name := self._claim_key(uuid)) in of_others}

    def _claim_key(self, uuid: str) -> str:
        """Return the name that a GPU is claimed by: a simulated one's has a suffix for its deployment."""
        return uuid + self._simulated_suffix if uuid.startswith(SIMULATED_UUID) else uuid

    def claim_files(self, uuids: Iterable[str]) -> list[tuple[Path, str]]:
        """Return the file of each claim, and the text that it contains while the claim is this arbiter's."""
        expected_text = json.dumps(asdict(self._arbiter))[1:-1]
        return [
            (self._directory / _claim_file_name(self._claim_key(uuid), os.getuid()), expected_text)
            for uuid in uuids
        ]

    def _remove_stale_claims(self, directory: int) -> None:
        """Remove this user's claims whose arbiter is dead."""
        for name in os.listdir(directory):
            document = _read(directory, name)
            if document is None or document["uid"] != os.getuid():
                continue
            arbiter = ProcessIdentity.from_record(document)
            if arbiter != self._arbiter and not is_alive(arbiter):
                with suppress(OSError):
                    os.unlink(name, dir_fd=directory)

    def _restore_claims(self, directory: int, of_others: Mapping[str, str]) -> None:
        """Write our vanished claims again; those that others have now (``of_others``) are lost."""
        intact = {
            uuid
            for uuid in self._claimed
            if self._is_ours(_read(directory, _claim_file_name(uuid, os.getuid())))
        }
        for uuid in sorted(self._claimed - intact):
            if uuid in of_others:
                log.error("our claim file for %s was deleted, and the GPU is now %s", uuid, of_others[uuid])
                self._claimed.discard(uuid)
                continue
            self._write(directory, uuid)
            log.warning("our claim file for %s in %s was deleted: written again", uuid, self._directory)

    def _is_ours(self, document: Mapping[str, Any] | None) -> bool:
        return document is not None and ProcessIdentity.from_record(document) == self._arbiter

    def _claims_of_others(self, directory: int) -> dict[str, str]:
        """Claim key -> description of the owner, for every claim that counts and is not ours."""
        of_others = {}
        for name in os.listdir(directory):
            document = _read(directory, name)
            if document is None:
                continue
            arbiter = ProcessIdentity.from_record(document)
            if self._is_live_other(arbiter):
                of_others[document["uuid"]] = _describe_owner(document, arbiter.pid)
        return of_others

    def _is_live_other(self, arbiter: ProcessIdentity) -> bool:
        return arbiter != self._arbiter and is_alive(arbiter)

    def _write(self, directory: int, uuid: str) -> None:
        """Replace our user's claim file of that GPU."""
        name = _claim_file_name(uuid, os.getuid())
        document = {"uuid": uuid, "namespace": self._namespace, "uid": os.getuid(), **asdict(self._arbiter)}
        if self._worker:
            document["worker"] = self._worker
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        # A signal between open and write would leave an empty file, which nobody's clean-up removes.
        with signals_blocked():
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
            message = f"cannot use the GPU claims in {self._directory}: {error.strerror}"
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


def live_claim_owners(directory: Path | None = None) -> dict[int, tuple[str, Path | None]]:
    """Return the running arbiters that have claims: pid -> description, and the directory of the statefile.

    Workers that claim for themselves are left out. The directory is None where the process may not be
    inspected, or where it is relative to the process's working directory.

    Returns {} on any error: used only for messages.
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
                namespace = str(document["namespace"])[:MAX_SHOWN_NAMESPACE_CHARS]
                where = _state_dir_of(arbiter.pid)
                found[arbiter.pid] = f"deployment {namespace!r} of {user_name(document['uid'])}", where
    finally:
        os.close(fd)
    return found


def _simulated_suffix_of(namespace: str) -> str:
    """Return the suffix, of user, state directory and namespace, that makes simulated GPUs' names unique."""
    owner = f"{os.getuid()} {state_dir(os.environ)}"
    return f"@{namespace}-{hashlib.sha256(owner.encode()).hexdigest()[:12]}"


def _state_dir_of(pid: int) -> Path | None:
    environment = environment_of(pid)
    chosen = environment.get("DYN_LOCAL_STATE_DIR", "/")
    return state_dir(environment) if "HOME" in environment and chosen[0] in "/~" else None


def _claim_file_name(uuid: str, uid: int) -> str:
    return f"{uuid.replace('/', '_')}.{uid}.json"


def _read(directory: int, name: str) -> dict[str, Any] | None:
    """Parse a claim file; None if it is invalid, or its owner does not match its name."""
    text, uid = _text_of(directory, name)
    try:
        document = parse_object(text)
        ProcessIdentity.from_record(document)
        owner_matches = name == _claim_file_name(document["uuid"], uid) and "namespace" in document
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return {**document, "uid": uid} if owner_matches else None


def _text_of(directory: int, name: str) -> tuple[bytes, int]:
    """Return the beginning of a file, and its owner's uid; b"" unless it is a plain file."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return b"", -1
    try:
        status = os.fstat(fd)
        return (os.read(fd, MAX_CLAIM_BYTES) if stat.S_ISREG(status.st_mode) else b""), status.st_uid
    finally:
        os.close(fd)


def _describe_owner(document: Mapping[str, Any], pid: int) -> str:
    """Return ``claimed by deployment 'two' (serve pid 123, user alice)``, or the like of a worker alone."""
    if document.get("worker"):
        worker = str(document["worker"])[:MAX_SHOWN_NAMESPACE_CHARS]
        return f"claimed by worker {worker!r} (pid {pid}, {user_name(document['uid'])})"
    namespace = str(document["namespace"])[:MAX_SHOWN_NAMESPACE_CHARS]
    return f"claimed by deployment {namespace!r} (serve pid {pid}, {user_name(document['uid'])})"
