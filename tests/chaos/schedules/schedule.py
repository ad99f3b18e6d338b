"""One schedule: a deployment, the faults that its seed draws, and how all of it has to end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

from dynaplan.contract.store_keys import DesiredCounts
from dynaplan.events.timing import QUEUE_MAX_AGE_S
from dynaplan.fleet.plugin.document import new_document
from dynaplan.fleet.rules.statefile import fleet_of
from dynaplan.graph.lifecycle import WorkerState
from dynaplan.store.instances import SERVICES_PREFIX
from tests.chaos.schedules.checker import LEASE_S, Checker
from tests.chaos.schedules.clients import Clients
from tests.chaos.schedules.faults import Faults
from tests.chaos.schedules.machine import Machine
from tests.chaos.schedules.network import Network
from tests.chaos.schedules.programs import (
    FRONTENDS,
    LEAVE_S,
    NAMESPACE,
    Plugin,
    WorkerProgram,
    configuration,
    installed,
    launch_of,
)
from tests.chaos.schedules.virtual_time import Deadlock, Process, VirtualLoop

WHOLE_WITHIN_S = 200.0
ANSWERED_WITHIN_S = 90.0
GONE_WITHIN_S = LEAVE_S + 30.0
LOOK_EVERY_S = 0.5
PLUGIN_BACK_S = 1.0


@dataclass
class Outcome:
    """What came of a schedule: ``wrong`` is empty when all held."""

    seed: int
    wrong: list[str] = field(default_factory=list)
    story: list[str] = field(default_factory=list)
    requests: int = 0
    failed: int = 0
    lasted_s: float = 0.0


def run_schedule(seed: int, kind: type[Schedule] | None = None) -> Outcome:
    """Run the schedule of that seed, or of another kind; the same seed gives the same outcome."""
    dice = Random(seed)
    network = Network(dice)
    loop = VirtualLoop(network.connect)
    machine = Machine(loop, network, dice)
    outcome = Outcome(seed, machine.wrong, machine.story)
    config = configuration(dice)
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL if disabled < logging.CRITICAL else disabled)
    try:
        with installed(machine, config):
            schedule = (kind or Schedule)(machine, config)
            try:
                loop.run_until_complete(schedule.run())
            except Deadlock:
                machine.wrong.append("nothing is due any more, and all wait")
            outcome.requests = len(schedule.clients.history)
            outcome.failed = sum(not each.is_whole for each in schedule.clients.history)
            outcome.lasted_s = loop.time() - 1000
            with suppress(Deadlock):
                loop.run_until_complete(schedule.bury())
                loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        logging.disable(disabled)
        loop.close()
    return outcome


class Schedule(Faults):
    """Does what the dice say to a machine, and looks at it all the time."""

    def __init__(self, machine: Machine, config: dict[str, dict[str, object]]) -> None:
        super().__init__(machine)
        self.launch = launch_of(config)
        self.checker = Checker(machine)
        machine.circus.start = self._start
        machine.statefile.document = new_document(self.launch)

    async def run(self) -> None:
        machine = self.machine
        watching = [
            asyncio.create_task(work) for work in (self._look(), machine.store.expire(), self._circus())
        ]
        self.clients: Clients | None = None
        await self.scale_to(2, 1)
        Plugin(machine, self.launch)
        if not await self.becomes(self._is_whole, WHOLE_WITHIN_S):
            machine.wrong.append(f"never began: {self._states()}")
        self.clients = Clients(machine, self.dice.choice([2, 4]))
        await self.harm()
        await self._end_well()
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        machine.wrong += machine.loop.faults
        machine.wrong += list(machine.judge.judge(self.clients.history))

    async def bury(self) -> None:
        """Let nothing of it be left in the event loop."""
        machine = self.machine
        for process in list(machine.processes.values()):
            machine.end(process, -9)
        await asyncio.gather(*(process.bury() for process in machine.dead))

    # -- what goes on ----------------------------------------------------------------------------

    def _start(self, name: str, service: str, environment: dict[str, str]) -> Process:
        gpus = tuple(each for each in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if each)
        return WorkerProgram(self.machine, name, service, gpus).process

    async def _circus(self) -> None:
        """circus starts a plugin that has died again, and the supervisor a ``serve``."""
        while True:
            await asyncio.sleep(PLUGIN_BACK_S / 2)
            if self.machine.plugin and self.machine.plugin.process.is_dead:
                if self.serve_back_s:
                    await self._adopt()
                await asyncio.sleep(PLUGIN_BACK_S)
                Plugin(self.machine, self.launch)

    async def _adopt(self) -> None:
        while (seconds := self.serve_back_s - self.machine.loop.time()) > 0:
            await asyncio.sleep(seconds)
        self.serve_back_s = 0.0
        document = self.machine.statefile.document
        self.machine.circus.begin_anew({each.name for each in fleet_of(document)} if document else set())

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if self.machine.plugin:
                self.checker.look()

    # -- the end ---------------------------------------------------------------------------------

    async def _end_well(self) -> None:
        """Mend everything: then all is whole, every request ends, and at the end nothing is left."""
        machine, clients = self.machine, self.clients
        machine.tell("everything is mended")
        self.mend_all()
        if not await self.becomes(self._is_whole, WHOLE_WITHIN_S):
            machine.wrong.append(f"never whole again: {self._states()}")
        clients.is_over = True
        if not await self.becomes(lambda: not clients.open, ANSWERED_WITHIN_S):
            machine.tell("requests are still open")
        await self._shut_down()

    async def _shut_down(self) -> None:
        machine = self.machine
        queue = await machine.messenger.queue(f"{NAMESPACE}_prefill_queue")
        # A frontend that is killed takes nothing back; without a prefill worker its prompts grow too old.
        within_s = ANSWERED_WITHIN_S if machine.of("PrefillWorker") else QUEUE_MAX_AGE_S
        if not await self.becomes(lambda: not queue._counted(), within_s):
            machine.wrong.append(f"{len(queue._counted())} prompts are left in the queue")
        machine.plugin.process.ends.clear()
        for task in asyncio.all_tasks():
            if task.get_coro().__qualname__ == "Schedule._circus":  # type: ignore[union-attr]
                task.cancel()
        machine.kill(machine.plugin.process)
        for service in ("Frontend", "Worker"):
            for process in machine.of(service):
                process.post(machine.workers[process.pid].leave, "SIGTERM arrived")
            await self.becomes(lambda service=service: not machine.of(service), GONE_WITHIN_S)  # type: ignore[misc]
        left = [process.name for process in machine.processes.values() if process.name != "clients"]
        if left:
            machine.wrong.append(f"left at the end: {left}")
        if not await self.becomes(lambda: not self._registrations(), LEASE_S + 1):
            machine.wrong.append(f"registrations left at the end: {self._registrations()}")

    def _registrations(self) -> list[str]:
        return [key for key in self.machine.store.store.items if key.startswith(SERVICES_PREFIX)]

    async def becomes(self, check: Callable[[], bool], within_s: float) -> bool:
        deadline_s = self.machine.loop.time() + within_s
        while not check():
            if self.machine.loop.time() > deadline_s:
                return False
            await asyncio.sleep(0.25)
        return True

    def _is_whole(self) -> bool:
        machine = self.machine
        document = machine.statefile.document
        items = {key: item.value for key, item in machine.store.store.items.items()}
        counts = DesiredCounts.from_keys(NAMESPACE, items)
        wanted = {"VllmWorker": counts.num_decode_workers, "PrefillWorker": counts.num_prefill_workers}
        fleet = fleet_of(document) if document else ()
        there = {name: sum(each.component == name for each in fleet) for name in (*wanted, "Frontend")}
        return (
            there == {**wanted, "Frontend": FRONTENDS}
            and all(each.state is WorkerState.READY and each.pid in machine.processes for each in fleet)
            and not counts.is_pending
        )

    def _states(self) -> str:
        document = self.machine.statefile.document
        fleet = fleet_of(document) if document else ()
        items = self.machine.store.store.items.values()
        counts = DesiredCounts.from_keys(NAMESPACE, {item.key: item.value for item in items})
        return f"{[(each.name, each.state.value, each.pid, each.reason) for each in fleet]}, {counts}"
