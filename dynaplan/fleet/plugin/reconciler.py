"""The reconciler: observes, decides, writes the decision down, carries it out, and observes again.

Level-triggered: one pass observes everything and does whatever is missing, whatever happened before. Events
only cause the next pass earlier; a lost event costs two seconds. What is intended is in the statefile before
anything is done, so a reconciler that starts anew continues where the last one ended. The states of the
workers cause what is to be done: a STARTING worker without a process gets one, a DRAINING worker is
terminated.

One pass (``reconcile_once``):

1. observe: who has ended, who has registered, who hangs (``fleet/rules/observing.py``, ``termination.py``);
2. decide: the fleet that is wanted (``fleet/rules/reconcile.py``), its GPUs claimed (``gpu_availability.py``)
   and the statefile written; nothing new is started while that fails;
3. act: watchers of circus removed and added, draining workers terminated;
4. publish: the fleet, and the acknowledgement of a decision that is carried out.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace

from dynaplan.contract import absence
from dynaplan.contract.holds import RESERVATIONS, ReservedGpus, reserved_words
from dynaplan.contract.model_keys import (
    ModelEvent,
)
from dynaplan.contract.store_keys import FREE_GPUS, GPUS_LEFT_OUT, DesiredCounts
from dynaplan.fleet.circus_client import CommandRefused
from dynaplan.fleet.launch import CurrentLaunch, Launch
from dynaplan.fleet.plugin.document import Statefile
from dynaplan.fleet.plugin.model_manager import ModelManager
from dynaplan.fleet.plugin.pending_workers import PendingWorkers
from dynaplan.fleet.plugin.ports import FleetPorts
from dynaplan.fleet.plugin.store_link import StoreLink
from dynaplan.fleet.plugin.termination import Termination
from dynaplan.fleet.rules.observing import (
    World,
    desired_workers,
    first_counts,
    fleet_document,
    is_carried_out,
    observe,
    own_instances,
)
from dynaplan.fleet.rules.reconcile import (
    MAX_REMOVALS,
    REMOVALS,
    Reconciled,
    Removal,
    reconcile,
    renewable,
    replaced,
)
from dynaplan.fleet.rules.restarting import after_exit
from dynaplan.fleet.startup_times import startup_key
from dynaplan.fleet.watchers import worker_watcher
from dynaplan.graph.lifecycle import COUNTS, Worker, WorkerState
from dynaplan.models.workers import Moment
from dynaplan.process.heartbeats import PLUGIN_HEARTBEAT
from dynaplan.util.durations import wall_clock
from dynaplan.util.errors import DynaplanError, StatefileUnwritable

log = logging.getLogger(__name__)

RESYNC_S = 2.0
"""Longest time between two passes, in seconds: events cause nearly all of them earlier."""

PENDING_RESYNC_S = 1.0
"""The same while a worker waits for GPUs, which others release without an event, in seconds."""

TRANSITION_S = 0.05
"""Time to the next pass while a process is about to start or to be gone."""

RETRY_S = 0.2
"""Time to the next pass after a pass that failed."""


class Reconciler:
    """The reconciler of one deployment.

    It begins with the ``workers`` that there are, which may be others than ``statefile`` has. A pass begins
    at once when ``wake`` is set.
    """

    def __init__(
        self,
        launch: Launch,
        ports: FleetPorts,
        statefile: Statefile,
        link: StoreLink,
        termination: Termination,
        workers: Iterable[Worker],
        wake: asyncio.Event,
        models: ModelManager,
    ) -> None:
        self._launches = CurrentLaunch(launch)
        self._ports = ports
        self._circus = ports.circus
        self._clock = ports.clock
        self._gpus = ports.gpus
        self._terminal = ports.terminal
        self._statefile = statefile
        self._link = link
        self._termination = termination
        self._workers = {worker.name: worker for worker in workers}
        self._wake = wake
        self._models = models
        self._pending = PendingWorkers()
        self._removals: deque[Removal] = deque(maxlen=MAX_REMOVALS)
        self._to_replace: set[str] = set()
        self._startup_s: dict[str, float] = {}
        self._decision_id = -1
        self._unwritable = ""
        self._is_carried_out_elsewhere = launch.is_carried_out_elsewhere

    @property
    def _launch(self) -> Launch:
        return self._launches.now

    @property
    def workers(self) -> Mapping[str, Worker]:
        """The workers that are present, draining ones included, by name."""
        return self._workers

    @property
    def gpu_events(self) -> Iterable[str]:
        """What was last found of the health of GPUs, the newest last."""
        return self._ports.gpu_watch.events if self._ports.gpu_watch else ()

    @property
    def model_events(self) -> Iterable[ModelEvent]:
        """What was last decided about models that are loaded on request, the newest last."""
        return self._models.state.events

    def record_exit(self, pid: int, exit_code: int) -> None:
        """Remember the exit code of a process that circus has reaped, and begin a pass."""
        self._termination.record_exit(pid, exit_code)
        self._wake.set()

    def request_replacement(self, name: str) -> None:
        """Have this worker leave, and another take its place, and begin a pass."""
        self._to_replace.add(name)
        self._wake.set()

    async def run(self) -> None:
        """Reconcile for ever. A pass that fails is logged and retried."""
        async with self._observing_meanwhile():
            await self._sweep_watchers()
        while True:
            self._ports.heartbeats.beat(PLUGIN_HEARTBEAT, RESYNC_S)
            try:
                delay_s = await self.reconcile_once()
            except DynaplanError as error:
                log.warning("this pass is not complete: %s", error)
                delay_s = RETRY_S
            except Exception:
                log.exception("this pass failed")
                delay_s = RETRY_S
            try:
                async with asyncio.timeout(delay_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()

    async def reconcile_once(self) -> float:
        """Make one pass; return the time until the next one is due, in seconds."""
        self._observe()
        async with self._observing_meanwhile():
            removed = self._decide()
            await self._act(removed)
        self._publish()
        return self._delay_s()

    # -- observe ---------------------------------------------------------------------------------

    def _observe(self) -> None:
        known = self._link.instances
        instances = None if known is None else own_instances(self._workers, known)
        now_s = self._clock.now_s()
        exits = self._termination.exits(self._workers.values())
        seen = observe(self._workers, World(now_s, exits, instances, self._termination.gone))
        if self._ports.gpu_watch:
            self._ports.gpu_watch.note_ends(self._workers.values(), seen.workers)
        self._record(seen.workers)
        for lease in seen.dead_leases:
            self._link.revoke(lease)
        for line in seen.news:
            self._terminal.report(line)
        for name, seconds in seen.started_s.items():
            worker = self._workers[name]
            self._startup_s[worker.role.value] = round(seconds, 3)
            if key := startup_key(worker, self._launch.settings_of(worker.component)):
                self._ports.startup_times.learn(key, seconds)
            self._models.learn(worker, seconds)
        self._termination.kill_hung(self._workers)

    @asynccontextmanager
    async def _observing_meanwhile(self) -> AsyncIterator[None]:
        """Go on observing the workers, every RESYNC_S, while the block waits for circus.

        One command of circus may take seconds, and a pass may have many.
        """

        async def observe() -> None:
            while True:
                await asyncio.sleep(RESYNC_S)
                self._ports.heartbeats.beat(PLUGIN_HEARTBEAT, RESYNC_S)
                try:
                    self._observe()
                except Exception:
                    log.exception("observing failed")

        task = asyncio.create_task(observe(), name="observes during a pass")
        try:
            yield
        finally:
            task.cancel()

    # -- decide ----------------------------------------------------------------------------------

    def _decide(self) -> Collection[str]:
        """Decide what the fleet is to be and write it down; return the workers to remove.

        Nothing new is started while the statefile cannot be written.
        """
        before = tuple(self._workers.values())
        at_once, renewed = renewable(before, self._to_replace)
        after = self._reconcile_and_claim(replaced(before, at_once, self._clock.now_s()), renewed)
        self._to_replace = {
            each.name for each in after.fleet if each.name in renewed and each.state in COUNTS
        }
        if not self._record_all(after.fleet):
            # Who leaves goes on leaving: what is put off is only what nobody could adopt after a crash.
            started = after.started(before)
            after = replace(after, fleet=tuple(worker for worker in after.fleet if worker not in started))
            self._record_all(after.fleet)
        self._models.tell(self._unwritable)
        self._gpus.release_unused(self._workers.values())
        for step, worker in after.steps(before):
            why = after.removed.get(worker.name) or worker.reason or "that number is asked for"
            log.info("%s %s: %s", step, worker.name, why)
            if step == "drain":
                self._removals.append(Removal(worker.name, time.time(), worker.reason))
        blocked = self._gpus.blocked(after.fleet)
        for line in self._pending.update(after.waiting, blocked, self._clock.now_s()):
            self._terminal.report(line)
        return after.removed.keys()

    def _reconcile_and_claim(self, fleet: tuple[Worker, ...], renewed: Collection[str]) -> Reconciled:
        """Reconcile, and claim the GPUs; a GPU that another deployment is faster to claim is left to it."""
        launch, counts, gpus = self._launch, self._counts, self._gpus
        has_changed = False
        if counts and counts.decision_id >= 0:  # there is none before the plugin's own first, or after a loss
            has_changed = self._decision_id not in (-1, counts.decision_id)  # the first one seen is no change
            self._decision_id = counts.decision_id
        desired = desired_workers(launch.graph, counts, self._workers)
        reserved = self._reserved(fleet)
        gpus.reserve(reserved)
        unusable = gpus.unusable(fleet)
        moment = Moment(self._clock.now_s(), self._ports.wall_clock())
        models = self._models.decide(launch, fleet, gpus.shared_devices(fleet), moment)
        fleet = gpus.reallocated(fleet, self._pending.overdue(self._clock.now_s()), unusable)
        while True:
            now_s = self._clock.now_s()
            after = reconcile(
                launch.graph,
                fleet,
                desired,
                launch.gpus,
                unusable,
                now_s,
                retry_failed=has_changed,
                leave_first=self._link.leave_first,
                reserved=reserved,
                renewed=renewed,
                models=models,
            )
            missed = gpus.claim_for(after.fleet)
            models = models.without(missed)
            if missed.keys() <= unusable.keys():
                return after  # it comes to that: each further round has one GPU fewer
            unusable |= missed

    def _reserved(self, fleet: tuple[Worker, ...]) -> dict[int, str]:
        """Return the GPUs that users have reserved for this moment, or that are ill, with the reason."""
        text = self._statefile.planner_keys.get(RESERVATIONS, "")
        reserved = ReservedGpus.from_text(text).in_force(time.time(), wall_clock) if text else {}
        words = {index: reserved_words(made) for index, made in reserved.items()}
        if not self._ports.gpu_watch:
            return words
        usable = {gpu.index for gpu in self._launch.gpus} - reserved.keys()
        apart = self._ports.gpu_watch.judge(fleet, usable, self._statefile, self._link, self._terminal)
        return {**words, **apart}

    # -- act -------------------------------------------------------------------------------------

    async def _act(self, removed: Iterable[str]) -> None:
        for name in removed:
            self._termination.forget(name)
            await self._circus.remove(name)
        for worker in list(self._workers.values()):
            if _lacks_process(worker):
                await self._ensure_process(worker)
        for worker in list(self._workers.values()):
            if worker.state is WorkerState.DRAINING:
                # One without a pid may run: the last reconciler ended between starting it and writing that.
                await (self._termination.advance(worker) if worker.pid else self._ensure_process(worker))

    async def _ensure_process(self, worker: Worker) -> None:
        """Give the worker a process: the running one, if the last reconciler got that far, else a new one.

        No new one while its GPUs are not free. A worker that is to leave, and has no process, is recorded as
        gone.
        """
        watcher = worker_watcher(self._launch, worker)
        pid = 0
        try:
            pid = await self._circus.pid(watcher.name)
            if not pid:
                await self._circus.remove(watcher.name)
        except CommandRefused:
            log.debug("%s has no watcher yet", watcher.name)
        if not pid and worker.state is WorkerState.DRAINING:
            self._record_one(after_exit(worker, None, self._clock.now_s()))
            return
        if not pid and worker.name in self._pending.reasons:
            return
        pid = pid or await self._circus.add(watcher.name, watcher.cmd, watcher.args, watcher.options)
        worker = self._workers[worker.name]  # it may have been observed meanwhile
        if pid:
            self._record_one(replace(worker, pid=pid, started_at=self._ports.processes.identify(pid) or 0))
        else:
            log_file = self._launch.circus_log
            self._terminal.report(f"{worker.name} could not be started; see {log_file}")
            self._record_one(after_exit(worker, None, self._clock.now_s()))

    async def _sweep_watchers(self) -> None:
        """Remove watchers whose workers the last reconciler had removed from the statefile only."""
        components = [service.name for service in self._launch.graph.services]
        bases = tuple(f"{self._launch.namespace}_{component}" for component in components)
        try:
            for name, status in (await self._circus.statuses()).items():
                if status == "stopped" and name.startswith(bases) and name not in self._workers:
                    await self._circus.remove(name)
        except DynaplanError as error:
            log.warning("watchers not swept: %s", error)

    @property
    def _counts(self) -> DesiredCounts | None:
        """The decision to carry out; None until one is known, and where a program of the user's does that."""
        return None if self._is_carried_out_elsewhere else self._link.counts

    # -- record and publish ----------------------------------------------------------------------

    def _record_one(self, worker: Worker) -> bool:
        return self._record({**self._workers, worker.name: worker})

    def _record_all(self, fleet: Iterable[Worker]) -> bool:
        return self._record({worker.name: worker for worker in fleet})

    def _record(self, workers: Mapping[str, Worker]) -> bool:
        """Make these the reconciler's workers, and write them down; return whether the statefile has them."""
        self._workers = dict(workers)
        if self._statefile.has(self._workers):
            return True
        before = self._unwritable
        try:
            self._statefile.record(self._workers.values())
            self._unwritable = ""
        except StatefileUnwritable as error:
            self._unwritable = ". ".join(filter(None, (error.args[0], error.hint)))
            if not before:
                lost = "The statefile cannot be written; serving goes on, scaling up waits."
                self._terminal.report(f"{lost} {error}")
        if before and not self._unwritable:
            self._terminal.report("The statefile can be written again.")
        return not self._unwritable

    def _publish(self) -> None:
        link, graph = self._link, self._launch.graph
        if link.counts is None:
            return
        counts = self._counts
        first = first_counts(graph, self._workers, counts) if counts else None
        if first:
            # What the statefile remembers is restored by key_persistence.py: it is the true first decision.
            if not first.keys() <= self._statefile.planner_keys.keys():
                link.decide_first(first)
            return
        workers, instances, gpus = tuple(self._workers.values()), link.instances or (), self._gpus
        document = fleet_document(graph, self._workers, gpus.total(workers), instances, link.asleep)
        document |= {"waiting": self._pending.reasons, GPUS_LEFT_OUT: gpus.left_out(workers)}
        document |= {FREE_GPUS: gpus.free(workers)}
        document |= absence.absence_fields(self._workers.values(), self._clock.now_s(), time.time())
        document |= {REMOVALS: [each.to_json() for each in self._removals]}
        killed = self._termination.killed
        document |= self._models.document(self._unwritable)
        link.publish_fleet({**document, "startup_s": self._startup_s, "killed_at_deadline": killed})
        desired = desired_workers(graph, counts, self._workers)
        if counts and counts.is_pending and is_carried_out(graph, self._workers, desired, instances):
            link.acknowledge(counts.decision_id)

    def _delay_s(self) -> float:
        starting = {name for name, each in self._workers.items() if _lacks_process(each)}
        if self._termination.gone or starting - self._pending.reasons.keys():
            return TRANSITION_S
        now_s = self._clock.now_s()
        due_s = [now_s + (PENDING_RESYNC_S if self._pending.reasons else RESYNC_S)]
        due_s.append(self._models.next_at_s)
        lingering_s = []
        for worker in self._workers.values():
            if worker.state is WorkerState.BACKOFF:
                due_s.append(worker.retry_at_s)
            elif worker.state is WorkerState.FAILED:
                lingering_s.append(worker.retry_at_s)
            elif worker.state is WorkerState.DRAINING:
                lingering_s.append(self._termination.kill_deadline_s(worker))
            elif worker.state is WorkerState.STOPPED:
                due_s.append(now_s)
        # A failed model that nobody asks for and a process that cannot be killed stay overdue: only their
        # future moments count, or this would wake all the time.
        due_s += (each_s for each_s in lingering_s if each_s > now_s)
        return max(0.001, min(due_s) - now_s)


def _lacks_process(worker: Worker) -> bool:
    return worker.state is WorkerState.STARTING and not worker.pid
