# mypy: disallow-untyped-calls=False
# (circus is not typed)
"""The watch over the deployment's directories: what vanishes is noticed, reported, and made again.

Three things may be taken away under a running deployment: the short link to the runtime directory (a logout,
a cleaner of temporary files), sockets in it, and the directory itself. Connections that are open go on in
all three cases; without this watch the next one would fail.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from dynaplan.fleet.arbiter import ServeArbiter
from dynaplan.fleet.launch import Launch
from dynaplan.fleet.runtime_dir import ensure_link, make_private_directory, write_private
from dynaplan.fleet.servers.embedded import ServerSpec
from dynaplan.util.errors import DeploymentError

log = logging.getLogger(__name__)

SOCKET_MISSED_CHECKS = 3
"""The number of checks in a row after which a server is started again whose socket was there and is not: one
that starts again by itself makes it."""


class DirectoryWatch:
    """Watches the link, the runtime directory and the sockets. ``report(line)`` shows the user a line."""

    def __init__(
        self,
        launch: Launch,
        servers: Sequence[ServerSpec],
        arbiter: ServeArbiter,
        report: Callable[[str], None],
    ) -> None:
        self._launch = launch
        self._servers = servers
        self._arbiter = arbiter
        self._report = report
        self._root = launch.runtime_dir
        self._identity = _identity(self._root)
        self._texts = {path: path.read_text() for path in self._files()}
        self._missed: dict[str, int] = {}
        self._trouble = ""

    async def check(self) -> None:
        """Check once, and make again what has vanished; report once what cannot be made again."""
        try:
            for line in [*self._link(), *self._directory(), *self._scratch(), *self._sockets()]:
                self._report(line)
            self._trouble = ""
        except (OSError, DeploymentError) as error:
            if str(error) != self._trouble:
                self._report(f"The runtime directory {self._root} cannot be made again: {error}")
            self._trouble = str(error)

    def _files(self) -> list[Path]:
        return [*self._root.glob("*.json"), *self._root.glob("*/*.conf")]

    def _link(self) -> list[str]:
        link = self._launch.address_dir
        if ensure_link(link, self._root):
            return [f"The runtime directory's link {link} had vanished: it is made again."]
        return []

    def _directory(self) -> list[str]:
        """Make the directory again, with new sockets, and servers with new data."""
        if self._identity == _identity(self._root):
            for path, text in self._texts.items():
                if not path.exists():
                    write_private(path, text)
            return []
        make_private_directory(self._root.parent)
        make_private_directory(self._root)
        for server in self._servers:
            make_private_directory(server.working_dir)
        for path, text in self._texts.items():
            write_private(path, text)
        for server in self._servers:
            self._arbiter.kill_process_of(f"{self._launch.namespace}_{server.name}")
        self._identity = _identity(self._root)
        names = " and ".join(server.name for server in self._servers)
        rest = f", and {names} start again, with new data" if names else ""
        return [f"The runtime directory {self._root} had vanished: it is made again{rest}."]

    def _scratch(self) -> list[str]:
        if self._launch.scratch_dir.is_dir():
            return []
        make_private_directory(self._launch.scratch_dir)
        return [f"The scratch directory {self._launch.scratch_dir} had vanished: it is made again."]

    def _sockets(self) -> list[str]:
        lines = []
        if any(not path.exists() for path in self._circus_sockets()):
            self._arbiter.listen_again()
            lines.append("circus' sockets had vanished: they are made again.")
        for server in self._servers:
            if server.socket is None or server.socket.exists():
                self._missed[server.name] = 0
                continue
            if server.name in self._missed:
                self._missed[server.name] += 1
            if self._missed.get(server.name) == SOCKET_MISSED_CHECKS:
                del self._missed[server.name]
                self._arbiter.kill_process_of(f"{self._launch.namespace}_{server.name}")
                lines.append(f"The socket of {server.name} had vanished: the server starts again.")
        return lines

    def _circus_sockets(self) -> list[Path]:
        endpoints = (self._launch.circus_endpoint, self._launch.circus_events)
        return [Path(each.removeprefix("ipc://")) for each in endpoints if each.startswith("ipc://")]


def _identity(directory: Path) -> tuple[int, int] | None:
    try:
        status = os.stat(directory, follow_symlinks=False)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
