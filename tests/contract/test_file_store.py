"""What the key-value store in a directory promises beyond every store's contract: faults of the disk and
of writers.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dynaplan.process.guard import guarded
from dynaplan.store.file import disk, following
from dynaplan.store.file.names import place_of
from dynaplan.store.file.store import FileStore
from dynaplan.store.model import Deleted, Transaction
from dynaplan.util.errors import ConfigError, PermanentError, StoreUnavailable
from tests.contract.stores import Watched
from tests.fakes.polling import consistently, eventually

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
            guarded([str(word) for word in words], os.getpid()),
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


def shown(directory: Path) -> dict[str, str]:
    """What ``find`` and ``cat`` show."""
    files = (path for path in directory.rglob("*") if path.is_file() and ".dynaplan" not in path.parts)
    return {str(path.relative_to(directory)): path.read_text() for path in files}


def modes(directory: Path) -> set[tuple[bool, int]]:
    """(is a directory, permissions) of all that is there."""
    paths = (directory, *directory.rglob("*"))
    return {(path.is_dir(), path.stat().st_mode & 0o777) for path in paths}


def replace_by_an_open_one(directory: Path) -> None:
    shutil.rmtree(directory)
    directory.mkdir()
    directory.chmod(0o755)


def remount(path: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(path)], check=True)


def path_of(key: str) -> str:
    directories, name = place_of(key)
    return "/".join((*directories, name))


def file_of(directory: Path, key: str) -> Path:
    return directory / path_of(key)


# Files


async def test_keys_are_files_in_the_originals_layout(store: FileStore, directory: Path) -> None:
    lease = await store.grant(10)
    await store.put("v1/instances/my-ns/backend/generate/1f", "{}", lease)
    await store.put("v1/box/planner/num_decode_workers", "3")
    await store.put("/services/box/backend/generate/1f", "{}", lease)
    assert shown(directory) == {
        "v1/instances/my%2Dns%2Fbackend%2Fgenerate%2F1f": "{}",
        "v1/box/planner%2Fnum%5Fdecode%5Fworkers": "3",
        "%2Fservices/box/backend%2Fgenerate%2F1f": "{}",
    }
    await store.revoke(lease)
    assert shown(directory) == {"v1/box/planner%2Fnum%5Fdecode%5Fworkers": "3"}


async def test_only_the_owner_can_reach_any_of_it(store: FileStore, directory: Path) -> None:
    await store.put("v1/box/k", "v")
    await store.put("v1/box/k", "w")
    assert modes(directory) == {(True, 0o700), (False, 0o600)}


async def test_a_renewal_renews_the_times_of_the_files_for_the_originals_readers(
    store: FileStore, directory: Path
) -> None:
    lease = await store.grant(10)
    await store.put("v1/instances/k", "v", lease)
    before = await store.get("v1/instances/k")
    os.utime(file_of(directory, "v1/instances/k"), (1, 1))
    await store.keep_alive(lease)
    assert time.time() - file_of(directory, "v1/instances/k").stat().st_mtime < 60
    assert await store.get("v1/instances/k") == before


async def test_files_changed_by_hand_change_nothing_and_are_drawn_again(
    store: FileStore, directory: Path
) -> None:
    lease = await store.grant(10)
    await store.put("v1/box/k", "v", lease)
    file_of(directory, "v1/box/k").unlink()
    item = await store.get("v1/box/k")
    assert item is not None
    assert item.value == "v"
    await store.keep_alive(lease)
    assert shown(directory) == {"v1/box/k": "v"}


async def test_files_of_others_are_ignored_and_named_once(
    store: FileStore, directory: Path, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    await store.put("v1/box/k", "v")
    (directory / "notes.txt").write_text("x")
    (directory / "v1/box/%zz").write_bytes(b"\xff\0")
    (directory / "v1/box/deep/er/still").mkdir(parents=True)
    (directory / "v1/box/link").symlink_to("/etc/passwd")
    other = connect()
    for _ in range(3):
        assert [item.key for item in await other.list("")] == ["v1/box/k"]
    (message,) = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert all(name in message for name in ("notes.txt", "%zz", "deep", "1 more"))


async def test_what_stands_in_the_place_of_a_key_is_left_alone_and_no_link_is_followed(
    store: FileStore, directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await store.identity()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (directory / "linked").symlink_to(elsewhere)
    (directory / "v1/box/taken/x").mkdir(parents=True)
    (directory / "v1/box/target").symlink_to(elsewhere / "file")
    for key in ("linked/box/k", "v1/box/taken", "v1/box/target"):
        for value in "12":
            await store.put(key, value)
        item = await store.get(key)
        assert item is not None
        assert item.value == "2"
    assert list(elsewhere.iterdir()) == []
    assert not (directory / "v1/box/target").is_symlink()
    warned = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert len(warned) == 2
    await store.delete("v1/box/taken")
    assert (directory / "v1/box/taken/x").is_dir()


# Writers that die


async def test_a_writer_killed_at_any_step_leaves_a_whole_transaction_or_none(
    directory: Path, connect: Connect, children: Children
) -> None:
    before = {"v1/box/old": "old"}
    after = {"v1/box/a": "new", "v1/other/b": "new", "c": "new"}
    seen: set[bool] = set()
    driver = children.start("transact")
    for step in range(1, 60):
        shutil.rmtree(directory, ignore_errors=True)
        store = connect()
        await store.put("v1/box/old", "old")
        watched = await Watched(store, "").started()
        said = await children.answer(driver, step)
        # A reader, which does not write, sees one or the other before anybody tidies up.
        values = {item.key: item.value for item in await connect().list("")}
        assert values in (before, after), step
        await watched.reaches(values)
        assert {item.key: item.value for item in await store.list("")} == values
        # The next writer finishes what the log says and takes the rest away.
        await store.put("next", "1")
        expected = {**values, "next": "1"}
        assert shown(directory) == {path_of(key): value for key, value in expected.items()}, step
        assert list((directory / ".dynaplan/staging").iterdir()) == []
        await watched.stop()
        await store.close()
        seen.add(values == after)
        if said == "done":
            break
    assert said == "done"
    assert step > 10
    assert seen == {False, True}


async def test_the_keys_of_a_killed_process_go_within_a_second(store: FileStore, children: Children) -> None:
    watched = await Watched(store, "").started()
    child, _ = await children.said("hold", "v1/box/k", 30)
    await watched.reaches({"v1/box/k": "held"})
    killed_s = time.monotonic()
    child.kill()
    await eventually(lambda: watched.events[-1] == Deleted("v1/box/k"), interval_s=0.005)
    assert time.monotonic() - killed_s < 1.0
    await watched.stop()


async def test_the_keys_of_a_dead_process_are_removed_by_the_next_that_reads(
    connect: Connect, children: Children, directory: Path
) -> None:
    child, _ = await children.said("hold", "v1/box/k", 30)
    child.kill()
    child.wait()
    assert await connect().list("") == ()
    assert shown(directory) == {}


async def test_a_frozen_process_loses_its_lease_with_its_time_not_before(
    store: FileStore, children: Children
) -> None:
    watched = await Watched(store, "").started()
    child, lease = await children.said("hold", "v1/box/k", 2)
    frozen_s = time.monotonic()
    child.send_signal(signal.SIGSTOP)
    await consistently(lambda: watched.state == {"v1/box/k": "held"}, for_s=0.8)
    await eventually(lambda: watched.state == {}, timeout_s=4)
    assert time.monotonic() - frozen_s > 1.5
    assert await store.keep_alive(int(lease)) == 0.0
    await watched.stop()


async def test_a_process_that_has_closed_its_store_leaves_its_leases_to_their_time(
    store: FileStore, children: Children
) -> None:
    child, lease = await children.said("leave", "v1/box/k", 2)
    child.wait()
    assert await store.get("v1/box/k") is not None
    assert await store.keep_alive(int(lease)) == 2.0
    watched = await Watched(store, "").started()
    await eventually(lambda: watched.state == {}, timeout_s=5)
    await watched.stop()


async def test_a_lease_belongs_to_the_process_that_kept_it_alive_last(
    store: FileStore, children: Children
) -> None:
    watched = await Watched(store, "").started()
    first, lease = await children.said("hold", "v1/box/k", 30)
    second, left = await children.said("keep", lease)
    assert left == "30.0"
    first.kill()
    first.wait()
    await consistently(lambda: watched.state == {"v1/box/k": "held"}, for_s=0.3)
    second.kill()
    await watched.reaches({})
    await watched.stop()


async def test_a_writer_that_stands_still_in_its_write_is_an_error_in_time_and_readers_go_on(
    store: FileStore, connect: Connect
) -> None:
    await store.put("k", "v")
    frozen = connect()
    await frozen.get("k")
    assert frozen._disk.try_lock()
    begun_s = time.monotonic()
    with pytest.raises(StoreUnavailable, match="locked"):
        await store.put("k", "w")
    assert time.monotonic() - begun_s < 4.0
    item = await store.get("k")
    assert item is not None
    assert item.value == "v"
    frozen._disk.unlock()
    await store.put("k", "w")


async def test_a_lost_lease_drains_nobody_and_a_revoked_one_does(
    store: FileStore, children: Children, directory: Path
) -> None:
    watched = await Watched(store, "/services/").started()

    def lease() -> int:
        (key,) = watched.state or ("/0",)
        return int(key.rpartition("/")[2], 16)

    child, _ = await children.said("register", 2)
    first = await eventually(lease)
    child.send_signal(signal.SIGSTOP)
    await eventually(lambda: not watched.state, timeout_s=5)
    child.send_signal(signal.SIGCONT)
    second = await eventually(lease)  # frozen: its lease is lost, and it has another one
    shutil.rmtree(directory)
    third = await eventually(lambda: lease() not in (0, first, second) and lease())  # wiped
    await store.revoke(third)
    assert await children.answer(child) == "revoked"
    await watched.stop()


# Many changes


async def test_a_watch_sees_every_final_state_while_two_processes_write_a_thousand_keys(
    store: FileStore, children: Children
) -> None:
    watched = await Watched(store, "").started()
    writers = [(await children.said("count", f"v1/{name}/", 500, 3))[0] for name in "ab"]
    for writer in writers:
        print("go", file=writer.stdin, flush=True)
    expected = {f"v1/{name}/{number}": "2" for name in "ab" for number in range(500)}
    await eventually(lambda: watched.state == expected, timeout_s=90, interval_s=0.1)
    assert watched.snapshots == 1
    assert len(watched.puts) == 3000
    await watched.stop()


async def test_a_watch_has_no_gap_while_the_log_is_begun_anew(
    store: FileStore, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "COMPACTED_ABOVE_BYTES", 2000)
    other = connect()
    watched = await Watched(other, "").started()
    identity = await store.identity()
    lease = await store.grant(10)
    for number in range(200):
        await store.put("k", str(number), lease)
        if number % 20 == 0:
            await eventually(lambda: watched.puts)
    await watched.reaches({"k": "199"})
    assert os.stat(store._disk._log_path).st_size < 6000
    assert await connect().get("k") == await store.get("k")
    assert await other.identity() == identity
    await watched.stop()


async def test_a_watch_that_slept_through_it_begins_with_a_new_snapshot(
    store: FileStore, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "COMPACTED_ABOVE_BYTES", 2000)
    watched = await Watched(connect(), "").started()
    for number in range(100):
        await store.put("k", str(number))  # It never waits: the watch does not get its turn.
    await watched.reaches({"k": "99"})
    assert watched.snapshots == 2
    await watched.stop()


async def test_without_notices_of_the_kernel_changes_are_looked_for(
    connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none_left(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(following, "FileNotices", none_left)
    monkeypatch.setattr(os, "pidfd_open", none_left)
    store = connect()
    watched = await Watched(store, "").started()
    await connect().put("k", "v")
    await watched.reaches({"k": "v"})
    assert "looked for every 1 s" in caplog.text
    await watched.stop()


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
    shutil.rmtree(directory)
    await watched.reaches({})
    assert await store.keep_alive(lease) == 0.0
    assert await store.identity() == await other.identity() != identity
    await store.put("v1/box/k", "again")
    await watched.reaches({"v1/box/k": "again"})
    assert shown(directory) == {"v1/box/k": "again"}
    await watched.stop()


async def test_a_store_that_is_moved_away_is_left_for_a_new_one(
    store: FileStore, directory: Path, tmp_path: Path
) -> None:
    await store.put("k", "v")
    watched = await Watched(store, "").started()
    shutil.move(directory, tmp_path / "elsewhere")
    await watched.reaches({})
    await store.put("k", "w")
    assert shown(tmp_path / "elsewhere") == {"+flat/k": "v"}
    await watched.stop()


async def test_a_store_whose_place_is_gone_is_an_error_and_heals_when_it_is_back(
    store: FileStore, directory: Path, tmp_path: Path
) -> None:
    place = tmp_path / "place"
    place.mkdir(mode=0o700)
    store = FileStore.from_environment({"DYN_FILE_KV": str(place / "kv")})
    await store.put("k", "v")
    watched = await Watched(store, "").started()
    shutil.rmtree(place)
    with pytest.raises(StoreUnavailable, match="No such file"):
        await store.put("k", "v")
    place.mkdir(mode=0o700)
    await eventually(lambda: watched.state == {}, timeout_s=5)
    await store.put("k", "w")
    await watched.reaches({"k": "w"})
    await watched.stop()
    await store.close()


async def test_a_removed_lock_file_harms_nobody(store: FileStore, connect: Connect, directory: Path) -> None:
    lease = await store.grant(10)
    await store.put("k", "v", lease)
    (directory / ".dynaplan/lock").unlink()
    other = connect()
    assert await other.get("k") is not None
    await other.put("l", "v")
    assert await store.keep_alive(lease) == 10.0
    assert {item.key for item in await store.list("")} == {"k", "l"}


@pytest.mark.parametrize("damage", [b"rubbish\n", b"00000000 {}\n" * 3, b'\0\0{"number":3}\n'])
async def test_a_damaged_log_is_set_aside_with_all_that_came_before_kept(
    store: FileStore, directory: Path, connect: Connect, damage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    await store.put("k", "v")
    identity = await store.identity()
    watched = await Watched(store, "").started()
    with (directory / ".dynaplan/journal/log").open("ab") as file:
        file.write(damage)
    await eventually(lambda: watched.snapshots == 2)
    assert watched.state == {"k": "v"}
    assert await store.identity() != identity
    assert "damaged" in caplog.text
    assert len(list((directory / ".dynaplan").glob("damaged-*"))) == 1
    await connect().put("k", "w")
    await watched.reaches({"k": "w"})
    await watched.stop()


async def test_a_log_that_is_no_log_at_all_is_set_aside(directory: Path, connect: Connect) -> None:
    await connect().put("k", "v")
    (directory / ".dynaplan/journal/log").write_bytes(b"\0" * 100)
    store = connect()
    assert await store.list("") == ()
    await store.put("l", "w")
    assert [item.key for item in await store.list("")] == ["l"]


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
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


def test_another_users_directory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "theirs"
    path.mkdir(mode=0o700)
    try:
        os.chown(path, 65534, -1)
    except PermissionError:
        pytest.skip("only root may give files away")
    assert "another user (uid 65534)" in refusal(path)


async def test_a_directory_that_is_replaced_by_an_unsafe_one_ends_calls_and_watches(
    store: FileStore, directory: Path
) -> None:
    await store.put("k", "v")
    watched = await Watched(store, "").started()
    replace_by_an_open_one(directory)
    with pytest.raises(ConfigError, match="chmod 700"):
        await store.put("k", "w")
    with pytest.raises(ConfigError):
        await asyncio.wait_for(watched.task, 5)
    assert os.listdir(directory) == []
    os.chmod(directory, 0o700)
    again = await Watched(store, "").started()
    await store.put("k", "w")
    await again.reaches({"k": "w"})
    await again.stop()


# The disk


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Path]:
    """A file system in memory of its own, of 256 KiB."""
    path = tmp_path / "mounted"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k,mode=0700", "tmpfs", str(path)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting is not allowed here")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


async def test_a_full_disk_refuses_a_write_as_a_whole_and_loses_nothing(mounted: Path) -> None:
    store = FileStore(mounted / "kv")
    await store.put("v1/box/a", "old")
    (mounted / "ballast").write_bytes(b"x" * 150_000)
    with pytest.raises(StoreUnavailable, match="No space left"):
        await store.commit(Transaction(puts={"v1/box/a": "new", "v1/box/b": "x" * 200_000}))
    assert shown(mounted / "kv") == {"v1/box/a": "old"}
    assert [(item.key, item.value) for item in await store.list("")] == [("v1/box/a", "old")]
    (mounted / "ballast").unlink()
    assert await store.commit(Transaction(puts={"v1/box/a": "new", "v1/box/b": "x"}))
    assert shown(mounted / "kv") == {"v1/box/a": "new", "v1/box/b": "x"}
    await store.close()


async def test_a_store_fills_its_disk_to_the_last_byte_without_a_half_written_key(mounted: Path) -> None:
    store = FileStore(mounted / "kv")
    written = {}
    with pytest.raises(StoreUnavailable, match="No space left"):
        for number in range(1000):
            await store.put(f"v1/box/{number}", "x" * 700)
            written[f"v1/box/{number}"] = "x" * 700
    other = FileStore(mounted / "kv")
    assert {item.key: item.value for item in await other.list("")} == written
    assert shown(mounted / "kv") == written
    await store.close()
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
        with pytest.raises(StoreUnavailable, match="Read-only"):
            await change
    remount(mounted, "rw")
    await store.put("k", "w")
    await watched.reaches({"k": "w"})
    await watched.stop()
    await store.close()


@pytest.mark.parametrize("failing", ["open", "write", "replace", "pwrite"])
async def test_any_call_that_the_disk_refuses_is_an_error_or_is_made_good_by_the_next(
    store: FileStore, directory: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    await store.put("v1/box/k", "0")

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, failing, refuse)
        try:
            await store.put("v1/box/k", "1")
            value = "1"
        except StoreUnavailable:
            value = "0"
    item = await store.get("v1/box/k")
    assert item is not None
    assert item.value == value
    await store.put("other", "1")
    assert shown(directory) == {"v1/box/k": value, "+flat/other": "1"}


async def test_text_that_stands_for_no_bytes_and_an_empty_key_are_refused_for_good(store: FileStore) -> None:
    for key, value in (("k", "\ud800"), ("\ud800", "v"), ("", "v")):
        with pytest.raises(PermanentError):
            await store.put(key, value)
    assert await store.list("") == ()


# Idleness


@pytest.mark.alone
async def test_an_idle_watch_costs_next_to_nothing(store: FileStore) -> None:
    lease = await store.grant(30)
    await store.put("k", "v", lease)
    watched = await Watched(store, "").started()
    begun_s, used_s = time.monotonic(), time.process_time()
    await asyncio.wait({watched.task}, timeout=3)
    assert (time.process_time() - used_s) / (time.monotonic() - begun_s) < 0.005
    await watched.stop()
