"""Who has which slot, for how long; and the files that slots are saved into. No engine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dynaplan.engines.llamacpp.slots import UNUSED_RESERVATION_S, SlotFiles, SlotPool
from dynaplan.util.errors import TemporaryError
from tests.fakes.clock import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(0.0)


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


async def started(*tasks: asyncio.Task[int]) -> None:
    """Let every task run until it waits."""
    for _ in range(3):
        await asyncio.sleep(0)
    assert not any(task.cancelled() for task in tasks)


async def test_each_slot_has_one_owner_and_the_longest_free_goes_first(clock: ManualClock) -> None:
    pool = SlotPool(2, clock.now_s)
    assert [await pool.take("a"), await pool.take("b")] == [0, 1]
    pool.release("b", is_idle=True)
    pool.release("a", is_idle=True)
    assert [await pool.take("c"), await pool.take("d")] == [1, 0]
    assert (pool.reserved, pool.waiting) == (2, 0)


async def test_an_owner_that_asks_again_has_the_same_slot(clock: ManualClock) -> None:
    pool = SlotPool(2, clock.now_s)
    assert await pool.take("a") == await pool.take("a") == 0
    pool.release("a", is_idle=True)
    assert pool.reserved == 0


async def test_who_waits_is_served_in_order(clock: ManualClock) -> None:
    pool = SlotPool(1, clock.now_s)
    await pool.take("a")
    second, third = asyncio.create_task(pool.take("b")), asyncio.create_task(pool.take("c"))
    await started(second, third)
    assert pool.waiting == 2
    pool.release("a", is_idle=True)
    assert await second == 0
    assert pool.waiting == 1
    pool.release("b", is_idle=True)
    assert await third == 0


async def test_a_slot_that_still_computes_is_not_given_out(clock: ManualClock) -> None:
    pool = SlotPool(1, clock.now_s)
    await pool.take("a")
    pool.observe({0})
    pool.release("a")
    following = asyncio.create_task(pool.take("b"))
    await started(following)
    pool.observe({0})
    await started(following)
    assert not following.done()
    assert pool.releasing == 1
    pool.observe(())
    assert await following == 0
    assert pool.releasing == 0


async def test_who_leaves_the_queue_is_passed_over(clock: ManualClock) -> None:
    pool = SlotPool(1, clock.now_s)
    await pool.take("a")
    releasing, following = asyncio.create_task(pool.take("b")), asyncio.create_task(pool.take("c"))
    await started(releasing, following)
    releasing.cancel()
    await asyncio.gather(releasing, return_exceptions=True)
    pool.release("a", is_idle=True)
    assert await following == 0
    assert pool.waiting == 0


async def test_who_leaves_just_when_he_gets_a_slot_does_not_keep_it(clock: ManualClock) -> None:
    pool = SlotPool(1, clock.now_s)
    await pool.take("a")
    releasing = asyncio.create_task(pool.take("b"))
    await started(releasing)
    pool.release("a", is_idle=True)
    releasing.cancel()
    await asyncio.gather(releasing, return_exceptions=True)
    assert pool.reserved == 0
    pool.observe(())
    assert await pool.take("c") == 0


async def test_giving_back_while_waiting_ends_the_waiting(clock: ManualClock) -> None:
    pool = SlotPool(1, clock.now_s)
    await pool.take("a")
    waiting = asyncio.create_task(pool.take("b"))
    await started(waiting)
    pool.release("b")
    with pytest.raises(TemporaryError):
        await waiting
    assert pool.waiting == 0
    pool.release("unknown")


async def test_a_slot_that_is_reserved_and_never_computes_is_taken_back(clock: ManualClock) -> None:
    pool = SlotPool(2, clock.now_s)
    for owner in ("its frontend has died", "computes"):
        await pool.take(owner)
        pool.announce(owner)
    for second in range(int(UNUSED_RESERVATION_S) + 1):
        clock.time_s = second
        pool.observe({1})
    assert (pool.reserved, pool.reclaimed) == (1, 1)


async def test_the_time_in_which_a_prompt_is_restored_does_not_count_as_unused(clock: ManualClock) -> None:
    pool = SlotPool(1, clock.now_s)
    await pool.take("a")
    for clock.time_s in (0, 2 * UNUSED_RESERVATION_S):
        pool.observe(())
    pool.announce("a")
    for clock.time_s in (2 * UNUSED_RESERVATION_S, 3 * UNUSED_RESERVATION_S - 1):
        pool.observe(())
    assert (pool.reserved, pool.reclaimed) == (1, 0)
    clock.time_s = 3 * UNUSED_RESERVATION_S
    pool.observe(())
    assert (pool.reserved, pool.reclaimed) == (0, 1)
    pool.announce("a")


async def test_computing_now_and_then_keeps_a_slot(clock: ManualClock) -> None:
    pool = SlotPool(1, clock.now_s)
    await pool.take("a")
    pool.announce("a")
    for second in range(100):
        clock.time_s = second
        pool.observe({0} if second % 9 == 0 else ())
    assert (pool.reserved, pool.reclaimed) == (1, 0)


async def test_where_nothing_is_taken_back_a_slot_stays_with_its_owner(clock: ManualClock) -> None:
    pool = SlotPool(1, clock.now_s, unused_s=0)
    await pool.take("a")
    pool.announce("a")
    pool.observe(())
    clock.time_s = 1000
    pool.observe(())
    assert pool.reserved == 1


async def test_a_file_lives_until_its_request_is_released(tmp_path: Path) -> None:
    files = SlotFiles(str(tmp_path), "w")
    names = [files.new_name(), files.new_name()]
    for name in names:
        (tmp_path / name).touch()
        files.assign("r", name)
        files.holds.hold("r")
    assert files.find(names[0]) == names[0]
    files.holds.release("r")
    assert names_in(tmp_path) == []
    assert files.holds.held == 0


async def test_a_file_that_nobody_releases_is_deleted_in_the_end(tmp_path: Path) -> None:
    files = SlotFiles(str(tmp_path), "w", hold_s=0.01)
    name = files.new_name()
    (tmp_path / name).touch()
    files.assign("r", name)
    files.holds.hold("r")
    await files.holds.wait_empty()
    assert names_in(tmp_path) == []


def test_only_the_worker_s_own_leftovers_are_deleted(tmp_path: Path) -> None:
    for name in ("w.1.kv", "w.old", "w_1.1.kv", "other.kv"):
        (tmp_path / name).touch()
    SlotFiles(str(tmp_path), "w").delete_all()
    assert names_in(tmp_path) == ["other.kv", "w_1.1.kv"]


def test_two_lives_of_a_worker_never_use_the_same_name(tmp_path: Path) -> None:
    assert SlotFiles(str(tmp_path), "w").new_name() != SlotFiles(str(tmp_path), "w").new_name()


@pytest.mark.parametrize(
    "name", ["../w.kv", "/etc/passwd", "", ".", "..", "sub/w.kv", 7, None, "w.txt", "gone.kv"]
)
def test_a_name_that_leads_elsewhere_is_no_file(tmp_path: Path, name: object) -> None:
    scratch = tmp_path / "scratch"
    (scratch / "sub").mkdir(parents=True)
    for path in (tmp_path / "w.kv", scratch / "sub" / "w.kv", scratch / "w.txt"):
        path.touch()
    (scratch / "link.kv").symlink_to(tmp_path / "w.kv")
    files = SlotFiles(str(scratch), "w")
    assert files.find(name) == ""
    assert files.find("link.kv") == ""


def test_without_a_directory_there_are_no_files() -> None:
    files = SlotFiles("", "w")
    files.delete_all()
    files.delete("w.kv")
    assert files.find("w.kv") == ""
