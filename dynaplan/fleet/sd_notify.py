"""Notices to the service manager that started this process: systemd's ``sd_notify``, without its library.

A notice is a datagram of lines ``NAME=value`` to the socket that ``NOTIFY_SOCKET`` names (sd_notify(3)).
"""

from __future__ import annotations

import socket
from collections.abc import MutableMapping

READY, STOPPING, ALIVE = "READY=1", "STOPPING=1", "WATCHDOG=1"
"""The states: it serves, it ends in order, it is not stuck."""


class ServiceManager:
    """Notifies the manager; does nothing where there is none. A manager that is gone costs nothing."""

    def __init__(self, address: str = "") -> None:
        self._address = "\0" + address[1:] if address.startswith("@") else address

    @classmethod
    def from_environ(cls, environ: MutableMapping[str, str]) -> ServiceManager:
        """Take the manager's address out of the environment: it is for this process, not for its children."""
        for name in ("WATCHDOG_USEC", "WATCHDOG_PID"):
            environ.pop(name, None)
        return cls(environ.pop("NOTIFY_SOCKET", ""))

    def notify(self, state: str, status: str = "") -> None:
        """Notify it of a state, with a line of words that ``systemctl status`` shows."""
        if not self._address:
            return
        lines = [state, *([f"STATUS={status}"] if status else [])]
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notices:
                notices.setblocking(False)
                notices.sendto("\n".join(lines).encode(), self._address)
        except OSError:
            return

    async def notify_alive(self) -> None:
        """Notify systemd that the event loop runs, as its watchdog expects."""
        self.notify(ALIVE)
