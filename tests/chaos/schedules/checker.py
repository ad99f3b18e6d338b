"""What must hold of every history, whatever was done to the deployment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from dynaplan.core.fleet.statefile import fleet_of
from dynaplan.domain.lifecycle import WorkerState
from tests.chaos.schedules.clients import Request
from tests.chaos.schedules.machine import Machine

LEASE_S = 10.0
NOTICED_S = 6.0
"""Seconds in which the plugin sees an end and writes it down: its slowest look, and circus' commands."""

MOST_DEATHS = 3


class Checker:
    """Looks at the machine again and again, and at the end at every request."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.blind_s = 0.0
        """The last moment at which the plugin could not see or write."""
        self.without_store_s = 0.0
        self.frozen_since_s: dict[int, float] = {}
        self.without_decode: list[float] = []
        """The moments at which no decode worker could answer."""

    def look(self) -> None:
        """Compare what is said with what is."""
        machine = self.machine
        now_s = machine.loop.time()
        plugin = machine.plugin.process
        if plugin.is_dead or plugin.is_frozen or machine.statefile.is_full or machine.plugin.keeper is None:
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
            self.without_decode.append(now_s)

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

    def judge(self, history: Iterable[Request]) -> Iterator[str]:
        """Yield what is wrong with the answers."""
        for request in history:
            if not request.ended_s:
                yield f"never ended: {request}"
            elif request.is_whole:
                yield from self._judge_whole(request)
            elif why := self._unexplained(request):
                yield f"{why}: {request}"

    def _judge_whole(self, request: Request) -> Iterator[str]:
        if request.text != request.whole:
            yield f"another text: {request}\n  {request.text!r}\n  {request.whole!r}"
        if request.finish_reason not in ("length", "stop"):
            yield f"no reason for its end: {request}"
        if request.finish_reason == "length" and request.tokens != request.body["max_tokens"]:
            yield f"{request.tokens} tokens counted: {request}"
        if request.body.get("stream") and len(request.ids) != 1:
            yield f"ids {sorted(request.ids)}: {request}"
        if request.body.get("stream") and request.roles != ("chat" in request.path):
            yield f"{request.roles} roles: {request}"

    def _unexplained(self, request: Request) -> str:
        """Return what is not true of an error; empty when it is."""
        if not request.whole.startswith(request.text):
            return "a cut answer with another text"
        if request.broken and not request.error:
            return "" if self._harmed(request, "Frontend") else "the frontend broke off unharmed"
        if request.status == 200 and not request.error:
            return "cut without an error"
        losses = self._harmed(request, "VllmWorker")
        if "Workers have died over this request" in request.error:
            # By core/routing/suspects.py a request that was alone at a death is convicted by the next.
            return "" if losses >= 2 else "convicted of fewer than two deaths"
        was_without = any(request.sent_s - 1 <= each <= request.ended_s + 1 for each in self.without_decode)
        if request.status == 503 or request.status == 200:
            return "" if was_without or losses > MOST_DEATHS else "an error although a worker was there"
        if request.status == 502:
            return "" if losses >= MOST_DEATHS else "an error without enough deaths"
        return "an error of another kind"

    def _harmed(self, request: Request, service: str) -> int:
        """Count the losses of connections to that service while the request was under way."""
        return sum(
            request.sent_s - 0.5 <= at_s <= request.ended_s + 0.5 and service == name
            for at_s, name in self.machine.harms
        )
