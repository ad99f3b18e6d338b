"""Owners of leases: which of them live, and a notice when one dies."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection
from functools import cache

from dynaplan.process.identity import LeaseOwner
from dynaplan.process.process_table import boot_id, identify, identity_of, is_alive


def this_process() -> LeaseOwner:
    """Return this process as an owner."""
    return _owner(os.getpid())


@cache
def _owner(pid: int) -> LeaseOwner:
    try:
        pid_namespace = os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # the kernel does not show it
        pid_namespace = 0
    return LeaseOwner(identity_of(pid), pid_namespace)


def is_visible(owner: LeaseOwner) -> bool:
    """Tell whether the owner's pid means a process in this process's pid namespace."""
    return owner.pid_namespace == this_process().pid_namespace


def is_dead(owner: LeaseOwner) -> bool:
    """Tell whether the owner is known to be gone. One whose pid is not visible from here is not."""
    if owner.process.boot_id != boot_id():
        return True
    return is_visible(owner) and not is_alive(owner.process)


class OwnerWatcher:
    """Watches the processes that own leases, by pidfd: ``on_death`` is called as soon as one ends.

    ``are_all_watched`` is False when some visible owner has no pidfd: then the caller has to poll.
    """

    def __init__(self, on_death: Callable[[LeaseOwner], None]) -> None:
        self._on_death = on_death
        self._descriptors: dict[LeaseOwner, int] = {}
        self.are_all_watched = True

    def follow(self, owners: Collection[LeaseOwner]) -> None:
        """Watch exactly these processes for their end; ``are_all_watched`` is False where one cannot be."""
        for owner in self._descriptors.keys() - set(owners):
            self._unwatch(owner)
        self.are_all_watched = True
        for owner in set(owners) - self._descriptors.keys() - {this_process()}:
            if is_visible(owner):
                self._watch(owner)

    def close(self) -> None:
        """Close the descriptor of every process."""
        for owner in tuple(self._descriptors):
            self._unwatch(owner)

    def _watch(self, owner: LeaseOwner) -> None:
        try:
            fd = os.pidfd_open(owner.process.pid)
        except ProcessLookupError:
            self._on_death(owner)
            return
        except OSError:
            self.are_all_watched = False
            return
        if identify(owner.process.pid) != owner.process.started_at:
            os.close(fd)
            if is_dead(owner):
                self._on_death(owner)
            else:  # /proc hides it (hidepid)
                self.are_all_watched = False
            return
        self._descriptors[owner] = fd
        asyncio.get_running_loop().add_reader(fd, self._ended, owner)

    def _ended(self, owner: LeaseOwner) -> None:
        # Readable from now on; the owner stays in the table, so that it is not watched again.
        asyncio.get_running_loop().remove_reader(self._descriptors[owner])
        self._on_death(owner)

    def _unwatch(self, owner: LeaseOwner) -> None:
        fd = self._descriptors.pop(owner)
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)
