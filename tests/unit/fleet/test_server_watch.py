"""Damaged data of an embedded server is set aside after three starts that came to nothing, not before."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dynaplan.fleet import servers
from dynaplan.fleet.servers import ROOM_BYTES
from dynaplan.fleet.watchdog import server_watches


class Box:
    """An etcd whose process and readiness are the test's."""

    def __init__(self, directory: Path) -> None:
        self.pid, self.is_ready = 1, True
        self.data = directory / "data"
        self.data.mkdir()
        self.killed, self.said = list[str](), list[str]()
        self.scratch = directory / "scratch"
        self.scratch.mkdir(mode=0o700)
        launch = SimpleNamespace(namespace="ns", log_dir=Path("/logs"), scratch_dir=self.scratch)
        server = SimpleNamespace(name="etcd", working_dir=directory, data="data", is_ready=self.ready)
        dataless = SimpleNamespace(name="other", working_dir=directory, data="", is_ready=self.ready)
        arbiter = SimpleNamespace(
            get_watcher=lambda name: SimpleNamespace(processes={self.pid: None} if self.pid else {}),
            kill_process_of=self.killed.append,
        )
        servers = cast(Any, (server, dataless))
        (self.watch,) = server_watches(cast(Any, launch), servers, cast(Any, arbiter), self.said.append)

    async def ready(self) -> bool:
        return self.is_ready

    async def die(self, times: int) -> None:
        """So many processes that never answer; each is seen."""
        self.is_ready = False
        for _ in range(times):
            self.pid += 1
            await self.watch.check()


@pytest.fixture
async def box(tmp_path: Path) -> Box:
    box = Box(tmp_path)
    await box.watch.check()
    return box


async def test_a_server_that_is_killed_and_starts_keeps_its_data(box: Box) -> None:
    for _ in range(10):
        await box.die(2)
        box.is_ready = True
        await box.watch.check()
    box.is_ready = False
    await box.watch.check()
    assert (box.killed, box.said, box.data.exists()) == ([], [], True)


async def test_one_that_takes_its_time_keeps_its_data(box: Box) -> None:
    await box.die(1)
    for _ in range(100):
        await box.watch.check()
    assert box.said == []


async def test_after_three_starts_that_came_to_nothing_the_data_is_set_aside_loudly(box: Box) -> None:
    (box.data / "db").write_text("damaged")
    (box.data.with_name("data.damaged")).mkdir()
    await box.die(3)
    box.pid = 0
    await box.watch.check()
    assert not box.data.exists()
    assert (box.data.with_name("data.damaged") / "db").read_text() == "damaged"
    assert box.killed == ["ns_etcd"]
    assert "set aside as" in box.said[0]
    await box.die(5)
    assert len(box.said) == 1, "there is no data any more"


async def test_on_a_full_disk_the_data_goes_into_memory_instead(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "_free_bytes", lambda directory: ROOM_BYTES * (directory == box.scratch))
    await box.die(3)
    box.pid = 0
    await box.watch.check()
    assert box.data.resolve() == box.scratch / "etcd.data"
    assert box.killed == ["ns_etcd"]
    assert "0 MB left" in box.said[0]
    (box.data / "db").write_text("damaged")
    await box.die(5)
    assert (box.scratch / "etcd.data.damaged" / "db").read_text() == "damaged"
    assert list(box.data.iterdir()) == []


async def test_without_room_in_memory_the_data_stays_where_it_is(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers, "_free_bytes", lambda directory: 0)
    await box.die(4)
    assert "set aside as" in box.said[0]
    assert not box.data.is_symlink()
