"""Two hosts on this machine: network namespaces with a cable between them, each with a loopback of its own.

A plugin of pytest. They share the boot and the files, and nothing of the network: what listens on 127.0.0.1
of one cannot be reached from the other. Making them takes the rights of root and the command ``ip``; without
these, tests that ask for ``hosts`` are skipped.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from dynaplan.fleet.servers import find_etcd, find_nats_server
from tests.fakes.components import TOKEN_FILE, RunningComponent
from tests.fakes.polling import wait_until

T = TypeVar("T")
StartOn = Callable[..., RunningComponent]
"""Starts a component: a host, its command line, and by name the ``program``, variables of its environment,
and ``without`` for one that it lacks."""

ETCD_PORT, NATS_PORT = 2379, 4222
LEASE_TTL_S = 5

CLONE_NEWNET = 0x40000000
IP = shutil.which("ip", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or "ip"


@dataclass(frozen=True)
class Host:
    """One of the two: its network namespace, its address, and the name of its end of the cable."""

    name: str
    address: str
    cable: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """The beginning of a command line that runs the rest there, as the same process."""
        return (IP, "netns", "exec", self.name)

    def plug(self, is_in: bool) -> None:
        """Put its end of the cable in, or pull it out."""
        _ip("-n", self.name, "link", "set", self.cable, "up" if is_in else "down")

    async def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run the coroutine there: in a thread that has moved, in an event loop of its own."""

        def moved() -> T:
            with open(f"/run/netns/{self.name}") as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "setns")
            return asyncio.run(work())

        # A thread of its own, since it never comes back from there.
        with ThreadPoolExecutor(1) as pool:
            return await asyncio.get_running_loop().run_in_executor(pool, moved)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Make them, and take them away; raises OSError where that is not permitted."""
    hosts = tuple(
        Host(f"dp{os.getpid()}{side}", f"10.211.{os.getpid() % 250}.{number}", f"dp{os.getpid()}{side}")
        for number, side in enumerate("ab", 1)
    )
    one, other = hosts
    try:
        for host in hosts:
            _ip("netns", "add", host.name)
        _ip(
            *("link", "add", one.cable, "netns", one.name, "type", "veth"),
            *("peer", "name", other.cable, "netns", other.name),
        )
        for host in hosts:
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", host.cable)
            _ip("-n", host.name, "link", "set", "lo", "up")
            host.plug(True)
        yield one, other
    finally:
        for host in hosts:
            subprocess.run([IP, "netns", "del", host.name], capture_output=True, check=False)


def _ip(*arguments: str) -> None:
    try:
        subprocess.run([IP, *arguments], check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise OSError(f"ip {' '.join(arguments)}: {error.stderr.strip()}") from None


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    try:
        with two_hosts() as made:
            yield made
    except OSError as error:
        pytest.skip(f"two hosts cannot be made here: {error}")


@pytest.fixture
def host_servers(hosts: tuple[Host, Host], tmp_path: Path) -> Iterator[dict[str, str]]:
    """An etcd and a NATS server on the first host, for both; the variables that name them."""
    here = hosts[0]
    url = f"http://{here.address}:{ETCD_PORT}"
    etcd = (find_etcd()[0], f"--data-dir={tmp_path}/etcd", f"--listen-client-urls={url}", "--log-level=error")
    etcd += (f"--advertise-client-urls={url}", "--unsafe-no-fsync")
    nats = (find_nats_server(), "-js", "-sd", f"{tmp_path}/nats", "-a", here.address, "-p", str(NATS_PORT))
    with (tmp_path / "servers.txt").open("ab") as output:
        started = [
            subprocess.Popen([*here.prefix, *command], stdout=output, stderr=output)
            for command in (etcd, (*nats, "--auth", "a-token"))
        ]
    for port in (ETCD_PORT, NATS_PORT):
        reach = [*here.prefix, "bash", "-c", f"echo > /dev/tcp/{here.address}/{port}"]
        wait_until(lambda reach=reach: subprocess.run(reach, capture_output=True).returncode == 0)  # type: ignore[misc]
    yield {
        "ETCD_ENDPOINTS": url,
        "NATS_SERVER": f"nats://{here.address}:{NATS_PORT}",
        "NATS_AUTH_TOKEN": "a-token",
        "ETCD_LEASE_TTL": str(LEASE_TTL_S),
    }
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def start_on(host_servers: dict[str, str], tmp_path: Path) -> Iterator[StartOn]:
    made: list[RunningComponent] = []

    def start(
        host: Host, *arguments: str, without: str = "", program: str = "", **variables: str
    ) -> RunningComponent:
        directory = tmp_path / host.name  # a host has a home of its own, and a copy of the token
        directory.mkdir(exist_ok=True)
        token = directory / TOKEN_FILE
        token.touch(mode=0o600)
        token.write_text("a-token-of-the-namespace")
        environment = {name: value for name, value in host_servers.items() if name != without}
        environment |= {**variables, "DYNAPLAN_TOKEN_FILE": str(token)}
        component = RunningComponent(directory, environment, *arguments, "--namespace", "box")
        component.prefix = host.prefix
        component.program = program or component.program
        made.append(component)
        return component.spawn()

    yield start
    for each in made:
        each.kill()
