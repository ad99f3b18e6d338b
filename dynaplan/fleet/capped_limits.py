"""The power limits of GPUs that are ours, in a file for each GPU in the directory that deployments share.

A limit stays when everything is killed, and the next ``serve`` of any namespace sets it back: the cap of a
deployment counts while its arbiter runs. It does not outlive the boot of the machine, and neither does what
the file says. The files of other users, but for root, count for nothing: setting limits is root's.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dynaplan.contract.gpus import Gpu
from dynaplan.fleet.gpu_devices import PowerLimits, power_limits
from dynaplan.fleet.rules.power_caps import CappedLimit, with_cap
from dynaplan.fleet.rules.statefile import arbiter_of
from dynaplan.fleet.statefile_store import StatefileStore
from dynaplan.process.node_directory import node_dir, open_node_directory, try_lock, unlock
from dynaplan.process.process_table import boot_id, is_alive
from dynaplan.util.documents import number_field, object_field, parse_object, text_field, whole_field
from dynaplan.util.errors import DeploymentError, StatefileCorrupt

log = logging.getLogger(__name__)

DRIVER_TIMEOUT_S = 5.0
"""The longest time for which the start and the end wait for the driver, in seconds."""

LOCK_POLL_S = 0.05

LOCK, PREFIX, SUFFIX = "power-limits.lock", "power-limit.", ".json"

MAX_BYTES = 65536
"""The most bytes of a file that are read."""


@dataclass(frozen=True)
class LimitResults:
    """The limits that were set, in watts by GPU, and why others were not."""

    done: Mapping[int, float]
    failures: Mapping[int, str]


class DeploymentCaps:
    """The limits of GPUs, as far as one deployment caps them; ``deployment`` is the path of its statefile.

    ``indices`` are the GPUs whose limit is ours, or another deployment's, as of the last change.
    """

    def __init__(self, statefile: Path) -> None:
        self._deployment = str(statefile.absolute())
        self._directory = node_dir(os.environ)
        self.indices: frozenset[int] = frozenset()

    def own(self) -> tuple[Gpu, ...]:
        """Return the GPUs that this deployment has capped."""
        return tuple(gpu for gpu, limit in self._capped() if self._deployment in limit.caps)

    def gpus_to_set_back(self) -> tuple[Gpu, ...]:
        """Return the GPUs that were capped by this deployment, or by any that has ended."""
        return tuple(
            gpu
            for gpu, limit in self._capped()
            if self._deployment in limit.caps or any(map(_has_ended, limit.caps))
        )

    def _capped(self) -> tuple[tuple[Gpu, CappedLimit], ...]:
        try:
            directory = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return ()
        try:
            names = [
                name for name in os.listdir(directory) if name.startswith(PREFIX) and name.endswith(SUFFIX)
            ]
            found = [_read(directory, name) for name in sorted(names)]
        finally:
            os.close(directory)
        return tuple(filter(None, found))

    def change(
        self, driver: PowerLimits, gpus: Iterable[Gpu], cap_watts: float | None
    ) -> LimitResults | None:
        """Cap these GPUs, or with None end this deployment's caps.

        Returns None, and does nothing, while another deployment changes limits. Blocks as the driver does.
        Raises OSError and DeploymentError when the directory cannot be used.
        """
        present = {gpu.index: gpu for gpu in gpus}
        done, failures, indices = dict[int, float](), dict[int, str](), set[int]()
        with self._locked() as directory:
            if directory is None:
                return None
            for index, limit in driver.read().items():
                known = _known(directory, present[index])
                remembered, watts = with_cap(limit, known, self._deployment, cap_watts)
                try:
                    why = _change(directory, driver, present[index], known, remembered, watts)
                except OSError as error:
                    why = f"the limit of before cannot be written down: {error}"
                if why:
                    failures[index] = why
                elif watts is not None:
                    done[index] = watts
                holds = known if why else remembered
                if holds:
                    indices.add(index)
        self.indices = frozenset(indices)
        return LimitResults(done, failures)

    @contextmanager
    def _locked(self) -> Iterator[int | None]:
        """Yield a descriptor of the directory; None while another deployment has the lock."""
        directory = open_node_directory(self._directory)
        try:
            lock = try_lock(directory, LOCK)
            if lock is None:
                yield None
                return
            try:
                yield directory
            finally:
                unlock(directory, LOCK, lock)
        finally:
            os.close(directory)


def _change(
    directory: int,
    driver: PowerLimits,
    gpu: Gpu,
    known: CappedLimit | None,
    remembered: CappedLimit | None,
    watts: float | None,
) -> str:
    """Set a limit, written down before and as the driver took it; return why it was not set, or ""."""
    if watts is not None:
        if remembered:
            _write(directory, gpu, remembered)
        if why := driver.set(gpu.index, watts):
            _write(directory, gpu, known)
            return why
        if remembered and (limit := driver.read().get(gpu.index)):
            remembered = replace(remembered, set_watts=limit.watts)
    if watts is not None or remembered != known:
        _write(directory, gpu, remembered)
    return ""


def _file_name(gpu: Gpu) -> str:
    return f"{PREFIX}{gpu.uuid.replace('/', '_')}{SUFFIX}"


def _write(directory: int, gpu: Gpu, limit: CappedLimit | None) -> None:
    name = _file_name(gpu)
    if limit is None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=directory)
        return
    new = f"{name}.tmp"
    with suppress(FileNotFoundError):
        os.unlink(new, dir_fd=directory)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(new, flags, 0o644, dir_fd=directory), "w") as file:
        json.dump({"gpu": gpu.index, "uuid": gpu.uuid, "boot_id": boot_id(), **asdict(limit)}, file)
    os.replace(new, name, src_dir_fd=directory, dst_dir_fd=directory)


def _known(directory: int, gpu: Gpu) -> CappedLimit | None:
    """Return what is written down of a GPU, without the caps of deployments that have ended."""
    found = _read(directory, _file_name(gpu))
    if found is None or found[0].uuid != gpu.uuid:
        return None
    caps = {deployment: watts for deployment, watts in found[1].caps.items() if not _has_ended(deployment)}
    return replace(found[1], caps=caps)


def _has_ended(deployment: str) -> bool:
    """Tell whether the deployment with that statefile runs no more; False where nobody can say."""
    statefile = Path(deployment)
    try:
        if not statefile.parent.is_dir():
            return False  # another container's
        document = StatefileStore(statefile).read()
    except (OSError, StatefileCorrupt):  # another user's
        return False
    arbiter = arbiter_of(document) if document else None
    return arbiter is None or not is_alive(arbiter)


def _read(directory: int, name: str) -> tuple[Gpu, CappedLimit] | None:
    """Return what a file says; None where it cannot be read, is of another boot or of a user not trusted."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in (0, os.geteuid()):
            return None
        row = parse_object(os.read(fd, MAX_BYTES))
        if text_field(row, "boot_id") != boot_id():
            return None
        caps = object_field(row, "caps")
        return Gpu(whole_field(row, "gpu"), text_field(row, "uuid")), CappedLimit(
            number_field(row, "earlier_watts"),
            number_field(row, "asked_watts"),
            None if row.get("set_watts") is None else number_field(row, "set_watts"),
            {deployment: number_field(caps, deployment) for deployment in caps},
        )
    except (OSError, ValueError) as error:
        log.warning("the power limit of before in %s cannot be read: %s", name, error)
        return None
    finally:
        os.close(fd)


def set_back(statefile: Path) -> None:
    """End the caps of a deployment, if it has any, and of those that have ended without.

    Returns after ``DRIVER_TIMEOUT_S`` at most. What the driver refuses or holds up stays written down.
    """
    limits = DeploymentCaps(statefile)
    if capped := limits.gpus_to_set_back():
        setting = threading.Thread(target=_set_back, args=(limits, capped), daemon=True)
        setting.start()
        setting.join(DRIVER_TIMEOUT_S)


def _set_back(limits: DeploymentCaps, gpus: tuple[Gpu, ...]) -> None:
    deadline_s = time.monotonic() + DRIVER_TIMEOUT_S
    try:
        while (changes := limits.change(power_limits(gpus), gpus, None)) is None:
            if time.monotonic() > deadline_s:
                log.warning("the power limits of before were not set back: another deployment changes them")
                return
            time.sleep(LOCK_POLL_S)
    except (OSError, DeploymentError) as error:
        log.warning("the power limits of before were not set back: %s", error)
        return
    for index, why in changes.failures.items():
        log.warning("the power limit of GPU %d was not set back: %s", index, why)
