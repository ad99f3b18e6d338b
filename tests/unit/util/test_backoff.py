"""Pauses between attempts."""

from __future__ import annotations

from dynaplan.util.backoff import Backoff


class Sleeps(list[float]):
    async def sleep(self, seconds: float) -> None:
        self.append(seconds)


async def test_pauses_double_up_to_the_longest() -> None:
    slept = Sleeps()
    backoff = Backoff(0.1, 0.5, slept.sleep)
    for _ in range(5):
        await backoff.pause()
    assert slept == [0.1, 0.2, 0.4, 0.5, 0.5]


async def test_a_success_begins_anew() -> None:
    slept = Sleeps()
    backoff = Backoff(0.1, 0.5, slept.sleep)
    assert backoff.is_first
    await backoff.pause()
    assert not backoff.is_first
    backoff.reset()
    assert backoff.is_first
    await backoff.pause()
    assert slept == [0.1, 0.1]
