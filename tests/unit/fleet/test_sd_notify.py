"""Notices to the service manager: datagrams, and silence where there is none."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynaplan.fleet.sd_notify import READY, STOPPING, ServiceManager


@pytest.fixture
def manager() -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.settimeout(30)
        yield made


def test_a_state_and_its_words_reach_the_managers_socket(manager: socket.socket, runtime_dir: Path) -> None:
    manager.bind(str(runtime_dir / "notify"))
    ServiceManager(str(runtime_dir / "notify")).notify(READY, "serves at http://x")
    assert manager.recv(4096) == b"READY=1\nSTATUS=serves at http://x"


async def test_an_abstract_socket_is_reached_too(manager: socket.socket, runtime_dir: Path) -> None:
    name = f"dynaplan-test-{runtime_dir}"
    manager.bind(f"\0{name}")
    await ServiceManager(f"@{name}").notify_alive()
    assert manager.recv(4096) == b"WATCHDOG=1"


def test_children_do_not_inherit_the_address() -> None:
    environ = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "5", "WATCHDOG_PID": "7", "HOME": "/h"}
    ServiceManager.from_environ(environ)
    assert environ == {"HOME": "/h"}


@pytest.mark.parametrize("address", ["", "/nowhere/notify"])
def test_without_a_manager_nothing_is_told_and_nothing_raised(address: str) -> None:
    service_manager = ServiceManager(address)
    assert [service_manager.notify(state) for state in (READY, STOPPING)] == [None, None]  # type: ignore[func-returns-value]
