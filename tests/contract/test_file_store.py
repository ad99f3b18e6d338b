"""What the key-value store in a directory promises beyond every store's contract: faults of the disk and
of writers.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dynaplan.process.guard import guard_command
from dynaplan.store import file_database as database
from dynaplan.store import file_store as following
from dynaplan.store import file_store as module
from dynaplan.store.file_store import FileStore
from dynaplan.store.model import Deleted, Transaction
from dynaplan.util.errors import ConfigError, DeploymentError, PermanentError, StoreUnavailable
from tests.contract.stores import Watched
from tests.fakes.polling import consistently, eventually
from tests.fakes.processes import freeze

Connect = Callable[[], FileStore]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
async def connect(directory: Path) -> Any:
    made: list[FileStore] = []

    def connected() -> FileStore:
        made.append(FileStore.from_environment({"DYN_FILE_KV": str(directory)}))
        return made[-1]

    yield connected
    for each in made:
        await each.close()


@pytest.fixture
def store(connect: Connect) -> FileStore:
    return connect()


class Children:
    """Other processes of the same store."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, what: str, *arguments: object) -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "tests.contract.file_store_child", what, self._directory, *arguments]
        process = subprocess.Popen(
            guard_command([str(word) for word in words], os.getpid()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    async def said(self, what: str, *arguments: object) -> tuple[subprocess.Popen[str], str]:
        """A child, and the first line that it has printed."""
        process = self.start(what, *arguments)
        return process, await self.answer(process)

    async def answer(self, process: subprocess.Popen[str], *question: object) -> str:
        """The next line that a child prints, to a question if any."""
        assert process.stdin is not None
        assert process.stdout is not None
        if question:
            print(*question, file=process.stdin, flush=True)
        return (await asyncio.to_thread(process.stdout.readline)).strip()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def children(directory: Path) -> Iterator[Children]:
    made = Children(directory)
    yield made
    made.close()


def modes(directory: Path) -> set[tuple[bool, int]]:
    """(is a directory, permissions) of all that is there."""
    paths = (directory, *directory.rglob("*"))
    return {(path.is_dir(), path.stat().st_mode & 0o777) for path in paths}


def remove(directory: Path) -> None:
    """As ``rm -rf``: a process that still has the store open may remove one of its files meanwhile."""
    shutil.rmtree(directory, ignore_errors=True)


def replace_by_an_open_one(directory: Path) -> None:
    remove(directory)
    directory.mkdir()
    directory.chmod(0o755)


def remount(path: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(path)], check=True)


# Files


async def test_only_the_owner_can_reach_any_of_it(store: FileStore, directory: Path) -> None:
    await store.put("v1/box/k", "v")
    await store.put("v1/box/k", "w")
    assert modes(directory) == {(True, 0o700), (False, 0o600)}


# Writers that die


async def test_the_keys_of_a_killed_process_go_long_before_their_lease(
    store: FileStore, children: Children
) -> None:
    watched = await Watched(store, "").started()
    child, _ = await children.said("hold", "v1/box/k", 30)
    await watched.reaches({"v1/box/k": "held"})
    killed_s = time.monotonic()
    child.kill()
    await eventually(lambda: watched.events[-1] == Deleted("v1/box/k"))
    assert time.monotonic() - killed_s < 10  # alone on the machine: less than 1


async def test_the_keys_of_a_dead_process_are_removed_by_the_next_that_reads(
    connect: Connect, children: Children
) -> None:
    child, _ = await children.said("hold", "v1/box/k", 30)
    child.kill()
    child.wait()
    assert await connect().list("") == ()


async def test_a_frozen_process_loses_its_lease_with_its_time_not_before(
    store: FileStore, children: Children
) -> None:
    watched = await Watched(store, "").started()
    child, said = await children.said("hold", "v1/box/k", 2)
    lease, asked_s = said.split()
    freeze(child.pid)
    await watched.reaches({"v1/box/k": "held"})
    await watched.reaches({})
    assert time.monotonic() - float(asked_s) >= 2.0
    assert await store.keep_alive(int(lease)) == 0.0


async def test_a_process_that_has_closed_its_store_leaves_its_leases_to_their_time(
    store: FileStore, children: Children
) -> None:
    child, lease = await children.said("leave", "v1/box/k", 2)
    child.wait()
    assert await store.get("v1/box/k") is not None
    assert await store.keep_alive(int(lease)) == 2.0
    watched = await Watched(store, "").started()
    await eventually(lambda: watched.state == {}, timeout_s=5)


async def test_a_lease_belongs_to_the_process_that_kept_it_alive_last(
    store: FileStore, children: Children
) -> None:
    watched = await Watched(store, "").started()
    first, said = await children.said("hold", "v1/box/k", 30)
    second, left = await children.said("keep", said.split()[0])
    assert left == "30.0"
    await watched.reaches({"v1/box/k": "held"})
    first.kill()
    first.wait()
    await consistently(lambda: watched.state == {"v1/box/k": "held"}, for_s=0.3)
    second.kill()
    await watched.reaches({})


async def test_a_writer_that_stands_still_in_its_write_is_an_error_in_time_and_readers_go_on(
    store: FileStore, directory: Path
) -> None:
    """As a process does that is stopped by a signal in the middle of a transaction."""
    await store.put("k", "v")
    other = sqlite3.connect(directory / "sqlite" / "store.db", isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    begun_s = time.monotonic()
    writes = [asyncio.create_task(store.put("k", "w")) for _ in range(3)]
    while not all(write.done() for write in writes):
        read_s = time.monotonic()
        item = await store.get("k")
        assert item is not None
        assert item.value == "v"
        assert time.monotonic() - read_s < 2.0
        await asyncio.sleep(0.01)
    for write in writes:
        with pytest.raises(StoreUnavailable, match="locked"):
            await write
    assert time.monotonic() - begun_s < 15
    other.execute("ROLLBACK")
    other.close()
    await store.put("k", "w")


async def test_a_disk_that_stands_still_is_an_error_in_time_and_holds_up_no_event_loop(
    store: FileStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store.put("k", "v")
    monkeypatch.setattr(module, "FILE_CALL_TIMEOUT_S", 0.2)
    is_back = threading.Event()
    monkeypatch.setattr(store._database, "get", lambda _key: is_back.wait(30))
    reading = asyncio.create_task(store.get("k"))
    longest_s, last_s = 0.0, time.monotonic()
    while not reading.done():
        await asyncio.sleep(0.005)
        longest_s, last_s = max(longest_s, time.monotonic() - last_s), time.monotonic()
    assert longest_s < 0.5
    with pytest.raises(StoreUnavailable, match="disk"):
        await reading
    with pytest.raises(StoreUnavailable, match="disk"):
        await store.list("")
    is_back.set()
    await eventually(lambda: _answers(store))


async def _answers(store: FileStore) -> bool:
    try:
        return bool(await store.list("k"))
    except StoreUnavailable:
        return False


async def test_a_lost_lease_drains_nobody_and_a_revoked_one_does(
    store: FileStore, children: Children, directory: Path
) -> None:
    watched = await Watched(store, "/services/").started()

    def lease() -> int:
        (key,) = watched.state or ("/0",)
        return int(key.rpartition("/")[2], 16)

    child, _ = await children.said("register", 2)
    first = await eventually(lease)
    freeze(child.pid)
    await eventually(lambda: not watched.state, timeout_s=5)
    child.send_signal(signal.SIGCONT)
    second = await eventually(lease)  # frozen: its lease is lost, and it has another one
    remove(directory)
    third = await eventually(lambda: lease() not in (0, first, second) and lease())  # wiped
    await store.revoke(third)
    assert await children.answer(child) == "revoked"


# Many changes


async def test_a_watch_sees_every_final_state_while_two_processes_write_two_hundred_keys(
    store: FileStore, children: Children
) -> None:
    watched = await Watched(store, "").started()
    writers = [(await children.said("count", f"v1/{name}/", 100, 3))[0] for name in "ab"]
    for writer in writers:
        print("go", file=writer.stdin, flush=True)
    expected = {f"v1/{name}/{number}": "2" for name in "ab" for number in range(100)}
    await eventually(lambda: watched.state == expected, timeout_s=90, interval_s=0.1)
    assert watched.snapshots == 1
    assert len(watched.puts) == 600


async def test_a_watch_has_no_gap_while_old_changes_are_forgotten(
    store: FileStore, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "HISTORY_BYTES", 2000)
    watched = await Watched(connect(), "").started()
    lease = await store.grant(10)
    for number in range(200):
        await store.put("k", str(number), lease)
        await eventually(lambda: len(watched.puts) == number + 1, interval_s=0.001)  # noqa: B023
    assert watched.snapshots == 1


async def test_a_watch_that_misses_what_is_forgotten_begins_with_a_new_snapshot(
    store: FileStore, connect: Connect, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database, "HISTORY_BYTES", 2000)
    slow = connect()
    watched = await Watched(slow, "").started()
    with monkeypatch.context() as patch:
        patch.setattr(slow._database, "changes", _unavailable)
        for number in range(100):
            await store.put("k", str(number))
    await watched.reaches({"k": "99"})
    assert watched.snapshots == 2
    (count,) = _rows(directory, "SELECT count(*) FROM change")
    assert count < 40


def _unavailable(*_: object) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def _rows(directory: Path, question: str) -> tuple[int, ...]:
    other = sqlite3.connect(directory / "sqlite" / "store.db")
    try:
        row: tuple[int, ...] = other.execute(question).fetchone()
        return row
    finally:
        other.close()


async def test_without_notices_of_the_kernel_changes_are_looked_for(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_left(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(following, "Inotify", none_left)
    monkeypatch.setattr(os, "pidfd_open", none_left)
    store = connect()
    watched = await Watched(store, "").started()
    await connect().put("k", "v")
    await watched.reaches({"k": "v"})
    assert "polled every 1 s" in caplog.text


# The directory


async def test_a_store_whose_directory_is_removed_begins_anew_with_another_identity(
    store: FileStore, connect: Connect, directory: Path
) -> None:
    other = connect()
    watched = await Watched(other, "").started()
    lease = await store.grant(10)
    await store.put("v1/box/k", "v", lease)
    await watched.reaches({"v1/box/k": "v"})
    identity = await store.identity()
    remove(directory)
    await watched.reaches({})
    assert await store.keep_alive(lease) == 0.0
    assert await store.identity() == await other.identity() != identity
    await store.put("v1/box/k", "again")
    await watched.reaches({"v1/box/k": "again"})


async def test_a_store_that_is_moved_away_is_left_for_a_new_one(
    store: FileStore, directory: Path, tmp_path: Path
) -> None:
    await store.put("k", "v")
    watched = await Watched(store, "").started()
    shutil.move(directory, tmp_path / "elsewhere")
    await watched.reaches({})
    await store.put("k", "w")
    moved = FileStore(tmp_path / "elsewhere")
    assert [item.value for item in await moved.list("")] == ["v"]
    await moved.close()


async def test_a_store_whose_place_is_gone_is_an_error_and_heals_when_it_is_back(
    store: FileStore, directory: Path, tmp_path: Path
) -> None:
    path = tmp_path / "path"
    path.mkdir(mode=0o700)
    store = FileStore.from_environment({"DYN_FILE_KV": str(path / "kv")})
    await store.put("k", "v")
    watched = await Watched(store, "").started()
    remove(path)
    with pytest.raises(StoreUnavailable, match="No such file"):
        await store.put("k", "v")
    path.mkdir(mode=0o700)
    await eventually(lambda: watched.state == {}, timeout_s=5)
    await store.put("k", "w")
    await watched.reaches({"k": "w"})
    await store.close()


async def test_a_removed_file_of_renewals_harms_nobody(
    store: FileStore, connect: Connect, directory: Path
) -> None:
    lease = await store.grant(10)
    await store.put("k", "v", lease)
    (directory / "sqlite/renewals").unlink()
    assert await connect().get("k") is not None
    assert await store.keep_alive(lease) == 10.0
    assert [item.key for item in await store.list("")] == ["k"]


@pytest.mark.parametrize("damaged_bytes", [(0, 100), (4096, 20_000)])
async def test_a_damaged_database_is_set_aside_and_the_store_begins_anew(
    store: FileStore,
    connect: Connect,
    directory: Path,
    damaged_bytes: tuple[int, int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    await store.put("k", "v")
    identity = await store.identity()
    await store.close()  # so that all is in the one file
    with (directory / "sqlite/store.db").open("r+b") as file:
        file.seek(damaged_bytes[0])
        file.write(b"\xff" * (damaged_bytes[1] - damaged_bytes[0]))
    store, other = connect(), connect()
    watched = await Watched(other, "").started()
    assert await store.list("") == ()
    assert await store.identity() == await other.identity() != identity
    assert "damaged" in caplog.text
    assert len([name for name in os.listdir(directory) if name.startswith("damaged-")]) == 1
    await store.put("k", "w")
    await watched.reaches({"k": "w"})


async def test_a_database_that_is_damaged_while_it_is_watched_is_given_up(
    store: FileStore, connect: Connect, directory: Path
) -> None:
    await store.put("k", "v")
    watched = await Watched(store, "").started()
    # What a failing disk gives back: SQLite reads each page when it is not in its memory.
    _damaged(store)
    await eventually(lambda: watched.snapshots == 2, timeout_s=5)
    assert watched.state == {}
    await connect().put("k", "w")
    await watched.reaches({"k": "w"})


def _damaged(store: FileStore) -> None:
    """Have the next look for changes find the database damaged, and wake it."""
    changes = store._database.changes

    def fail(*_: object) -> None:
        store._database.changes = changes  # type: ignore[method-assign]
        error = sqlite3.DatabaseError("database disk image is malformed")
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT  # as the module itself sets it
        raise error

    store._database.changes = fail  # type: ignore[method-assign, assignment]
    assert store._watcher is not None
    store._watcher._wake.set()


def refusal(path: Path) -> str:
    with pytest.raises((ConfigError, DeploymentError)) as caught:
        FileStore.from_environment({"DYN_FILE_KV": str(path)})
    assert "DYN_FILE_KV" in caught.value.hint
    return str(caught.value).splitlines()[0]


def test_a_directory_that_others_can_reach_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "open"
    path.mkdir()
    for mode in (0o755, 0o770, 0o701, 0o777):
        path.chmod(mode)
        assert f"mode {mode:04o}" in refusal(path)
    path.chmod(0o700)
    FileStore.from_environment({"DYN_FILE_KV": str(path)})


def test_a_link_or_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    for name in ("link", "dangling", "file"):
        assert str(tmp_path / name) in refusal(tmp_path / name)


def test_a_directory_in_the_form_of_an_earlier_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "old"
    (path / ".dynaplan" / "journal").mkdir(parents=True)
    path.chmod(0o700)
    assert "earlier version" in refusal(path)
    with pytest.raises(ConfigError) as caught:
        FileStore.from_environment({"DYN_FILE_KV": str(path)})
    assert f"rm -r {path}" in caught.value.hint


async def test_a_database_of_another_version_is_refused_with_what_to_do(
    store: FileStore, connect: Connect, directory: Path
) -> None:
    await store.put("k", "v")
    other = sqlite3.connect(directory / "sqlite" / "store.db")
    other.execute("PRAGMA user_version = 99")
    other.close()
    with pytest.raises(ConfigError, match="another version") as caught:
        await connect().get("k")
    assert "DYN_FILE_KV" in caught.value.hint


def test_another_users_directory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "theirs"
    path.mkdir(mode=0o700)
    try:
        os.chown(path, 65534, -1)
    except PermissionError:
        pytest.skip("only root may give files away")
    assert "another user (uid 65534)" in refusal(path)


async def test_an_unsafe_directory_is_no_fault_of_the_users_for_a_process_that_starts_below_serve(
    connect: Connect, directory: Path
) -> None:
    os.mkdir(directory, 0o755)
    with pytest.raises(DeploymentError, match="chmod 700"):  # a worker that meets it is started again
        await connect().get("k")


async def test_a_directory_that_is_replaced_by_an_unsafe_one_is_not_used_until_it_is_safe_again(
    store: FileStore, directory: Path
) -> None:
    await store.put("k", "v")
    watched = await Watched(store, "").started()
    replace_by_an_open_one(directory)
    with pytest.raises(StoreUnavailable, match="chmod 700"):
        await store.put("k", "w")
    assert os.listdir(directory) == []
    os.chmod(directory, 0o700)
    await store.put("k", "w")
    await watched.reaches({"k": "w"})


# The disk


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory of its own, of 1 MiB."""
    path = tmp_path / "mounted"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,mode=0700", "tmpfs", str(path)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting is not allowed here")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(path: Path) -> None:
    with path.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(b"x" * 4096)


async def test_a_full_disk_refuses_a_write_as_a_whole_ends_no_lease_and_loses_nothing(mounted: Path) -> None:
    store = FileStore(mounted / "kv")
    lease = await store.grant(10)
    await store.put("v1/box/a", "old", lease)
    fill(mounted / "ballast")
    with pytest.raises(StoreUnavailable, match="full"):
        await store.commit(Transaction(puts={"v1/box/a": "new", "v1/box/b": "x" * 200_000}))
    assert await store.keep_alive(lease) == 10.0
    assert [(item.key, item.value) for item in await store.list("")] == [("v1/box/a", "old")]
    (mounted / "ballast").unlink()
    assert await store.commit(Transaction(puts={"v1/box/a": "new", "v1/box/b": "x"}))
    assert {item.key: item.value for item in await store.list("")} == {"v1/box/a": "new", "v1/box/b": "x"}
    await store.close()


async def test_a_store_fills_its_disk_to_the_last_byte_without_a_half_written_key(mounted: Path) -> None:
    store = FileStore(mounted / "kv")
    written = {}
    with pytest.raises(StoreUnavailable, match="full"):
        for number in range(10_000):
            await store.put(f"v1/box/{number}", "x" * 700)
            written[f"v1/box/{number}"] = "x" * 700
    assert {item.key: item.value for item in await store.list("")} == written
    await store.close()
    other = FileStore(mounted / "kv")
    assert {item.key: item.value for item in await other.list("")} == written
    await other.close()


async def test_a_read_only_disk_is_read_and_refuses_writes_with_the_reason(mounted: Path) -> None:
    before = FileStore(mounted / "kv")
    await before.put("k", "v")
    await before.close()
    remount(mounted, "ro")
    store = FileStore.from_environment({"DYN_FILE_KV": str(mounted / "kv")})
    watched = await Watched(store, "").started()
    assert watched.state == {"k": "v"}
    for change in (store.put("k", "w"), store.delete("k"), store.grant(10)):
        with pytest.raises(StoreUnavailable, match=r"(?i)read-?only"):
            await change
    remount(mounted, "rw")
    await store.put("k", "w")
    await watched.reaches({"k": "w"})
    await store.close()


async def test_text_that_stands_for_no_bytes_and_an_empty_key_are_refused_for_good(store: FileStore) -> None:
    for key, value in (("k", "\ud800"), ("\ud800", "v"), ("", "v")):
        with pytest.raises(PermanentError):
            await store.put(key, value)
    assert await store.list("") == ()
