"""The address of a component for other hosts, and what it takes to have one."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from dynaplan.store.instances import is_loopback
from dynaplan.util.errors import ConfigError
from dynaplan.util.sockets import bound_socket

EVERYWHERE = ("0.0.0.0", "::", "[::]")


@dataclass(frozen=True)
class Address:
    """A bound socket of the component's own server, and the host name or address that others know it by."""

    socket: socket.socket
    host: str


def reachable(host: str | None, *, has_token: bool, port: int = 0) -> Address | None:
    """Return the bound address of ``--advertise-host``; None for loopback, which needs nothing.

    ``port`` 0 takes a free one.

    Raises ConfigError without a token that was named: other hosts could not have one that is made here. So
    does a host that is not an address of this machine.
    """
    if not host or is_loopback(host):
        return None
    if host in EVERYWHERE:
        raise ConfigError(
            f"--advertise-host {host}: nobody can call that",
            hint="Expected a name or an address of this machine, as other hosts know it.",
        )
    if not has_token:
        raise ConfigError(
            f"--advertise-host {host}: other hosts reach it, so the namespace's token must be named",
            hint="Use --token-file, with the same file on every host: "
            "`(umask 077; openssl rand -hex 32 > FILE)` makes one.",
        )
    bare = host.strip("[]")
    try:
        address = socket.getaddrinfo(bare, 0, type=socket.SOCK_STREAM)[0][4][0]
        bound = bound_socket(str(address), port)
    except OSError as error:
        raise ConfigError(
            f"--advertise-host {host}{f', port {port}' if port else ''}: {error.strerror}",
            hint="Expected a name or an address of this machine, as other hosts know it"
            f"{', and a free port' if port else ''}.",
        ) from error
    return Address(bound, bare)
