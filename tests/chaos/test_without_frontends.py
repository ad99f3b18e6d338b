"""While no frontend takes connections, requests wait on the public port, and are answered; virtual time."""

from __future__ import annotations

import asyncio

import pytest

from tests.chaos.schedules.schedule import Schedule, run_schedule

REQUESTS = 3
AWAY_S = 5.0
"""Longer than the judge's slack: the requests come when what befell the frontends lies behind."""

ANSWERED_WITHIN_S = 60.0
"""Shorter than the time after which a frontend closes an idle connection."""

SEEDS = range(4)


class Dead(Schedule):
    """Every frontend is dead and none can be started when requests come."""

    async def harm(self) -> None:
        machine, clients = self.machine, self.clients
        machine.circus.can_start = False
        self.begin()
        await asyncio.sleep(AWAY_S)
        sent = [clients.drawn() for _ in range(REQUESTS)]
        for request in sent:
            clients.process.context.run(machine.loop.create_task, clients.send(request))
        await asyncio.sleep(AWAY_S)
        self.kill_frontends()
        machine.circus.can_start = True
        await self.becomes(lambda: all(each.ended_s for each in sent), ANSWERED_WITHIN_S)
        machine.wrong += [str(each) for each in sent if not each.is_whole]

    def begin(self) -> None:
        self.kill_frontends()

    def kill_frontends(self) -> None:
        for frontend in self.machine.of("Frontend"):
            self.machine.tell(f"kill -9 {frontend.name} ({frontend.pid})")
            self.machine.kill(frontend)


class Stopped(Dead):
    """Every frontend stands still when requests come, and is killed then."""

    def begin(self) -> None:
        for frontend in self.machine.of("Frontend"):
            self.machine.tell(f"stop {frontend.name} ({frontend.pid})")
            frontend.freeze()


@pytest.mark.parametrize("kind", [Dead, Stopped])
@pytest.mark.parametrize("seed", SEEDS)
def test_requests_that_no_frontend_has_taken_are_answered_by_the_next_one(
    kind: type[Schedule], seed: int
) -> None:
    outcome = run_schedule(seed, kind)
    assert outcome.wrong == [], "\n".join(outcome.story)
