"""Keeps the fleet as it is wanted: looks, decides, writes the decision down, carries it out, and looks again.

Level-triggered: one pass looks at everything and does whatever is missing, whatever happened before. Events
only make the next pass come sooner; a lost one costs a second. What is meant is in the statefile before
anything is done, so a keeper that starts anew goes on where the last one ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from signal import SIGTERM

from dynaplan.core.fleet.observing import (
    Exit,
    World,
    desired_workers,
    first_counts,
    fleet_document,
    hung,
    is_carried_out,
    observe,
    own_instances,
    suspects,
)
from dynaplan.core.fleet.reconcile import applied, reconcile
from dynaplan.core.fleet.restarting import after_exit
from dynaplan.core.fleet.startup_times import startup_key
from dynaplan.domain.actions import Action, Remove, Start, Waiting
from dynaplan.domain.errors import DynaplanError, StatefileUnwritable
from dynaplan.domain.lifecycle import Role, Worker, WorkerState
from dynaplan.ports import Clock, Processes
from dynaplan.supervisor.circus_client import CircusClient, CommandRefused
from dynaplan.supervisor.deployments import tail
from dynaplan.supervisor.fleet.gpu_claims import GpuClaims
from dynaplan.supervisor.fleet.health import HealthWatch
from dynaplan.supervisor.fleet.store_link import StoreLink
from dynaplan.supervisor.launch import Launch
from dynaplan.supervisor.scratch import remove_files_of
from dynaplan.supervisor.watchers import worker_watcher

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
LOOK_SOON_S = 0.05
AFTER_FAULT_S = 0.2
EXIT_CODE_WITHIN_S = 0.3
"""circus tells the exit code a moment after the process is gone; after that time it is taken as unknown."""

REVOKED_REACT_S = 3.0
"""A worker whose lease was revoked is also sent SIGTERM after that time: it may not have heard."""

LOADING_LEAVE_S = 10.0
"""How long a worker may take to leave that was never seen registered: it holds nobody's request."""

KILL_GRACE_S = 2.0
"""So much longer than its own drain deadline a worker may take before it is killed."""

LAST_LINES = 10


@dataclass
class _Memory:
    """What a keeper knows beyond the statefile; all of it may be lost."""

    exit_codes: dict[int, int] = field(default_factory=dict)
    gone_since_s: dict[str, float] = field(default_factory=dict)
    signalled: set[str] = field(default_factory=set)
    condemned: set[str] = field(default_factory=set)
    revoked: set[str] = field(default_factory=set)
    waiting: dict[str, str] = field(default_factory=dict)
    decision_id: int | None = None
    killed: int = 0
    is_written: bool = True

    def forget(self, name: str) -> None:
        for each in (self.signalled, self.revoked, self.condemned):
            each.discard(name)


class FleetKeeper:
    """The reconciler of one deployment.

    ``record(workers)`` writes the statefile, ``say(line)`` tells the user, ``learn(key, seconds)`` remembers
    how long a start took; ``link`` and ``health`` are set before ``run``.
    """

    def __init__(
        self,
        launch: Launch,
        workers: Iterable[Worker],
        circus: CircusClient,
        processes: Processes,
        clock: Clock,
        record: Callable[[Sequence[Worker]], None],
        say: Callable[[str], None],
        gpus: GpuClaims,
        learn: Callable[[str, float], None],
    ) -> None:
        self._launch = launch
        self._workers = {worker.name: worker for worker in workers}
        self._circus = circus
        self._processes = processes
        self._clock = clock
        self._record = record
        self._say = say
        self._gpus = gpus
        self._learn = learn
        self._startup_s: dict[str, float] = {}
        self._memory = _Memory()
        self._wake = asyncio.Event()
        self.link: StoreLink | None = None
        self.health: HealthWatch | None = None

    @property
    def workers(self) -> Mapping[str, Worker]:
        """The workers of this moment, by name."""
        return self._workers

    def wake(self) -> None:
        """Something has changed: look again now."""
        self._wake.set()

    def note_exit(self, pid: int, exit_code: int) -> None:
        """circus has reaped this process."""
        self._memory.exit_codes[pid] = exit_code
        self.wake()

    async def run(self) -> None:
        """Keep on for ever. A pass that fails is logged, and the next one comes."""
        await self._sweep_watchers()
        while True:
            try:
                delay_s = await self.one_pass()
            except DynaplanError as error:
                log.warning("this pass is not complete: %s", error)
                delay_s = AFTER_FAULT_S
            except Exception:
                log.exception("this pass failed")
                delay_s = AFTER_FAULT_S
            try:
                async with asyncio.timeout(delay_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()

    async def one_pass(self) -> float:
        """Look and act once; how long the next look may wait, in seconds."""
        self._see()
        actions = self._decide()
        for action in actions:
            await self._carry_out(action)
        for worker in list(self._workers.values()):
            if worker.state is WorkerState.STARTING and not worker.pid:
                await self._ensure_process(worker)
        for worker in list(self._workers.values()):
            if worker.state is WorkerState.DRAINING and worker.pid:
                await self._press(worker)
        self._tell_store()
        return self._next_look_s()

    # -- look ------------------------------------------------------------------------------------

    def _see(self) -> None:
        known = self.link.instances if self.link else None
        instances = None if known is None else own_instances(self._workers, known)
        seen = observe(self._workers, World(self._clock.now_s(), self._exits(), instances))
        self._keep(seen.workers)
        for lease in seen.dead_leases:
            if self.link:
                self.link.revoke(lease)
        for line in seen.news:
            self._say(line)
        for name, seconds in seen.started_s.items():
            worker = self._workers[name]
            self._startup_s[worker.role.value] = round(seconds, 3)
            if key := startup_key(worker, self._launch.settings_of(worker.component)):
                self._learn(key, seconds)
        self._end_who_stands_still()

    def _end_who_stands_still(self) -> None:
        """Kill who says nothing any more; what becomes of it then is a crash like any other."""
        if self.health is None:
            return
        timeout_of = self._launch.hang_timeout_of
        self.health.watch(suspects(self._workers, timeout_of))
        for worker in hung(self._workers, self.health.silent_s, timeout_of):
            if worker.name not in self._memory.condemned:
                self._memory.condemned.add(worker.name)
                silence_s = timeout_of(worker.component)
                self._say(f"{worker.name} stands still: no answer for {silence_s:g} s. It is killed.")
            self._processes.kill_group(worker.pid, worker.started_at)

    def _exits(self) -> dict[str, Exit]:
        """The workers whose process is gone, with its session and, if anybody knows it, its exit code."""
        memory, now_s = self._memory, self._clock.now_s()
        exits: dict[str, Exit] = {}
        for worker in self._workers.values():
            if not worker.pid or self._runs(worker):
                continue
            since_s = memory.gone_since_s.setdefault(worker.name, now_s)
            is_code_known = worker.pid in memory.exit_codes or now_s - since_s > EXIT_CODE_WITHIN_S
            is_group_gone = not self._processes.kill_group(worker.pid, worker.started_at)
            if is_group_gone and is_code_known:
                del memory.gone_since_s[worker.name]
                exits[worker.name] = Exit(memory.exit_codes.pop(worker.pid, None), self._last_lines(worker))
                memory.forget(worker.name)
                remove_files_of(worker.name, self._launch.scratch_dir)
        return exits

    def _runs(self, worker: Worker) -> bool:
        return bool(worker.started_at) and self._processes.identify(worker.pid) == worker.started_at

    def _last_lines(self, worker: Worker) -> str:
        return "\n".join(tail(self._launch.log_dir / f"{worker.name}.log", LAST_LINES))

    # -- decide ----------------------------------------------------------------------------------

    def _decide(self) -> tuple[Action, ...]:
        """What is to be done; written down. While nothing can be written, nothing new is started."""
        launch, memory = self._launch, self._memory
        counts = self.link.counts if self.link else None
        decision_id = counts.decision_id if counts else memory.decision_id
        is_new = memory.decision_id is not None and decision_id != memory.decision_id
        memory.decision_id = decision_id
        fleet = tuple(self._workers.values())
        desired = desired_workers(launch.graph, counts, self._workers)
        foreign = self._gpus.foreign()
        while True:
            now_s = self._clock.now_s()
            actions = reconcile(
                launch.graph, fleet, desired, launch.gpus, foreign, now_s, retry_failed=is_new
            )
            missed = self._gpus.claim_for(applied(fleet, actions)) - foreign
            if not missed:
                break
            foreign |= missed
        if not self._keep_all(applied(fleet, actions)):
            actions = tuple(action for action in actions if not isinstance(action, Start))
            self._keep_all(applied(fleet, actions))
        self._gpus.release_beyond(self._workers.values())
        self._say_who_waits(actions)
        return actions

    def _say_who_waits(self, actions: Sequence[Action]) -> None:
        waiting = {action.component: action.why for action in actions if isinstance(action, Waiting)}
        for component, why in waiting.items():
            if self._memory.waiting.get(component) != why:
                self._say(f"{component}: a worker waits for its GPUs: {why}")
        self._memory.waiting = waiting

    # -- act -------------------------------------------------------------------------------------

    async def _carry_out(self, action: Action) -> None:
        """Only removals are left to do: the workers' states bring about restarts, starts and drains."""
        match action:
            case Remove(worker, why):
                log.info("removing %s: %s", worker.name, why)
                self._memory.forget(worker.name)
                await self._circus.remove(worker.name)
            case Waiting():
                pass
            case _:
                log.info("%s %s: %s", type(action).__name__.lower(), action.worker.name, action.worker.reason)

    async def _ensure_process(self, worker: Worker) -> None:
        """A process for this worker: the one that runs, if the last keeper got that far, else a new one."""
        watcher = worker_watcher(self._launch, worker)
        pid = 0
        try:
            pid = await self._circus.pid(watcher.name)
            if not pid:
                await self._circus.remove(watcher.name)
        except CommandRefused:
            log.debug("%s has no watcher yet", watcher.name)
        pid = pid or await self._circus.add(watcher.name, watcher.cmd, watcher.args, watcher.options)
        if pid:
            self._keep_one(replace(worker, pid=pid, started_at=self._processes.identify(pid) or 0))
        else:
            self._say(f"{worker.name} could not be started; see {self._launch.log_dir / 'circus.log'}")
            self._keep_one(after_exit(worker, None, self._clock.now_s()))

    async def _press(self, worker: Worker) -> None:
        """Make a worker leave: decode by its lease, the others by SIGTERM, at the deadline by force."""
        age_s = self._clock.now_s() - worker.since_s
        if age_s >= self._leave_timeout_s(worker) + KILL_GRACE_S:
            if worker.name not in self._memory.condemned:
                self._memory.condemned.add(worker.name)
                self._memory.killed += 1
                self._say(f"{worker.name} did not leave within {age_s:.0f} s: killed. What it held is lost.")
            self._processes.kill_group(worker.pid, worker.started_at)
            return
        is_by_lease = worker.role is Role.DECODE and worker.instance_id != 0 and self.link is not None
        if is_by_lease and self.link and worker.name not in self._memory.revoked:
            self._memory.revoked.add(worker.name)
            self.link.revoke(worker.instance_id)
        is_unheard = age_s >= REVOKED_REACT_S or (self.link and worker.instance_id in self.link.unanswered)
        if worker.name not in self._memory.signalled and (not is_by_lease or is_unheard):
            self._memory.signalled.add(worker.name)
            await self._circus.signal(worker.name, SIGTERM)

    def _leave_timeout_s(self, worker: Worker) -> float:
        timeout_s = self._launch.leave_timeout_of(worker.component)
        return timeout_s if worker.url else min(timeout_s, LOADING_LEAVE_S)

    async def _sweep_watchers(self) -> None:
        """Remove the watchers of workers that the last keeper had removed from the statefile only."""
        components = [service.name for service in self._launch.graph.services]
        bases = tuple(f"{self._launch.namespace}_{component}" for component in components)
        try:
            for name, status in (await self._circus.statuses()).items():
                if status == "stopped" and name.startswith(bases) and name not in self._workers:
                    await self._circus.remove(name)
        except DynaplanError as error:
            log.warning("watchers not swept: %s", error)

    # -- keep and tell ---------------------------------------------------------------------------

    def _keep_one(self, worker: Worker) -> bool:
        return self._keep({**self._workers, worker.name: worker})

    def _keep_all(self, fleet: Iterable[Worker]) -> bool:
        return self._keep({worker.name: worker for worker in fleet})

    def _keep(self, workers: Mapping[str, Worker]) -> bool:
        """These are the workers from now on; whether that is written down."""
        if workers == self._workers and self._memory.is_written:
            return True
        self._workers = dict(workers)
        was_written = self._memory.is_written
        try:
            self._record(tuple(self._workers.values()))
            self._memory.is_written = True
        except StatefileUnwritable as error:
            self._memory.is_written = False
            if was_written:
                self._say(f"The statefile cannot be written; serving goes on, scaling up waits. {error}")
        if self._memory.is_written and not was_written:
            self._say("The statefile can be written again.")
        return self._memory.is_written

    def _tell_store(self) -> None:
        link, graph = self.link, self._launch.graph
        counts = link.counts if link else None
        if link is None or counts is None:
            return
        first = first_counts(graph, self._workers, counts)
        if first:
            link.decide_first(first)
            return
        document = fleet_document(graph, self._workers, len(self._launch.gpus))
        link.publish_fleet(
            {**document, "startup_s": self._startup_s, "killed_at_deadline": self._memory.killed}
        )
        desired = desired_workers(graph, counts, self._workers)
        if counts.is_pending and is_carried_out(graph, self._workers, desired, link.instances or ()):
            link.acknowledge(counts.decision_id)

    def _next_look_s(self) -> float:
        if self._memory.gone_since_s or any(
            worker.state is WorkerState.STARTING and not worker.pid for worker in self._workers.values()
        ):
            return LOOK_SOON_S
        now_s = self._clock.now_s()
        due_s = [now_s + LOOK_EVERY_S]
        for worker in self._workers.values():
            if worker.state is WorkerState.BACKOFF:
                due_s.append(worker.retry_at_s)
            elif worker.state is WorkerState.DRAINING:
                due_s.append(worker.since_s + self._leave_timeout_s(worker) + KILL_GRACE_S)
            elif worker.state is WorkerState.STOPPED:
                due_s.append(now_s)
        return max(0.001, min(due_s) - now_s)
