from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace

import pytest

from dynaplan.engines.server.engine_watchdog import EngineWatchdog
from dynaplan.engines.server.metrics import EngineMetrics
from dynaplan.util.errors import TemporaryError
from tests.fakes.clock import ManualClock


class Engine:
    """Tells what it is set to; ``read`` fails while it ``is_silent``."""

    def __init__(self) -> None:
        self.signals = EngineMetrics()
        self.is_silent = False
        self.reads = 0

    async def read(self) -> EngineMetrics:
        self.reads += 1
        if self.is_silent:
            raise ConnectionRefusedError("nobody listens")
        return self.signals

    def work(self) -> None:
        self.signals = replace(self.signals, progress=(self.signals.progress[0] + 1.0,))


BUSY = EngineMetrics(running=2, waiting=1, progress=(10.0,))


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


async def pass_time(
    watch: EngineWatchdog, clock: ManualClock, seconds: int, each: Callable[[], None] = lambda: None
) -> bool:
    """Poll once a second for so long; whether the engine was found to be hung."""
    hung = asyncio.create_task(watch.wait_until_hung())
    for _ in range(seconds):
        clock.advance(1)
        each()
        await watch.poll()
        await asyncio.sleep(0)
    is_hung = hung.done()
    hung.cancel()
    return is_hung


async def test_running_requests_without_progress_are_a_hang_after_the_timeout(
    engine: Engine, clock: ManualClock
) -> None:
    watch = EngineWatchdog(engine.read, clock, hang_timeout_s=30)
    engine.signals = BUSY
    assert not await pass_time(watch, clock, 30)  # the first reading differs from no reading
    assert await pass_time(watch, clock, 1)
    assert "hang-timeout" in await watch.wait_until_hung()


async def test_a_busy_engine_whose_counters_move_is_never_hung(engine: Engine, clock: ManualClock) -> None:
    watch = EngineWatchdog(engine.read, clock, hang_timeout_s=30)
    engine.signals = BUSY
    assert not await pass_time(watch, clock, 1000, engine.work)


async def test_one_step_in_every_timeout_is_progress_enough(engine: Engine, clock: ManualClock) -> None:
    watch = EngineWatchdog(engine.read, clock, hang_timeout_s=30)
    engine.signals = BUSY

    def work_slowly() -> None:
        if clock.time_s % 29 == 0:
            engine.work()

    assert not await pass_time(watch, clock, 1000, work_slowly)


async def test_an_idle_engine_is_never_hung(engine: Engine, clock: ManualClock) -> None:
    watch = EngineWatchdog(engine.read, clock, hang_timeout_s=30)
    engine.signals = EngineMetrics(progress=(10.0,))
    assert not await pass_time(watch, clock, 1000)


async def test_requests_that_only_wait_for_others_are_no_hang(engine: Engine, clock: ManualClock) -> None:
    """A decode engine waits for the KV entries of a prefill that somebody else computes."""
    watch = EngineWatchdog(engine.read, clock, hang_timeout_s=30, waits_for_others=True)
    engine.signals = EngineMetrics(waiting=3, progress=(10.0,))
    assert not await pass_time(watch, clock, 1000)


async def test_requests_that_wait_while_nothing_runs_and_nobody_else_works_for_them_are_a_hang(
    engine: Engine, clock: ManualClock
) -> None:
    watch = EngineWatchdog(engine.read, clock, hang_timeout_s=30)
    engine.signals = EngineMetrics(waiting=3, progress=(10.0,))
    assert await pass_time(watch, clock, 31)


async def test_an_engine_that_tells_no_progress_is_hung_only_when_it_does_not_answer(
    engine: Engine, clock: ManualClock
) -> None:
    watch = EngineWatchdog(engine.read, clock, hang_timeout_s=30)
    engine.signals = EngineMetrics(running=2)
    assert not await pass_time(watch, clock, 1000)


@pytest.mark.parametrize("signals", [BUSY, EngineMetrics()])
async def test_an_engine_that_does_not_answer_is_hung(
    engine: Engine, clock: ManualClock, signals: EngineMetrics
) -> None:
    watch = EngineWatchdog(engine.read, clock, hang_timeout_s=30)
    engine.signals = signals
    await watch.poll()
    engine.is_silent = True
    assert not await pass_time(watch, clock, 29)
    assert await pass_time(watch, clock, 1)


async def test_a_single_answer_of_an_idle_engine_ends_the_suspicion(
    engine: Engine, clock: ManualClock
) -> None:
    watch = EngineWatchdog(engine.read, clock, hang_timeout_s=30)
    engine.is_silent = True
    assert not await pass_time(watch, clock, 29)
    engine.is_silent = False
    assert not await pass_time(watch, clock, 1)
    engine.is_silent = True
    assert not await pass_time(watch, clock, 29)


async def test_a_timeout_of_0_means_never(engine: Engine, clock: ManualClock) -> None:
    watch = EngineWatchdog(engine.read, clock, hang_timeout_s=0)
    engine.is_silent = True
    assert not await pass_time(watch, clock, 1000)


async def test_time_in_which_the_worker_itself_stood_still_is_not_the_engines(
    engine: Engine, clock: ManualClock
) -> None:
    watch = EngineWatchdog(engine.read, clock, hang_timeout_s=30)
    engine.signals = BUSY
    await watch.poll()
    clock.advance(3600)
    assert not await pass_time(watch, clock, 1)


async def test_a_failing_poll_keeps_the_last_load(engine: Engine, clock: ManualClock) -> None:
    watch = EngineWatchdog(engine.read, clock, hang_timeout_s=30, request_slots=8)
    engine.signals = replace(BUSY, samples={"e:tokens_total": 3.0})
    await watch.poll()
    engine.is_silent = True
    await watch.poll()
    assert (watch.load().running_requests, watch.load().request_slots) == (2, 8)
    assert watch.metrics() == {"e:tokens_total": 3.0}


async def test_requests_are_counted_anew_at_every_question(engine: Engine, clock: ManualClock) -> None:
    watch = EngineWatchdog(engine.read, clock, hang_timeout_s=30)
    assert await watch.count_requests() == 0
    engine.signals = BUSY
    assert await watch.count_requests() == 3
    engine.is_silent = True
    with pytest.raises(TemporaryError, match="nobody listens"):
        await watch.count_requests()


async def test_asking_for_the_requests_does_not_hide_progress_from_the_watch(
    engine: Engine, clock: ManualClock
) -> None:
    watch = EngineWatchdog(engine.read, clock, hang_timeout_s=30)
    engine.signals = BUSY
    for _ in range(100):
        engine.work()
        await watch.count_requests()
        assert not await pass_time(watch, clock, 1)


async def test_polling_goes_on_once_a_second_until_it_is_stopped(engine: Engine, clock: ManualClock) -> None:
    watch = EngineWatchdog(engine.read, clock, hang_timeout_s=3)
    engine.signals = BUSY
    begin_s = clock.time_s
    watch.start()
    await watch.wait_until_hung()
    assert clock.time_s - begin_s == pytest.approx(3, abs=1.5)
    watch.stop()
    reads = engine.reads
    for _ in range(10):
        await asyncio.sleep(0)
    assert engine.reads == reads


async def test_a_signal_that_this_version_lacks_is_told_once(
    engine: Engine, clock: ManualClock, caplog: pytest.LogCaptureFixture
) -> None:
    watch = EngineWatchdog(engine.read, clock, hang_timeout_s=30)
    caplog.set_level(logging.WARNING)
    engine.signals = EngineMetrics(missing=("kv_usage (e:usage)",))  # an engine that tells nothing yet
    await watch.poll()
    assert caplog.messages == []
    engine.signals = replace(engine.signals, running=1)
    for _ in range(3):
        await watch.poll()
    assert len(caplog.messages) == 1
    assert "kv_usage (e:usage)" in caplog.messages[0]


async def test_an_engine_that_sleeps_is_not_hung_whatever_requests_it_has(
    engine: Engine, clock: ManualClock
) -> None:
    watch = EngineWatchdog(engine.read, clock, hang_timeout_s=5)
    engine.signals = replace(BUSY, is_asleep=True)
    assert not await pass_time(watch, clock, 60)
    assert watch.load().is_asleep
    engine.signals = BUSY
    assert await pass_time(watch, clock, 7)
