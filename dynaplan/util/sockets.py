"""TCP ports of this machine: bound sockets, and ports that are free."""

from __future__ import annotations

import errno
import os
import random
import socket
import stat
from functools import lru_cache
from ipaddress import ip_address
from pathlib import Path
from typing import Any

MIN_PORT = 10000
"""Ports below are left to well-known services."""

MAX_PORT = 65535

MIN_PORTS = 500
"""A smaller range of ports is not worth looking through."""

ATTEMPTS = 100

_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def bound_socket(host: str, port: int, *, is_shared: bool = False) -> socket.socket:
    """Bind a TCP socket, in non-blocking mode.

    ``port`` 0 takes a free one; ``is_shared`` lets several processes listen. A name is bound at its IPv4
    address, if it has one. Raises OSError when the port is taken, and its kind ``socket.gaierror`` for an
    unknown host.
    """
    family, address = _address_to_bind(host, port)
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
        bound.setblocking(False)
    except OSError:
        bound.close()
        raise
    return bound


def _address_to_bind(host: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, *_, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    return family, address


@lru_cache(maxsize=64)
def listens_on_loopback(host: str) -> bool:
    """Tell whether what listens on that name or address is reached from this host only.

    It judges the one address that ``bound_socket`` would bind; an unknown name is none.
    """
    try:
        return ip_address(_address_to_bind(host, 0)[1][0]).is_loopback
    except (OSError, ValueError):  # an unknown name, which cannot be listened on
        return False


def holding_socket(host: str, port: int) -> socket.socket:
    """Bind a TCP socket that keeps the port: for processes that inherit it, and for sockets bound as shared.

    It is bound without sharing, so that another program's port, shared or not, is never joined by accident,
    and opened for sharing afterwards. Raises as ``bound_socket`` does.
    """
    holder = bound_socket(host, port)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return holder


def socket_of_stdin(port: int, stdin: int = 0) -> socket.socket | None:
    """Take the socket that is this process's standard input, if it is a TCP socket bound to that port.

    Nothing this process starts inherits it: standard input is empty afterwards. None for any other input.
    """
    try:
        if not stat.S_ISSOCK(os.fstat(stdin).st_mode):
            return None
        found = socket.socket(fileno=os.dup(stdin))
    except OSError:
        return None
    is_tcp = found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM
    if not is_tcp or _is_connected(found) or found.getsockname()[1] != port:
        found.close()
        return None
    with open(os.devnull) as empty:
        os.dup2(empty.fileno(), stdin)
    return found


def _is_connected(connection: socket.socket) -> bool:
    try:
        connection.getpeername()
    except OSError:
        return False
    return True


def url_of(host: str, port: int, *, is_tls: bool = False) -> str:
    scheme = "https" if is_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


@lru_cache(maxsize=64)
def is_own_address(address: str) -> bool:
    """Tell whether that IP address is one of this host's; a name is none."""
    try:
        if ip_address(address).is_multicast:
            return False
        bound_socket(address, 0).close()
    except (OSError, ValueError):
        return False
    return True


def quiet_ports() -> tuple[int, int]:
    """Return the first and the last port of the range to choose from.

    It lies below the ephemeral range, from which the kernel takes ports for outgoing connections, where there
    is room, else above it. An ephemeral port could be given away between two starts of its server, even
    to a client that tries to reconnect to it, which would then talk to itself.
    """
    try:
        first, last = map(int, _EPHEMERAL_RANGE.read_text().split())
    except (OSError, ValueError):
        first, last = 32768, 60999
    if first - MIN_PORT >= MIN_PORTS:
        return MIN_PORT, first - 1
    if MAX_PORT - last >= MIN_PORTS:
        return last + 1, MAX_PORT
    return MIN_PORT, MAX_PORT


def is_free(port: int) -> bool:
    """Tell whether nobody listens on the loopback port, on this address or on all of them."""
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def free_port() -> int:
    """Return a loopback port that is free now, outside the ephemeral range; OSError when none is found."""
    lowest, highest = quiet_ports()
    for _ in range(ATTEMPTS):
        port = random.randint(lowest, highest)
        if is_free(port):
            return port
    raise OSError(errno.EADDRINUSE, "no free loopback port found")
