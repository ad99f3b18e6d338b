"""ZMQ sockets in an event loop, and how they are kept from other users.

Over ``ipc://`` a socket is a file in a directory that only its user can enter; a path that is too long for
the kernel is announced whole, and shortened by each side for itself. Over ``tcp://`` it speaks CURVE, with
keys that derive from the deployment's token: only a process that has the token knows the public key without
which no handshake begins, so that others can neither read nor forge events. Plain TCP is refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from socket import SOCK_STREAM, getaddrinfo
from typing import Any

import zmq
from zmq.utils import z85

from dynaplan.util.errors import ConfigError

IPC, TCP = "ipc://", "tcp://"
MOST_QUEUED = 10_000
LONGEST_REST_BYTES = 80
"""The longest name of a socket's file, with its directories: a descriptor's number stands before it."""

LONGEST_PATH_BYTES = 107
"""sun_path is 108 bytes long, with the closing zero."""

_DRAIN = 1000


class SocketReader:
    """Calls ``receive(frames)`` with each message of a socket, in the event loop."""

    def __init__(self, socket: zmq.Socket[bytes], receive: Callable[[list[bytes]], None]) -> None:
        self._socket = socket
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._descriptor = int(socket.getsockopt(zmq.FD))
        self._is_reading = False
        self.resume()

    def pause(self) -> None:
        """Leave messages in the socket, which drops new ones when it is full."""
        if self._is_reading:
            self._is_reading = False
            self._loop.remove_reader(self._descriptor)

    def resume(self) -> None:
        """Read again what is there and what comes; nothing happens when it reads or is closed."""
        if not self._is_reading and not self._socket.closed:
            self._is_reading = True
            self._loop.add_reader(self._descriptor, self._drain)
            self.look()

    def look(self) -> None:
        """Read soon: to be called after each other use of the socket, which may have taken its signal."""
        self._loop.call_soon(self._drain)

    def close(self) -> None:
        """Close the socket at once; what it has not sent is thrown away."""
        self.pause()
        self._socket.close(linger=0)

    def _drain(self) -> None:
        for _ in range(_DRAIN):
            if not self._is_reading:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._receive(frames)
        self.look()


class EventSockets:
    """Makes the sockets of one process, closed to other users."""

    def __init__(self, directory: Path, prefix: str, host: str, token: str) -> None:
        self._directory = directory
        self._prefix = prefix
        self._host = host
        self._token = token
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._directories: dict[Path, int] = {}
        self._descriptors: list[int] = []

    def bound(self, kind: int, name: str) -> tuple[zmq.Socket[bytes], str]:
        """Return a socket that others can connect to, and its address; raises OSError, ConfigError."""
        socket = self._context.socket(kind)
        socket.set_hwm(MOST_QUEUED)
        try:
            if self._host:
                self._use_keys(socket, is_server=True)
                return socket, self._bound_to_host(socket)
            check_private(self._directory)
            path = self._path(name)
            socket.bind(f"{IPC}{self._short(path)}")
        except BaseException:
            socket.close(linger=0)
            raise
        return socket, f"{IPC}{path}"

    def connected(self, kind: int, address: str, *, is_open: bool = False) -> zmq.Socket[bytes]:
        """Return a socket that is connected; raises ConfigError for an address that is not closed to others.

        ``is_open``: other programs' sockets, which speak plain TCP, are accepted.
        """
        if not address.startswith((IPC, TCP)):
            raise ConfigError(f"events at {address!r} cannot be read", hint="Expected ipc:// or tcp://.")
        is_tcp = address.startswith(TCP)
        if is_tcp and not self._token and not is_open:
            raise ConfigError(
                f"events at {address} cannot be read without the deployment's token", hint="Give the token."
            )
        socket = self._context.socket(kind)
        socket.set_hwm(MOST_QUEUED)
        socket.setsockopt(zmq.RECONNECT_IVL, 200)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5000)
        if is_tcp and not is_open:
            self._use_keys(socket, is_server=False)
        socket.ipv6 = is_tcp
        try:
            socket.connect(address if is_tcp else f"{IPC}{self._short(Path(address.removeprefix(IPC)))}")
        except OSError as error:  # zmq.ZMQError is one
            socket.close(linger=0)
            raise ConfigError(f"events at {address!r} cannot be read: {error}") from error
        return socket

    def close(self) -> None:
        """Close all sockets that are left."""
        self._context.destroy(linger=0)
        while self._descriptors:
            os.close(self._descriptors.pop())
        self._directories.clear()

    def _bound_to_host(self, socket: zmq.Socket[bytes]) -> str:
        """Bind to a free port of the host, whose name ZMQ does not look up; return the address for others."""
        address = str(getaddrinfo(self._host, 0, type=SOCK_STREAM)[0][4][0])
        socket.ipv6 = ":" in address
        port = socket.bind_to_random_port(f"{TCP}{_in_url(address)}")
        return f"{TCP}{_in_url(self._host)}:{port}"

    def _path(self, name: str) -> Path:
        """Return the whole path of a socket; its name is without the prefix where that would be too long."""
        stem = f"{self._prefix}.{name}"
        return self._directory / (stem if len(os.fsencode(stem)) <= LONGEST_REST_BYTES else name)

    def _short(self, path: Path) -> Path:
        """Return a path of at most ``LONGEST_PATH_BYTES`` to the same file, for this process only.

        It begins at the highest directory from which the rest is short: the lower ones may be removed and
        made again.
        """
        if len(os.fsencode(path)) <= LONGEST_PATH_BYTES:
            return path
        short = (each for each in reversed(path.parents) if len(_below(each, path)) <= LONGEST_REST_BYTES)
        directory = next(short, path.parent)
        known = self._directories.get(directory)
        if known is None or not os.path.samestat(os.fstat(known), os.stat(directory)):
            known = os.open(directory, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            self._directories[directory] = known
            self._descriptors.append(known)
        return Path(f"/proc/self/fd/{known}") / path.relative_to(directory)

    def _use_keys(self, socket: zmq.Socket[bytes], *, is_server: bool) -> None:
        public, secret = curve_keys(self._token)
        socket.curve_secretkey = secret
        socket.curve_publickey = public
        if is_server:
            socket.curve_server = True
        else:
            socket.curve_serverkey = public


def _below(directory: Path, path: Path) -> bytes:
    return os.fsencode(path.relative_to(directory))


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def refuse_open_tcp(host: str, token: str) -> None:
    """Raise ConfigError for sockets at a host without a token: anyone could read and forge events."""
    if host and not token:
        raise ConfigError(
            "events over TCP need a token, and there is none",
            hint="Give the deployment's token, or leave events to sockets of this machine.",
        )


def curve_keys(token: str) -> tuple[bytes, bytes]:
    """Return the CURVE keys, public and secret, that all processes with the token share."""
    digest = hashlib.blake2b(token.encode(), digest_size=32, person=b"dynaplan events").digest()
    secret = z85.encode(digest)
    return zmq.curve_public(secret), secret


def check_private(directory: Path) -> None:
    """Raise ConfigError unless the directory is ours alone; OSError when it is not there."""
    found: Any = directory.stat()
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"{directory} is not private: other users could read and forge events there",
            hint=f"chmod 700 {directory}, or choose another directory.",
        )
