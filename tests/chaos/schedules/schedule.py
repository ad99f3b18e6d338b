"""One schedule: a deployment, the faults that its seed draws, and how all of it has to end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

from dynaplan.core.fleet.statefile import fleet_of
from dynaplan.domain.lifecycle import Role, WorkerState
from dynaplan.domain.planning.scaling import COUNT_KEYS, DesiredCounts, planner_prefix
from dynaplan.domain.wire.discovery import SERVICES_PREFIX
from dynaplan.domain.wire.store import Transaction
from dynaplan.ports.messaging import LONGEST_IN_QUEUE_S
from dynaplan.supervisor.fleet.document import new_document
from tests.chaos.schedules.checker import LEASE_S, Checker
from tests.chaos.schedules.clients import Clients
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

LASTS_S = 15.0
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


class Schedule:
    """Does what the dice say to a machine, and looks at it all the time."""

    def __init__(self, machine: Machine, config: dict[str, dict[str, object]]) -> None:
        self.machine = machine
        self.dice = machine.dice
        self.launch = launch_of(config)
        self.checker = Checker(machine)
        machine.circus.start = self._start
        machine.statefile.document = new_document(self.launch)
        self._mends: list[Callable[[], None] | None] = []

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

    # -- faults ----------------------------------------------------------------------------------

    async def harm(self) -> None:
        faults: list[Callable[[], Awaitable[None]]] = [
            *[self._kill_worker] * 4,
            *[self._freeze_worker] * 3,
            *[self._scale] * 3,
            self._scale_and_kill_plugin,
            self._kill_plugin,
            self._freeze_plugin,
            self._terminate_worker,
            self._revoke_lease,
            self._delete_key,
            self._lag,
            *[self._store_away] * 2,
            self._messenger_away,
            self._jump_clock,
            self._fill_disk,
            *[self._cut_connection] * 2,
            self._start_nothing,
        ]
        end_s = self.machine.loop.time() + LASTS_S
        while self.machine.loop.time() < end_s:
            await asyncio.sleep(self.dice.choice([0.02, 0.3, 1.0, 3.0, 6.0]))
            await self.dice.choice(faults)()

    async def _kill_worker(self) -> None:
        if victim := self._victim("VllmWorker", "VllmWorker", "PrefillWorker", "Frontend"):
            self.machine.tell(f"kill -9 {victim.name} ({victim.pid})")
            self.machine.kill(victim)

    async def _freeze_worker(self) -> None:
        if victim := self._victim("VllmWorker", "PrefillWorker", "Frontend"):
            await self._freeze(victim, self.dice.choice([0.3, 2.0, 6.0, 11.0, 25.0]))

    async def _freeze_plugin(self) -> None:
        await self._freeze(self.machine.plugin.process, self.dice.choice([0.5, 5.0, 15.0]))

    async def _freeze(self, victim: Process, seconds: float) -> None:
        if not victim.is_dead and not victim.is_frozen:
            self.machine.tell(f"stop {victim.name} ({victim.pid}) for {seconds} s")
            victim.freeze()
            self._later(seconds, lambda: self._thaw(victim))

    def _thaw(self, victim: Process) -> None:
        self.machine.tell(f"continue {victim.name} ({victim.pid})")
        victim.thaw()

    async def _kill_plugin(self) -> None:
        self.machine.tell("kill -9 FleetPlugin")
        self.machine.kill(self.machine.plugin.process)

    async def _scale(self) -> None:
        await self.scale_to(self.dice.randint(1, 3), self.dice.randint(0, 3))

    async def _scale_and_kill_plugin(self) -> None:
        await self._scale()
        await asyncio.sleep(self.dice.uniform(0, 0.4))
        await self._kill_plugin()

    async def scale_to(self, decode: int, prefill: int) -> None:
        store = self.machine.store
        if not store.is_there:
            return
        self.machine.tell(f"scale to {decode} decode, {prefill} prefill")
        prefix = planner_prefix(NAMESPACE)
        items = {item.key: item.value for item in await store.store.list(prefix)}
        number = DesiredCounts.from_keys(NAMESPACE, items).next_decision_id
        puts = {
            prefix + COUNT_KEYS[Role.DECODE]: str(decode),
            prefix + COUNT_KEYS[Role.PREFILL]: str(prefill),
        }
        await store.store.commit(Transaction(puts={**puts, prefix + "decision_id": str(number)}))

    async def _terminate_worker(self) -> None:
        if victim := self._victim("VllmWorker", "PrefillWorker"):
            self.machine.tell(f"SIGTERM {victim.name} ({victim.pid})")
            victim.post(self.machine.workers[victim.pid].leave, "SIGTERM arrived")

    async def _revoke_lease(self) -> None:
        victim = self._victim("VllmWorker", "PrefillWorker")
        runtime = victim and self.machine.workers[victim.pid].runtime
        if victim and runtime and runtime.instance_id and self.machine.store.is_there:
            self.machine.tell(f"revoke the lease of {victim.name} ({victim.pid})")
            await self.machine.store.store.revoke(runtime.instance_id)

    async def _delete_key(self) -> None:
        if self.machine.store.is_there:
            keys = [item.key for item in await self.machine.store.store.list(SERVICES_PREFIX)]
            if keys:
                key = self.dice.choice(keys)
                self.machine.tell(f"delete {key}")
                await self.machine.store.store.delete(key)

    async def _lag(self) -> None:
        """The store's changes reach one process late."""
        workers = [*self.machine.workers.values(), self.machine.plugin]
        slow = self.dice.choice(workers)
        line = getattr(slow, "line", None)
        if line is None:
            return
        line.lag_s = self.dice.choice([0.2, 1.0, 3.0])
        self.machine.tell(f"{slow.process.name} hears of the store {line.lag_s} s late")
        self.machine.lagging.append(line)
        self._later(self.dice.choice([3.0, 12.0]), lambda: setattr(line, "lag_s", 0.0))

    async def _store_away(self) -> None:
        machine = self.machine
        if not machine.store.is_there:
            return
        kind = self.dice.choice(["killed", "stopped", "wiped"])
        seconds = self.dice.choice([0.5, 3.0, 8.0, 20.0])
        machine.tell(f"the store is {kind} for {seconds} s")
        machine.store.go_away(by_freezing=kind == "stopped")

        def back() -> None:
            machine.tell("the store is back")
            machine.store.come_back(is_wiped=kind == "wiped")

        self._later(seconds, back)

    async def _messenger_away(self) -> None:
        messenger, is_wiped = self.machine.messenger, self.dice.random() < 0.5
        seconds = self.dice.choice([0.5, 3.0, 12.0])
        self.machine.tell(f"the messenger is away for {seconds} s{', and wiped' if is_wiped else ''}")
        messenger.is_available = False
        if is_wiped:
            for stream in messenger._server.streams.values():
                stream.work.clear()
        self._later(seconds, lambda: setattr(messenger, "is_available", True))

    async def _jump_clock(self) -> None:
        jump_s = self.dice.choice([-86400.0, -30.0, 30.0, 86400.0])
        self.machine.tell(f"the wall clock jumps by {jump_s:g} s")
        self.machine.skew_s += jump_s

    async def _fill_disk(self) -> None:
        self.machine.tell("the disk is full")
        self.machine.statefile.is_full = True
        self._later(self.dice.choice([1.0, 8.0]), lambda: setattr(self.machine.statefile, "is_full", False))

    async def _start_nothing(self) -> None:
        self.machine.tell("no process can be started")
        self.machine.circus.can_start = False
        self._later(self.dice.choice([0.5, 4.0]), lambda: setattr(self.machine.circus, "can_start", True))

    async def _cut_connection(self) -> None:
        wires = [wire for wire in self.machine.network.wires if not wire.is_lost and wire.peer]
        if wires:
            wire = self.dice.choice(wires)
            ends = [wire.process, wire.peer.process] if wire.peer else []
            self.machine.tell(f"a connection of {' and '.join(each.name for each in ends)} is cut")
            wire.cut()
            # One that waits for a frontend has the client at both ends still.
            names = {each.name for each in ends} - {"clients"} or {"Frontend"}
            self.machine.judge.harmed(self.machine.loop.time(), *sorted(names))

    def _victim(self, *services: str) -> Process | None:
        there = self.machine.of(self.dice.choice(services))
        return self.dice.choice(there) if there else None

    def _later(self, seconds: float, mend: Callable[[], object]) -> None:
        number = len(self._mends)

        def mend_once() -> None:
            if self._mends[number]:
                self._mends[number] = None
                mend()

        self._mends.append(mend_once)
        self.machine.loop.call_later(seconds, mend_once)

    # -- what goes on ----------------------------------------------------------------------------

    def _start(self, name: str, service: str, environment: dict[str, str]) -> Process:
        gpus = tuple(each for each in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if each)
        return WorkerProgram(self.machine, name, service, gpus).process

    async def _circus(self) -> None:
        """circus starts a plugin that has died again."""
        while True:
            await asyncio.sleep(PLUGIN_BACK_S / 2)
            if self.machine.plugin and self.machine.plugin.process.is_dead:
                await asyncio.sleep(PLUGIN_BACK_S)
                Plugin(self.machine, self.launch)

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
        for mend in self._mends:
            if mend:
                mend()
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
        within_s = ANSWERED_WITHIN_S if machine.of("PrefillWorker") else LONGEST_IN_QUEUE_S
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
        return [key for key in self.machine.store.store._items if key.startswith(SERVICES_PREFIX)]

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
        items = {key: item.value for key, item in machine.store.store._items.items()}
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
        items = self.machine.store.store._items.values()
        counts = DesiredCounts.from_keys(NAMESPACE, {item.key: item.value for item in items})
        return f"{[(each.name, each.state.value, each.pid, each.reason) for each in fleet]}, {counts}"
