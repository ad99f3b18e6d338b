"""Faults of a simulated machine: what a schedule does to it, drawn from its dice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from dynaplan.contract.store_keys import COUNT_KEYS, DesiredCounts, planner_prefix
from dynaplan.graph.lifecycle import Role
from dynaplan.store.instances import SERVICES_PREFIX
from dynaplan.store.model import Transaction
from tests.chaos.schedules.machine import Machine
from tests.chaos.schedules.programs import NAMESPACE
from tests.chaos.schedules.virtual_time import Process

LASTS_S = 15.0


class Faults:
    """Harms a machine. What does not pass by itself is mended later, or by ``mend_all``."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.dice = machine.dice
        self.serve_back_s = 0.0
        """The moment at which a killed ``serve`` is back; 0 when none was."""
        self._mends: list[Callable[[], None] | None] = []
        self._tasks: set[asyncio.Future[None]] = set()

    def mend_all(self) -> None:
        """Undo everything that is to be undone later, now."""
        for mend in self._mends:
            if mend:
                mend()

    async def harm(self) -> None:
        faults: list[Callable[[], Awaitable[None]]] = [
            *[self._kill_worker] * 4,
            *[self._freeze_worker] * 3,
            *[self._scale] * 3,
            self._scale_and_kill_plugin,
            self._kill_plugin,
            self._freeze_plugin,
            self._kill_serve,
            self._silence_circus,
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

    async def _kill_serve(self) -> None:
        """The plugin dies with it; its supervisor starts it again, the later the more often it was killed."""
        back_s = self.dice.choice([0.5, 3.0, 8.0])
        self.machine.tell(f"kill -9 serve, which is back in {back_s} s")
        self.machine.kill(self.machine.plugin.process)
        self.serve_back_s = max(self.serve_back_s, self.machine.loop.time() + back_s)

    async def _silence_circus(self) -> None:
        """The arbiter stands still, as while it waits for a process to start on a busy machine."""
        circus, seconds = self.machine.circus, self.dice.choice([1.0, 6.0, 15.0])
        if not circus.is_silent:
            self.machine.tell(f"circus does not answer for {seconds} s")
            circus.is_silent = True
            self._later(seconds, lambda: self._spawn(circus.speak()))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

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
