"""Ports and turns at starting that have one owner on the whole machine."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dynaplan.engines.server.start_lock import bounded_start, exclusive_start
from dynaplan.process import port_leases
from dynaplan.process.node_directory import open_node_directory, try_lock
from dynaplan.process.port_leases import PortLease, lease_ports
from dynaplan.util.errors import DeploymentError
from tests.fakes.polling import eventually, wait_until

HOLD_PORTS = """
import sys
from pathlib import Path
from dynaplan.process import port_leases
port_leases.quiet_ports = lambda: tuple(map(int, sys.argv[2].split("-")))
lease = port_leases.lease_ports(2, Path(sys.argv[1]))
print(*lease.ports, flush=True)
sys.stdin.read()
"""

HOLD_GATE = """
import asyncio, sys
from pathlib import Path
from dynaplan.engines.server.start_lock import exclusive_start
async def main():
    async with exclusive_start(["GPU-b", "GPU-a"], Path(sys.argv[1])):
        print("in", flush=True)
        await asyncio.to_thread(sys.stdin.read)
asyncio.run(main())
"""

HOLD_PLACE = """
import asyncio, sys
from pathlib import Path
from dynaplan.engines.server.start_lock import bounded_start
async def main():
    async with bounded_start(10, Path(sys.argv[1]), lambda: 100):
        print("in", flush=True)
        await asyncio.to_thread(sys.stdin.read)
asyncio.run(main())
"""


@pytest.fixture
def node(tmp_path: Path) -> Path:
    return tmp_path / "node"


@pytest.fixture
def spawn(node: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    children: list[subprocess.Popen[str]] = []

    def start(program: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", program, str(node), *arguments]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        children.append(child)
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            if pipe:
                pipe.close()


@pytest.fixture
def range_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], tuple[int, int]]:
    """Restricts the ports to choose from to so many that are free now."""

    def restrict(size: int) -> tuple[int, int]:
        lowest, highest = port_leases.quiet_ports()
        for first in range(lowest, highest - size, size):
            if all(map(port_leases.is_free, range(first, first + size))):
                chosen = first, first + size - 1
                monkeypatch.setattr(port_leases, "quiet_ports", lambda chosen=chosen: chosen)
                return chosen
        raise AssertionError("no free ports")

    return restrict


def files_of(node: Path) -> list[Path]:
    return list(node.iterdir())


def line_of(child: subprocess.Popen[str]) -> str:
    assert child.stdout is not None
    return child.stdout.readline().strip()


def test_the_ports_are_in_a_row_free_and_below_the_kernels_own(node: Path) -> None:
    first_ephemeral = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    with lease_ports(3, node) as lease:
        assert lease.ports == tuple(range(lease.ports[0], lease.ports[0] + 3))
        assert lease.ports[-1] < first_ephemeral or first_ephemeral < 11000
        for port in lease.ports:
            with socket.create_server(("127.0.0.1", port)):
                pass


def test_two_leases_of_one_process_never_share_a_port(
    node: Path, range_of: Callable[[int], tuple[int, int]]
) -> None:
    range_of(6)
    with lease_ports(2, node) as one, lease_ports(2, node) as other:
        assert not set(one.ports) & set(other.ports)


def test_two_processes_contend_and_a_killed_ones_ports_are_free_again(
    node: Path, range_of: Callable[[int], tuple[int, int]], spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    first, last = range_of(2)
    holder = spawn(HOLD_PORTS, f"{first}-{last}")
    assert line_of(holder) == f"{first} {last}"
    with pytest.raises(DeploymentError, match="no 2 free loopback ports"):
        lease_ports(2, node)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with lease_ports(2, node) as lease:
        assert lease.ports == (first, last)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_that_something_else_listens_on_is_skipped(
    node: Path, range_of: Callable[[int], tuple[int, int]], host: str
) -> None:
    first, last = range_of(3)
    with socket.create_server((host, first)), lease_ports(2, node) as lease:
        assert lease.ports == (first + 1, last)


def test_a_lease_lasts_as_long_as_a_child_that_inherited_it(
    node: Path, range_of: Callable[[int], tuple[int, int]]
) -> None:
    range_of(1)
    lease = lease_ports(1, node)
    child = subprocess.Popen(["sleep", "60"], pass_fds=lease.descriptors)
    lease.close()
    try:
        with pytest.raises(DeploymentError):
            lease_ports(1, node)
    finally:
        child.kill()
        child.wait()
    with lease_ports(1, node) as again:
        assert again.ports == lease.ports


def test_ports_given_back_leave_no_file_and_killed_holders_files_are_cleared(
    node: Path, range_of: Callable[[int], tuple[int, int]], spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    first, _ = range_of(4)
    holder = spawn(HOLD_PORTS, f"{first}-{first + 1}")
    line_of(holder)
    holder.kill()
    holder.wait()
    assert len(list(node.iterdir())) == 2
    lease = lease_ports(1, node)
    assert len(list(node.iterdir())) == 1
    lease.close()
    lease.close()
    assert list(node.iterdir()) == []


def test_everybody_may_lease_and_nobody_may_remove_the_files_of_others(node: Path) -> None:
    with lease_ports(1, node):
        assert stat.S_IMODE(node.stat().st_mode) == 0o1777
        assert stat.S_IMODE(next(node.iterdir()).stat().st_mode) == 0o644


def test_an_unsafe_directory_is_refused(node: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    node.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(DeploymentError, match="DYNAPLAN_NODE_DIR"):
        lease_ports(1, node)
    node.unlink()
    node.mkdir()
    node.chmod(0o777)
    with pytest.raises(DeploymentError, match="everybody may remove files"):
        lease_ports(1, node)


def test_what_is_no_lock_file_counts_as_held_and_is_left_alone(node: Path, tmp_path: Path) -> None:
    directory = open_node_directory(node)
    try:
        (tmp_path / "precious").touch()
        (node / "link").symlink_to(tmp_path / "precious")
        os.mkfifo(node / "pipe")
        (node / "folder").mkdir()
        assert [try_lock(directory, name) for name in ("link", "pipe", "folder")] == [None] * 3
        assert len(list(node.iterdir())) == 3
    finally:
        os.close(directory)


def test_no_ports_at_all_are_no_trouble(node: Path) -> None:
    assert lease_ports(0, node).ports == ()
    PortLease((), (), node).close()


async def test_engines_start_one_after_another_even_when_one_is_killed(
    node: Path, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    holder = spawn(HOLD_GATE)
    assert await asyncio.to_thread(line_of, holder) == "in"
    is_in = asyncio.Event()

    async def start() -> None:
        async with exclusive_start(["GPU-a"], node):
            is_in.set()

    other = asyncio.create_task(start())
    async with exclusive_start(["GPU-c"], node):
        assert not is_in.is_set()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.15):
            await is_in.wait()
    holder.kill()
    await eventually(is_in.is_set)
    await other
    holder.wait()


async def test_never_are_two_behind_one_gate_and_nothing_is_left(node: Path) -> None:
    inside: list[str] = []

    async def start(*names: str) -> None:
        async with exclusive_start(names, node):
            assert inside == []
            inside.append(names[0])
            await asyncio.sleep(0)
            inside.pop()

    await asyncio.gather(
        *(start("GPU-b", "GPU-a") for _ in range(3)), start("GPU-a"), start("GPU-b", "GPU-a")
    )
    assert files_of(node) == []


async def test_who_gives_up_waiting_leaves_no_lock_behind(node: Path) -> None:
    async with exclusive_start(["GPU-b"], node):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                async with exclusive_start(["GPU-a", "GPU-b"], node):
                    raise AssertionError("two are in")
        async with exclusive_start(["GPU-a"], node):
            pass
    wait_until(lambda: list(node.iterdir()) == [])


@pytest.mark.parametrize(("cores", "available", "at_once"), [(4, 100, 4), (1, 100, 1), (4, 25, 2), (4, 0, 1)])
async def test_without_gpus_as_many_start_as_cores_and_memory_bear_and_nothing_is_left(
    node: Path, monkeypatch: pytest.MonkeyPatch, cores: int, available: int, at_once: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    inside, most, proceed = 0, 0, asyncio.Event()

    async def start() -> None:
        nonlocal inside, most
        async with bounded_start(10, node, lambda: available):
            inside += 1
            most = max(most, inside)
            await proceed.wait()
            inside -= 1

    starts = [asyncio.create_task(start()) for _ in range(5)]
    await eventually(lambda: inside == at_once)
    proceed.set()
    await asyncio.gather(*starts)
    assert most <= at_once
    assert files_of(node) == []


async def test_a_killed_start_gives_its_place_to_the_next_one(
    node: Path, monkeypatch: pytest.MonkeyPatch, spawn: Callable[..., subprocess.Popen[str]]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    holder = spawn(HOLD_PLACE)
    assert await asyncio.to_thread(line_of, holder) == "in"
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2), bounded_start(10, node, lambda: 100):
            raise AssertionError("two are in")
    holder.kill()
    async with asyncio.timeout(10), bounded_start(10, node, lambda: 100):
        pass
    holder.wait()
