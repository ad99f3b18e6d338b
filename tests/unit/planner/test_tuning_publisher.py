"""The limit that a planner publishes: there while the planner decides, and not for ever after."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.option_changes import OptionChange
from dynaplan.contract.running_limits import RunningLimit
from dynaplan.planner.model import Tuning
from dynaplan.planner.virtual.tuning_publisher import TuningPublisher
from dynaplan.util.errors import StoreUnavailable
from tests.fakes.clock import LoopClock
from tests.fakes.store import FakeStore

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

SETTINGS = PlannerSettings(namespace="ns", adjustment_interval_s=10.0)
KEY = "v1/ns/running_limits/VllmWorker"
LENGTH_KEY = "/ns/disagg_router/max_local_prefill_length"
LIMIT = RunningLimit(4, 0.5, 2.0)


def publisher(store: FakeStore) -> TuningPublisher:
    return TuningPublisher(store, SETTINGS, LoopClock())


async def test_a_limit_is_published_changed_and_withdrawn() -> None:
    store = FakeStore()
    published = publisher(store)
    await published.publish(Tuning())
    assert not store.items
    for limit in (LIMIT, RunningLimit(5, 0.5, 2.0)):
        await published.publish(Tuning(limit))
        assert RunningLimit.from_text(store.items[KEY].value) == limit
    await published.publish(Tuning())
    assert KEY not in store.items


async def test_an_end_takes_the_limit_along_at_once_and_a_kill_after_some_intervals() -> None:
    store = FakeStore()
    ended, killed = publisher(store), publisher(store)
    await ended.publish(Tuning(LIMIT))
    await ended.close()
    assert KEY not in store.items
    await killed.publish(Tuning(LIMIT))
    assert killed._lease
    killed._lease._keeping.cancel()
    await asyncio.sleep(25.0)
    assert KEY in store.items
    await asyncio.sleep(10.0)
    assert KEY not in store.items


async def test_what_the_store_has_lost_is_written_again() -> None:
    store = FakeStore()
    published = publisher(store)
    store.go_away()
    await published.publish(Tuning(LIMIT))
    store.come_back()
    await published.publish(Tuning(LIMIT))
    assert KEY in store.items
    await store.revoke(store.items[KEY].lease)
    await asyncio.sleep(30.0)
    await published.publish(Tuning(LIMIT))
    assert KEY in store.items
    await published.close()


async def test_a_length_that_somebody_else_has_set_stays() -> None:
    store = FakeStore()
    await store.put(LENGTH_KEY, "512")
    published = publisher(store)
    await published.publish(Tuning(max_local_prefill_tokens=100, max_local_running=4))
    await published.publish(Tuning(max_local_prefill_tokens=200, max_local_running=4))
    assert store.items[LENGTH_KEY].value == "512"
    await published.close()
    assert list(store.items) == [LENGTH_KEY]


async def test_a_length_that_somebody_else_takes_back_is_the_planner_s_again() -> None:
    store = FakeStore()
    await store.put(LENGTH_KEY, "512")
    published = publisher(store)
    tuning = Tuning(max_local_prefill_tokens=100, max_local_running=4)
    await published.publish(tuning)
    await store.delete(LENGTH_KEY)
    await published.publish(tuning)
    assert store.items[LENGTH_KEY].value == "100"
    await published.close()


async def test_the_next_planner_takes_over_what_one_that_was_killed_has_set() -> None:
    store = FakeStore()
    killed, started = publisher(store), publisher(store)
    await killed.publish(Tuning(max_local_prefill_tokens=512, max_local_running=4))
    assert killed._lease
    killed._lease._keeping.cancel()
    await started.publish(Tuning(max_local_prefill_tokens=100, max_local_running=4))
    assert store.items[LENGTH_KEY].value == "100"
    await asyncio.sleep(60.0)
    assert store.items[LENGTH_KEY].value == "100"
    await started.close()
    assert not store.items


async def test_what_was_written_in_part_is_written_again_though_it_was_published_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = FakeStore()
    published, before = publisher(store), Tuning(LIMIT, max_local_prefill_tokens=100)
    await published.publish(before)

    async def refuse(key: str) -> None:
        raise StoreUnavailable("away for a moment")

    with monkeypatch.context() as patched:
        patched.setattr(store, "get", refuse)
        await published.publish(Tuning(RunningLimit(9, 0.5, 2.0), max_local_prefill_tokens=200))
    await published.publish(before)
    assert RunningLimit.from_text(store.items[KEY].value) == LIMIT
    await published.close()


async def test_who_sets_no_length_says_nothing_of_one_that_somebody_else_has_set(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    store = FakeStore()
    await store.put(LENGTH_KEY, "512")
    published = publisher(store)
    await published.publish(Tuning(LIMIT))
    assert LENGTH_KEY not in caplog.text
    await published.close()


async def test_a_length_follows_the_load_and_gives_the_configured_one_back() -> None:
    store = FakeStore()
    published = publisher(store)
    for length in (100, 0, 200):
        await published.publish(Tuning(max_local_prefill_tokens=length, max_local_running=4))
        assert store.items[LENGTH_KEY].value == str(length)
    await published.publish(Tuning())
    assert not store.items
    await published.close()


CHANGE = OptionChange("VllmWorker", "max-num-seqs", 8, 16, 1.0)
CHANGE_KEY = "v1/ns/planner_extensions/option_change"


async def test_a_change_of_an_option_is_in_the_store_and_read_back_and_outlives_the_planner() -> None:
    store = FakeStore()
    adjusting = TuningPublisher(store, replace(SETTINGS, adjust_knobs=True), LoopClock())
    assert await adjusting.asked() is None
    await adjusting.ask(CHANGE)
    await adjusting.close()
    assert await adjusting.asked() == CHANGE
    assert await publisher(store).asked() is None
    await store.put(CHANGE_KEY, "16")
    assert await adjusting.asked() is None


async def test_a_change_that_the_store_does_not_take_is_no_error() -> None:
    store = FakeStore()
    store.go_away()
    await publisher(store).ask(CHANGE)
    assert CHANGE_KEY not in store.items
