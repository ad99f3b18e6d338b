"""The fleet keeper: looks, decides, writes the decision down, carries it out, and looks again.

Level-triggered: one pass looks at everything and does whatever is missing, whatever happened before. Events
only make the next pass come sooner; a lost event costs two seconds. What is meant is in the statefile before
anything is done, so a keeper that starts anew goes on where the last one ended. The states of the workers
bring about what is to be done: a STARTING worker without a process gets one, a DRAINING worker is made to
leave.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from dynaplan.fleet.circus_client import CircusClient, CommandRefused
from dynaplan.fleet.desired_counts import FREE_GPUS, GPUS_LEFT_OUT, DesiredCounts
from dynaplan.fleet.launch import CurrentLaunch, Launch
from dynaplan.fleet.plugin.departures import Departures
from dynaplan.fleet.plugin.fleet_gpus import FleetGpus
from dynaplan.fleet.plugin.gpu_sharing import SharingBounds
from dynaplan.fleet.plugin.store_link import StoreLink
from dynaplan.fleet.plugin.waits import Waits
from dynaplan.fleet.reservations import RESERVATIONS, ReservedGpus, reserved_words
from dynaplan.fleet.rules import hopeless
from dynaplan.fleet.rules.observing import (
    World,
    desired_workers,
    first_counts,
    fleet_document,
    is_carried_out,
    observe,
    own_instances,
)
from dynaplan.fleet.rules.reconcile import Fleet, Reconciled, reconcile, renewable, replaced
from dynaplan.fleet.rules.removals import MOST_REMOVALS, REMOVALS, Removal
from dynaplan.fleet.rules.restarting import after_exit
from dynaplan.fleet.rules.startup_times import startup_key
from dynaplan.fleet.watchers import worker_watcher
from dynaplan.graph.lifecycle import COUNTS, Worker, WorkerState
from dynaplan.process.ports import Processes
from dynaplan.util.clock import Clock
from dynaplan.util.durations import wall_clock
from dynaplan.util.errors import DynaplanError, StatefileUnwritable

log = logging.getLogger(__name__)

LOOK_EVERY_S = 2.0
"""Longest time between two passes, in seconds: events make nearly all come sooner."""

LOOK_WAITING_S = 1.0
"""The same while a worker waits for GPUs, which others give back without telling, in seconds."""

LOOK_SOON_S = 0.05
"""Time to the next pass while a process is about to start or to be gone."""

AFTER_FAULT_S = 0.2
"""Time to the next pass after a pass that failed."""


class FleetKeeper:
    """The reconciler of one deployment.

    ``record(workers)`` writes the statefile, in which ``written`` are (None: it has to be made anew),
    ``say(line)`` tells the user, ``learn(key, seconds)`` remembers
    the duration of a start, ``beat()`` says that passes go on, ``kept()`` returns the
    planner's keys that the statefile remembers. A pass begins at once when ``wake`` is set.
    """

    def __init__(
        self,
        launch: Launch,
        workers: Iterable[Worker],
        written: Iterable[Worker] | None,
        *,
        circus: CircusClient,
        processes: Processes,
        clock: Clock,
        link: StoreLink,
        departures: Departures,
        gpus: FleetGpus,
        record: Callable[[Sequence[Worker]], None],
        say: Callable[[str], None],
        learn: Callable[[str, float], None],
        beat: Callable[[], None],
        kept: Callable[[], Mapping[str, str]],
        wake: asyncio.Event,
    ) -> None:
        self._launches = CurrentLaunch(launch)
        self._workers = {worker.name: worker for worker in workers}
        self._written = None if written is None else {worker.name: worker for worker in written}
        self._circus = circus
        self._processes = processes
        self._clock = clock
        self._link = link
        self._departures = departures
        self._gpus = gpus
        self._record = record
        self._say = say
        self._learn = learn
        self._beat = beat
        self._kept = kept
        self._wake = wake
        self._waits = Waits()
        self._removals: deque[Removal] = deque(maxlen=MOST_REMOVALS)
        self._to_replace: set[str] = set()
        self._startup_s: dict[str, float] = {}
        self._decision_id: int | None = None
        self._is_writable = True
        self._is_carried_out_elsewhere = launch.is_carried_out_elsewhere

    @property
    def _launch(self) -> Launch:
        """The deployment, with the settings of the last reload."""
        return self._launches.now

    @property
    def workers(self) -> Mapping[str, Worker]:
        """The workers that are present, draining ones included, by name."""
        return self._workers

    def note_exit(self, pid: int, exit_code: int) -> None:
        """Remember the exit code of a process that circus has reaped, and look now."""
        self._departures.note_exit(pid, exit_code)
        self._wake.set()

    def note_replacement(self, name: str) -> None:
        """Remember that this worker is to leave, and another to take its place, and look now."""
        self._to_replace.add(name)
        self._wake.set()

    async def run(self) -> None:
        """Pass after pass, for ever. A pass that fails is logged, and the next one comes."""
        async with self._looking_on():
            await self._sweep_watchers()
        while True:
            self._beat()
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
        """Look and act once; return the time until the next pass is due, in seconds."""
        self._see()
        async with self._looking_on():
            await self._act()
        self._tell_store()
        return self._next_look_s()

    async def _act(self) -> None:
        for name in self._decide().removed:
            self._departures.forget(name)
            await self._circus.remove(name)
        for worker in list(self._workers.values()):
            if worker.state is WorkerState.STARTING and not worker.pid:
                await self._ensure_process(worker)
        for worker in list(self._workers.values()):
            if worker.state is WorkerState.DRAINING:
                await (self._departures.press(worker) if worker.pid else self._ensure_process(worker))

    # -- look ------------------------------------------------------------------------------------

    def _see(self) -> None:
        known = self._link.instances
        instances = None if known is None else own_instances(self._workers, known)
        now_s = self._clock.now_s()
        exits = self._departures.exits(self._workers.values())
        seen = observe(self._workers, World(now_s, exits, instances, self._departures.gone))
        self._keep(seen.workers)
        for lease in seen.dead_leases:
            self._link.revoke(lease)
        for line in seen.news:
            self._say(line)
        for name, seconds in seen.started_s.items():
            worker = self._workers[name]
            self._startup_s[worker.role.value] = round(seconds, 3)
            if key := startup_key(worker, self._launch.settings_of(worker.component)):
                self._learn(key, seconds)
        self._departures.kill_hung(self._workers)

    @asynccontextmanager
    async def _looking_on(self) -> AsyncIterator[None]:
        """Look as often as ever while circus is waited for: a command may take seconds, and many follow."""

        async def look_on() -> None:
            while True:
                await asyncio.sleep(LOOK_EVERY_S)
                self._beat()
                try:
                    self._see()
                except Exception:
                    log.exception("this look failed")

        task = asyncio.create_task(look_on(), name="looks during a pass")
        try:
            yield
        finally:
            task.cancel()

    # -- decide ----------------------------------------------------------------------------------

    def _decide(self) -> Reconciled:
        """Decide what the fleet is to be and write it down; nothing new is started while that fails."""
        before = tuple(self._workers.values())
        at_once, renewed = renewable(before, self._to_replace)
        after = self._reconciled(replaced(before, at_once, self._clock.now_s()), renewed)
        self._to_replace = {
            each.name for each in after.fleet if each.name in renewed and each.state in COUNTS
        }
        if not self._keep_all(after.fleet):
            started = after.started(before)
            after = replace(after, fleet=tuple(worker for worker in after.fleet if worker not in started))
            self._keep_all(after.fleet)
        self._gpus.release_beyond(self._workers.values())
        for step, worker in after.steps(before):
            why = after.removed.get(worker.name) or worker.reason or "that number is asked for"
            log.info("%s %s: %s", step, worker.name, why)
            if step == "drain":
                self._removals.append(Removal(worker.name, time.time(), worker.reason))
        hindered = self._gpus.hindered(after.fleet)
        for line in self._waits.news(after.waiting, hindered, self._clock.now_s()):
            self._say(line)
        return after

    def _reconciled(self, fleet: tuple[Worker, ...], renewed: Collection[str]) -> Reconciled:
        """Reconcile, and claim the GPUs; a GPU that another deployment is faster to claim is left to it."""
        launch, counts = self._launch, self._counts
        decision_id = counts.decision_id if counts else self._decision_id
        is_new = self._decision_id is not None and decision_id != self._decision_id
        self._decision_id = decision_id
        desired = desired_workers(launch.graph, counts, self._workers)
        reserved = self._reserved()
        self._gpus.reserve(reserved)
        bounds = self._gpus.bounds(fleet, desired, is_new)
        unusable = {**bounds.kept, **self._gpus.unusable(fleet)}
        served = self._link.cache_worth
        worth = {worker.name: served.get(worker.instance_id, 0) for worker in fleet} if served else {}
        fleet = self._gpus.moved(fleet, self._waits.overdue(self._clock.now_s()), unusable)
        while True:
            now_s = self._clock.now_s()
            after = reconcile(
                *(launch.graph, fleet, desired, launch.gpus, unusable, now_s),
                retry_failed=is_new,
                worth=worth,
                leave_first=self._link.leave_first,
                given=bounds.given,
                reserved=reserved,
                renewed=renewed,
            )
            missed = self._gpus.claim_for(after.fleet)
            if missed.keys() <= unusable.keys():
                return _told(after, fleet, bounds, self._say)
            unusable = missed | unusable

    def _reserved(self) -> dict[int, str]:
        """Return the GPUs that persons have reserved for this moment, with the reason in words."""
        text = self._kept().get(RESERVATIONS, "")
        reserved = ReservedGpus.from_text(text).in_force(time.time(), wall_clock) if text else {}
        return {index: reserved_words(made) for index, made in reserved.items()}

    # -- act -------------------------------------------------------------------------------------

    async def _ensure_process(self, worker: Worker) -> None:
        """Give the worker a process: the running one, if the last keeper got that far, else a new one.

        No new one while its GPUs are not free, nor for a worker that is to leave: that one is gone then.
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
            self._keep_one(after_exit(worker, None, self._clock.now_s()))
            return
        if not pid and worker.name in self._waits.reasons:
            return
        pid = pid or await self._circus.add(watcher.name, watcher.cmd, watcher.args, watcher.options)
        worker = self._workers[worker.name]  # a look may have come meanwhile
        if pid:
            self._keep_one(replace(worker, pid=pid, started_at=self._processes.identify(pid) or 0))
        else:
            self._say(f"{worker.name} could not be started; see {self._launch.log_dir / 'circus.log'}")
            self._keep_one(after_exit(worker, None, self._clock.now_s()))

    async def _sweep_watchers(self) -> None:
        """Remove watchers whose workers the last keeper had removed from the statefile only."""
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
        """The decision to carry out; None until one is known, and always where others carry it out."""
        return None if self._is_carried_out_elsewhere else self._link.counts

    # -- keep and tell ---------------------------------------------------------------------------

    def _keep_one(self, worker: Worker) -> bool:
        return self._keep({**self._workers, worker.name: worker})

    def _keep_all(self, fleet: Iterable[Worker]) -> bool:
        return self._keep({worker.name: worker for worker in fleet})

    def _keep(self, workers: Mapping[str, Worker]) -> bool:
        """Have these workers from now on; return True when that is written down."""
        self._workers = dict(workers)
        if self._workers == self._written:
            return True
        was_writable = self._is_writable
        try:
            self._record(tuple(self._workers.values()))
            self._written, self._is_writable = self._workers, True
        except StatefileUnwritable as error:
            self._is_writable = False
            if was_writable:
                self._say(f"The statefile cannot be written; serving goes on, scaling up waits. {error}")
        if self._is_writable and not was_writable:
            self._say("The statefile can be written again.")
        return self._is_writable

    def _tell_store(self) -> None:
        link, graph = self._link, self._launch.graph
        if link.counts is None:
            return
        counts = self._counts
        first = first_counts(graph, self._workers, counts) if counts else None
        if first:
            # What the statefile remembers comes back by itself (kept_keys.py): it is the true first decision.
            if not first.keys() <= self._kept().keys():
                link.decide_first(first)
            return
        workers, instances = tuple(self._workers.values()), link.instances or ()
        document = fleet_document(graph, self._workers, self._gpus.total(workers), instances, link.asleep)
        document |= {"waiting": self._waits.reasons, GPUS_LEFT_OUT: self._gpus.left_out(workers)}
        document |= {FREE_GPUS: self._gpus.free(workers)}
        document |= hopeless.published(self._workers.values(), self._clock.now_s(), time.time())
        document |= {REMOVALS: [each.to_json() for each in self._removals]}
        killed = self._departures.killed
        link.publish_fleet({**document, "startup_s": self._startup_s, "killed_at_deadline": killed})
        desired = desired_workers(graph, counts, self._workers)
        if counts and counts.is_pending and is_carried_out(graph, self._workers, desired, instances):
            link.acknowledge(counts.decision_id)

    def _next_look_s(self) -> float:
        is_coming = any(
            worker.state is WorkerState.STARTING and not worker.pid and worker.name not in self._waits.reasons
            for worker in self._workers.values()
        )
        if self._departures.gone or is_coming:
            return LOOK_SOON_S
        now_s = self._clock.now_s()
        due_s = [now_s + (LOOK_WAITING_S if self._waits.reasons else LOOK_EVERY_S)]
        for worker in self._workers.values():
            if worker.state is WorkerState.BACKOFF or (
                worker.state is WorkerState.FAILED and worker.retry_at_s
            ):
                due_s.append(worker.retry_at_s)
            elif worker.state is WorkerState.DRAINING:
                due_s.append(self._departures.killed_at_s(worker))
            elif worker.state is WorkerState.STOPPED:
                due_s.append(now_s)
        return max(0.001, min(due_s) - now_s)


def _told(after: Reconciled, before: Fleet, bounds: SharingBounds, say: Callable[[str], None]) -> Reconciled:
    """Tell the user which worker leaves for another deployment; what waits is told from where GPUs come."""
    for step, worker in after.steps(before):
        if step == "drain" and worker.reason == bounds.given.get(worker.component):
            say(f"{worker.name} leaves when its requests are done: {worker.reason}")
    if not bounds.outlook:
        return after
    return replace(after, waiting={name: f"{why}; {bounds.outlook}" for name, why in after.waiting.items()})
