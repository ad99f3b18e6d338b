"""The simulated engine asleep."""

from __future__ import annotations

from dynaplan.engines.port import EngineContext
from dynaplan.engines.sim.engine import SimEngine


async def test_it_sleeps_where_that_is_enabled_and_is_awake_again_when_it_was_woken() -> None:
    engine = SimEngine({"model": "m", "enable-sleep-mode": True, "speedup-ratio": 0}, EngineContext("w"))
    await engine.start()
    assert await engine.sleep("1") == ""
    assert engine.load().is_asleep
    assert await engine.wake() == ""
    assert not engine.load().is_asleep
    await engine.stop()


async def test_without_the_option_it_says_so() -> None:
    engine = SimEngine({"model": "m"}, EngineContext("w"))
    assert await engine.sleep("1") == "enable-sleep-mode is not set."
    assert not engine.load().is_asleep
