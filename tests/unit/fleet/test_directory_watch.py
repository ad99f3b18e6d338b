"""What vanishes from under a running deployment is made again, and the user hears of it once."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dynaplan.fleet.launch import RELOADED_FILE
from dynaplan.fleet.runtime_dir import make_runtime_directory, write_private
from dynaplan.fleet.watchdog import DirectoryWatch


class Box:
    """The directories of a deployment, and an arbiter that notes what it is told."""

    def __init__(self, base: Path) -> None:
        self.root, self.link = base / "run" / "box" / "ns", base / "links" / "abc"
        self.scratch, self.etcd = base / "scratch", self.root / "etcd"
        make_runtime_directory(self.root)
        for directory in (self.etcd, self.root / "nats", self.scratch):
            directory.mkdir(mode=0o700)
        write_private(self.root / "clients.json", "{}")
        write_private(self.root / "nats" / "nats.conf", "port: 1")
        self.sockets = [self.root / name for name in ("circus.sock", "circus-events.sock", "etcd/socket")]
        for socket in self.sockets:
            socket.touch()
        self.killed: list[str] = []
        self.said: list[str] = []
        self.listened = 0
        launch = SimpleNamespace(
            namespace="ns",
            runtime_dir=self.root,
            address_dir=self.link,
            scratch_dir=self.scratch,
            circus_endpoint=f"ipc://{self.link / 'circus.sock'}",
            circus_events=f"ipc://{self.link / 'circus-events.sock'}",
        )
        servers = (
            SimpleNamespace(name="etcd", working_dir=self.etcd, socket=self.link / "etcd/socket"),
            SimpleNamespace(name="nats", working_dir=self.root / "nats", socket=None),
        )
        arbiter = SimpleNamespace(listen_again=self.listen_again, kill_process_of=self.killed.append)
        self.watch = DirectoryWatch(
            cast(Any, launch), cast(Any, servers), cast(Any, arbiter), self.said.append
        )

    def listen_again(self) -> None:
        self.listened += 1
        for socket in self.sockets[:2]:
            socket.touch()

    async def check(self, times: int = 1) -> list[str]:
        self.said.clear()
        for _ in range(times):
            await self.watch.check()
        return self.said


@pytest.fixture
async def box(tmp_path: Path) -> Box:
    box = Box(tmp_path)
    await box.check()
    return box


async def test_while_all_is_there_nothing_is_done(box: Box) -> None:
    assert await box.check(5) == []
    assert (box.killed, box.listened) == ([], 0)


async def test_a_link_that_vanishes_is_made_again_and_no_server_is_touched(box: Box) -> None:
    shutil.rmtree(box.link.parent)
    (line,) = await box.check(5)
    assert "link" in line
    assert box.link.resolve() == box.root
    assert (box.killed, box.listened) == ([], 0)


async def test_a_directory_that_vanishes_is_made_again_with_its_files_sockets_and_servers(box: Box) -> None:
    shutil.rmtree(box.root)
    lines = await box.check()
    assert "etcd and nats start again, with new data" in lines[0]
    assert box.killed == ["ns_etcd", "ns_nats"]
    assert box.listened == 1
    assert (box.root / "clients.json").read_text() == "{}"
    assert (box.root / "nats" / "nats.conf").read_text() == "port: 1"
    assert box.root.stat().st_mode & 0o777 == 0o700
    box.sockets[2].touch()
    assert await box.check(5) == []


async def test_a_file_that_vanishes_is_written_again(box: Box) -> None:
    (box.root / "clients.json").unlink()
    await box.check()
    assert (box.root / "clients.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("whole", [False, True])
async def test_the_settings_of_the_last_reload_are_written_again(box: Box, whole: bool) -> None:
    for text in ("first", "last"):
        write_private(box.root / RELOADED_FILE, text)
        await box.check()
    (shutil.rmtree if whole else Path.unlink)(box.root if whole else box.root / RELOADED_FILE)
    await box.check()
    assert (box.root / RELOADED_FILE).read_text() == "last"


async def test_a_server_without_its_socket_starts_again_once_and_one_that_starts_has_time(box: Box) -> None:
    box.sockets[2].unlink()
    assert await box.check(1) == []
    assert "etcd had vanished" in (await box.check(10))[0]
    assert box.killed == ["ns_etcd"]


async def test_the_scratch_directory_is_made_again(box: Box) -> None:
    shutil.rmtree(box.scratch)
    (line,) = await box.check(2)
    assert "scratch directory" in line
    assert box.scratch.stat().st_mode & 0o777 == 0o700


async def test_what_cannot_be_made_again_is_told_once(box: Box) -> None:
    shutil.rmtree(box.link.parent)
    box.link.parent.touch()
    (line,) = await box.check(5)
    assert "cannot be made again" in line
