"""Port leases: loopback ports with one owner each on the whole machine, before a server listens on them.

An engine gets its ports on its command line and binds them seconds or minutes later; until then nothing
keeps two engines off each other but these leases.
"""

from __future__ import annotations

import os
import random
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dynaplan.process.node_directory import HINT, open_node_directory, remove_unlocked, try_lock, unlock
from dynaplan.util.errors import DeploymentError
from dynaplan.util.sockets import MIN_PORT, is_free, quiet_ports

_PREFIX = "port-"


@dataclass
class PortLease:
    """Consecutive ports that are ours until ``close``, and as long as a child that got ``descriptors`` lives.

    A child gets them by ``subprocess.Popen(..., pass_fds=lease.descriptors)`` or alike. A context manager.
    """

    ports: tuple[int, ...]
    descriptors: tuple[int, ...]
    directory: Path

    def close(self) -> None:
        """Give the ports back; nothing happens the second time."""
        held, self.descriptors = dict(zip(self.ports, self.descriptors, strict=False)), ()
        if not held:
            return
        try:
            directory = open_node_directory(self.directory)
        except (OSError, DeploymentError):
            for descriptor in held.values():
                os.close(descriptor)
            return
        for port, descriptor in held.items():
            unlock(directory, _file_name(port), descriptor)
        os.close(directory)

    def __enter__(self) -> PortLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def lease_port(port: int, directory: Path) -> PortLease:
    """Lease that one port of this machine.

    Raises DeploymentError when it is leased, another process listens on it, or the directory cannot be used.
    """
    with _opened(directory) as opened:
        if descriptors := _lock_all(opened, range(port, port + 1)):
            return PortLease((port,), descriptors, directory)
    raise DeploymentError(
        f"port {port} is in use by another program or model",
        hint=f"See what listens with `ss -ltnp sport = :{port}`, or have the port leased: ${{PORT}}.",
    )


def lease_ports(count: int, directory: Path, *, avoided: Collection[int] = ()) -> PortLease:
    """Lease ``count`` consecutive free ports of 127.0.0.1 among all deployments that share the directory.

    The ports lie outside the kernel's range for outgoing connections; none is one of ``avoided``, or leased
    or listened on by another process. Raises DeploymentError when there are none or the directory cannot be
    used.
    """
    if count == 0:
        return PortLease((), (), directory)
    with _opened(directory) as opened:
        _remove_unlocked_files(opened)
        for first in _first_ports(count):
            ports = range(first, first + count)
            if not any(port in avoided for port in ports) and (descriptors := _lock_all(opened, ports)):
                return PortLease(tuple(ports), descriptors, directory)
    raise DeploymentError(
        f"no {count} free loopback ports in a row were found",
        hint=f"Expected some from {MIN_PORT} on; see what listens with `ss -ltn`.",
    )


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    """Open the directory of leases; raises DeploymentError for whatever fails in it."""
    try:
        opened = open_node_directory(directory)
        try:
            yield opened
        finally:
            os.close(opened)
    except OSError as error:
        raise DeploymentError(f"cannot lease ports in {directory}: {error.strerror}", hint=HINT) from error


def _lock_all(directory: int, ports: range) -> tuple[int, ...]:
    held: dict[int, int] = {}
    for port in ports:
        descriptor = try_lock(directory, _file_name(port))
        if descriptor is not None:
            held[port] = descriptor
        if descriptor is None or not is_free(port):
            break
    else:
        return tuple(held.values())
    for port, descriptor in held.items():
        unlock(directory, _file_name(port), descriptor)
    return ()


def _first_ports(count: int) -> Iterator[int]:
    """Yield the first ports of possible runs, each once, from a random one on."""
    lowest, highest = quiet_ports()
    room = highest - lowest - count + 2
    if room < 1:
        return
    offset = random.randrange(room)
    for step in range(room):
        yield lowest + (offset + step) % room


def _remove_unlocked_files(directory: int) -> None:
    """Remove the files of killed processes; their leases ended with them."""
    for name in os.listdir(directory):
        if name.startswith(_PREFIX):
            remove_unlocked(directory, name)


def _file_name(port: int) -> str:
    return f"{_PREFIX}{port}.lock"
