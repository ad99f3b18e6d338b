"""What must hold of a simulated machine at every moment: what is said of it is true."""

from __future__ import annotations

from dynaplan.fleet.plugin.reconciler import RESYNC_S
from dynaplan.fleet.rules.statefile import fleet_of
from dynaplan.graph.lifecycle import WorkerState
from tests.chaos.schedules.machine import Machine

LEASE_S = 10.0
NOTICED_S = 2 * RESYNC_S + 0.5
"""Seconds in which the plugin sees an end and writes it down, whether circus answers or not: a look as long
after a pass as that may be, and that pass."""


class Checker:
    """Looks at the machine again and again."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.blind_s = 0.0
        """The last moment at which the plugin could not see or write."""
        self.without_store_s = 0.0
        self.frozen_since_s: dict[int, float] = {}

    def look(self) -> None:
        """Compare what is said with what is."""
        machine = self.machine
        now_s = machine.loop.time()
        plugin = machine.plugin.process
        if plugin.is_dead or plugin.is_frozen or machine.statefile.is_full:
            self.blind_s = now_s
        if not machine.store.is_there or machine.is_lagging:
            self.without_store_s = now_s
        for pid in [pid for pid in self.frozen_since_s if pid not in machine.processes]:
            del self.frozen_since_s[pid]
        for process in machine.processes.values():
            if process.is_frozen:
                self.frozen_since_s.setdefault(process.pid, now_s)
            else:
                self.frozen_since_s.pop(process.pid, None)
        for worker in machine.workers.values():
            if worker.runtime and worker.runtime.is_draining and not worker.draining_since_s:
                worker.draining_since_s = now_s
        self._look_at_statefile(now_s)
        self._look_at_routers(now_s)
        if not self._has_decode():
            machine.judge.without_decode.append(now_s)

    def _look_at_statefile(self, now_s: float) -> None:
        machine = self.machine
        if machine.statefile.document is None:
            return
        fleet = fleet_of(machine.statefile.document)
        owned = [gpu for worker in fleet for gpu in worker.gpus]
        if len(owned) != len(set(owned)):
            machine.wrong.append(f"{now_s:.1f}: GPUs in the statefile: {owned}")
        for worker in fleet:
            if worker.state is not WorkerState.READY:
                continue
            died_s = next((each.died_s for each in machine.dead if each.pid == worker.pid), None)
            if died_s is not None and now_s - max(died_s, self.blind_s) > NOTICED_S:
                machine.wrong.append(
                    f"{now_s:.1f}: {worker.name} is ready, it says, and died at {died_s:.1f}"
                )
            frozen_s = self.frozen_since_s.get(worker.pid)
            seen_s = max(self.blind_s, self.without_store_s)
            if frozen_s is not None and now_s - max(frozen_s, seen_s) > LEASE_S + NOTICED_S:
                machine.wrong.append(
                    f"{now_s:.1f}: {worker.name} is ready, it says, and stopped at {frozen_s:.1f}"
                )

    def _look_at_routers(self, now_s: float) -> None:
        machine = self.machine
        dead = {each.pid: each for each in machine.dead}
        for worker in machine.workers.values():
            if worker.service != "Frontend" or worker.runtime is None or worker.process.is_frozen:
                continue
            for instance in worker.runtime.discovery.all():
                gone = dead.get(instance.pid)
                if gone and now_s - max(gone.died_s, self.without_store_s) > LEASE_S + NOTICED_S:
                    machine.wrong.append(f"{now_s:.1f}: {worker.process.name} still routes to {gone.name}")

    def _has_decode(self) -> bool:
        return any(
            worker.service == "VllmWorker"
            and worker.runtime
            and worker.runtime.ready.is_set()
            and not worker.runtime.is_draining
            and not worker.process.is_frozen
            for worker in self.machine.workers.values()
        )
