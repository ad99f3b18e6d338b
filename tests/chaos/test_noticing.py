"""The statefile says what is, whoever dies one after the other and whatever does not answer; virtual time."""

from __future__ import annotations

import asyncio
from contextlib import nullcontext
from unittest.mock import patch

import pytest

from dynaplan.fleet.plugin.document import Statefile
from dynaplan.fleet.plugin.reconciler import Reconciler
from tests.chaos.schedules.schedule import Schedule, run_schedule

SEEDS = range(4)
SILENT_S = 12.0
"""Longer than ``CircusClient`` waits for an answer."""

BEGUN_S = 1.0
"""By then the pass that a death has caused waits for circus."""


class Deaths(Schedule):
    def kill_one(self, service: str) -> None:
        victim = self.machine.of(service)[0]
        self.machine.tell(f"kill -9 {victim.name} ({victim.pid})")
        self.machine.kill(victim)


class OneAfterTheOther(Deaths):
    """Within some seconds all die that notice a death, or are asked about it, and a decode worker."""

    async def harm(self) -> None:
        async def kill_decode() -> None:
            self.kill_one("VllmWorker")

        deaths = [self._kill_serve, self._kill_plugin, self._messenger_away, self._store_away, kill_decode]
        self.dice.shuffle(deaths)
        for kill in deaths:
            await kill()
            await asyncio.sleep(self.dice.uniform(0.3, 3.0))
        await self._silence_circus()
        await asyncio.sleep(SILENT_S)


class NewPlugin(Deaths):
    """A new fleet plugin finds that a worker has died, and that circus does not answer."""

    async def harm(self) -> None:
        self.machine.circus.is_silent = True
        await self._kill_plugin()
        self.kill_one("VllmWorker")
        await asyncio.sleep(SILENT_S)
        await self.machine.circus.speak()


class PassThatWaits(Deaths):
    """A worker dies while the fleet plugin waits for circus, which is to start another one."""

    async def harm(self) -> None:
        self.machine.circus.is_silent = True
        self.kill_one("PrefillWorker")
        await asyncio.sleep(BEGUN_S)
        self.kill_one("VllmWorker")
        await asyncio.sleep(SILENT_S)
        await self.machine.circus.speak()


@pytest.mark.parametrize("kind", [OneAfterTheOther, NewPlugin, PassThatWaits])
@pytest.mark.parametrize("seed", SEEDS)
def test_nobody_is_said_to_be_ready_who_is_long_dead(kind: type[Schedule], seed: int) -> None:
    outcome = run_schedule(seed, kind)
    assert outcome.wrong == [], "\n".join(outcome.story)


def test_a_plugin_that_asks_circus_before_it_looks_is_seen() -> None:
    with patch.object(Statefile, "record_ends", lambda *around: None):
        assert any("is ready, it says" in line for line in run_schedule(0, NewPlugin).wrong)


def test_a_plugin_that_looks_only_between_its_passes_is_seen() -> None:
    with patch.object(Reconciler, "_observing_meanwhile", lambda reconciler: nullcontext()):
        assert any("is ready, it says" in line for line in run_schedule(0, PassThatWaits).wrong)
