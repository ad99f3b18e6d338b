"""The workers of the simulated service: engines in virtual time, under the lifecycle and reconciler of the
live fleet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dynaplan.config.settings.frontend import DECODE_COMPONENT, PREFILL_COMPONENT
from dynaplan.contract.counts import FleetCounts, PoolSizes, WorkerCounts
from dynaplan.contract.gpus import Gpu
from dynaplan.engines.timing_model.engine_model import EngineModel, EngineRequest
from dynaplan.fleet.rules.reconcile import reconcile
from dynaplan.graph.lifecycle import HOLDS_GPUS, Role, Worker, WorkerEvent, WorkerState
from dynaplan.graph.model import GraphSpec, ServiceSpec
from dynaplan.routing.booking import WorkerBook
from dynaplan.routing.kv_index import KvIndex

OnRequest = Callable[[str, float], None]
"""Called with the id of a request and the moment, in virtual seconds, at which something happened to it."""


class CacheChanges:
    """The changes of one engine's cache that have not been published yet; its model's ``BlockListener``.

    A router hears of them at the end of their step, as a live engine publishes them.
    """

    __slots__ = ("_steps", "_this_step")

    def __init__(self) -> None:
        self._this_step: list[tuple[bool, list[int]]] = []
        self._steps: deque[tuple[float, list[tuple[bool, list[int]]]]] = deque()

    def stored(self, block: int) -> None:
        """Note a block that the engine has published."""
        self._changed(block, is_stored=True)

    def removed(self, block: int) -> None:
        """Note a block whose place the engine needed."""
        self._changed(block, is_stored=False)

    def end_step(self, at_s: float) -> None:
        """Let the changes since the last call be heard from ``at_s`` seconds on."""
        if self._this_step:
            self._steps.append((at_s, self._this_step))
            self._this_step = []

    def publish(self, index: KvIndex, worker: int, now_s: float) -> None:
        """Tell the index, for the worker of that number, of the changes that are heard by ``now_s``."""
        while self._steps and self._steps[0][0] <= now_s:
            for is_stored, blocks in self._steps.popleft()[1]:
                (index.add if is_stored else index.remove)(worker, blocks)

    def _changed(self, block: int, *, is_stored: bool) -> None:
        runs = self._this_step
        if not runs or runs[-1][0] is not is_stored:
            runs.append((is_stored, []))
        runs[-1][1].append(block)


class SimulatedEngine:
    """Advances its model only when asked to: between two questions nothing from outside can change it.

    ``on_first_token`` and ``on_end`` are called up to one step ahead of the moment that was asked for,
    because a step that has begun cannot be changed any more. ``changes`` is the listener of the model, if it
    has one.
    """

    __slots__ = ("_changes", "_on_end", "_on_first_token", "model", "now_s")

    def __init__(
        self,
        model: EngineModel,
        on_first_token: OnRequest,
        on_end: OnRequest,
        changes: CacheChanges | None = None,
    ) -> None:
        self.model = model
        self._changes = changes
        self.now_s = 0.0
        self._on_first_token = on_first_token
        self._on_end = on_end

    def submit(self, request: EngineRequest, at_s: float) -> None:
        """Queue the request; an idle engine begins with it at that moment.

        Raises ValueError for a request that the engine could never serve.
        """
        self.model.submit(request)
        if at_s > self.now_s:
            self.now_s = at_s

    def advance(self, until_s: float) -> None:
        """Do every step that begins before that moment, and say whose first and last tokens they emitted."""
        model = self.model
        while (begun_s := self.now_s) < until_s:
            duration_s = model.step(until_s - begun_s)
            if duration_s is None:
                return
            self.now_s = end_s = begun_s + duration_s
            if self._changes or model.first_token_requests:
                # Of several steps in one all but the last are over when somebody asks.
                first_end_s = begun_s + duration_s / model.steps_done
                if self._changes:
                    self._changes.end_step(first_end_s)
                for request in model.first_token_requests:
                    self._on_first_token(request.request_id, first_end_s)
            for request in model.finished:
                self._on_end(request.request_id, end_s)

    def step(self) -> bool:
        """Do one step, and let its time pass; False where the engine has nothing to do."""
        duration_s = self.model.step()
        if duration_s is None:
            return False
        self.now_s += duration_s
        if self._changes:
            self._changes.end_step(self.now_s)
        return True

    def publish_changes(self, index: KvIndex, worker: int, now_s: float) -> None:
        """Tell the index, under the worker's number, of the cache's changes that are heard by now."""
        if self._changes:
            self._changes.publish(index, worker, now_s)


NAMES: Mapping[Role, str] = {Role.PREFILL: PREFILL_COMPONENT, Role.DECODE: DECODE_COMPONENT}
"""The service that each role's workers belong to."""


@dataclass
class SimulatedWorker:
    """One worker: its life as ``serve`` records it, its engine, and the router's book of it.

    ``number`` is the id by which the router knows it. The book of a prefill worker counts its prompts only;
    ``is_computing`` while a step of it has not ended. It ``is_ready`` while it gets requests: it has started,
    and does not drain.
    """

    record: Worker
    engine: SimulatedEngine
    number: int
    book: WorkerBook = field(default_factory=WorkerBook)
    is_computing: bool = False
    is_ready: bool = False


class Pools:
    """The workers of both roles on one box. ``on_start`` is called with every worker that begins to start.

    ``on_change`` is called with the moment when workers have come, gone or become ready, or others are
    wanted.
    ``held_gpus`` are the GPUs of all workers, starting and leaving ones included.
    """

    def __init__(
        self,
        gpus: int,
        gpus_per_worker: Mapping[Role, int],
        new_engine: Callable[[Role], SimulatedEngine],
        on_start: Callable[[SimulatedWorker], None],
    ) -> None:
        services = tuple(ServiceSpec(NAMES[role], role, 0, count) for role, count in gpus_per_worker.items())
        self._graph = GraphSpec("simulation", "/", "simulation", services)
        self._gpus_per_worker = gpus_per_worker
        self._inventory = tuple(Gpu(index, f"GPU-SIM-{index}") for index in range(gpus))
        self._new_engine = new_engine
        self._on_start = on_start
        self._by_name: dict[str, SimulatedWorker] = {}
        self.prefillers: tuple[SimulatedWorker, ...] = ()
        self.decoders: tuple[SimulatedWorker, ...] = ()
        self._leaving: tuple[SimulatedWorker, ...] = ()
        self._numbers = 0
        self.on_change: Callable[[float], None] = _do_nothing
        self.held_gpus = 0.0
        self._held_since_s = 0.0
        self._gpu_s = 0.0
        self.wanted = PoolSizes()

    def scale(self, targets: PoolSizes, at_s: float) -> None:
        """Ask for these numbers of workers: missing ones begin to start, surplus ones to leave."""
        self.wanted = targets
        self._reconcile(at_s)

    def ready(self, worker: SimulatedWorker, at_s: float) -> None:
        """Note that the worker has started, unless it was drained meanwhile."""
        if worker.record.state is WorkerState.STARTING:
            worker.record = worker.record.after(WorkerEvent.REGISTERED, at_s)
            worker.engine.now_s = at_s
            self._changed(at_s)

    def end_drained(self, at_s: float) -> None:
        """Remove workers that leave and have nothing left to do, which frees their GPUs."""
        gone = [worker for worker in self._leaving if not worker.book.in_flight]
        for drained in gone:
            drained.record = replace(drained.record.after(WorkerEvent.SESSION_GONE, at_s), gpus=())
        if gone:
            self._reconcile(at_s)

    def all(self, role: Role | None = None) -> Iterator[SimulatedWorker]:
        """Iterate over the workers of one role or of both, the oldest first."""
        workers = self._by_name.values()
        return (worker for worker in workers if role is None or worker.record.role is role)

    def serving(self, role: Role) -> Sequence[SimulatedWorker]:
        """Return the workers of that role that get requests: ``prefillers`` or ``decoders``."""
        return self.prefillers if role is Role.PREFILL else self.decoders

    def counts(self) -> FleetCounts:
        """Return the counts that a live ``serve`` would publish."""
        return FleetCounts(self._counts(Role.PREFILL), self._counts(Role.DECODE), len(self._inventory))

    def is_carried_out(self) -> bool:
        """Tell whether every wanted worker serves, whatever workers still leave."""
        return all(len(self.serving(role)) == self.wanted.of(role) for role in self._gpus_per_worker)

    def gpu_seconds(self, at_s: float) -> float:
        """Return the GPU-seconds that workers have held until that moment."""
        return self._gpu_s + self.held_gpus * max(0.0, at_s - self._held_since_s)

    def _counts(self, role: Role) -> WorkerCounts:
        states = [worker.record.state for worker in self.all(role)]
        return WorkerCounts(
            starting=states.count(WorkerState.STARTING),
            ready=states.count(WorkerState.READY),
            draining=states.count(WorkerState.DRAINING),
            gpus=self._gpus_per_worker.get(role, 0),
        )

    def _reconcile(self, at_s: float) -> None:
        fleet = tuple(worker.record for worker in self._by_name.values())
        desired = {NAMES[role]: self.wanted.of(role) for role in self._gpus_per_worker}
        after = reconcile(self._graph, fleet, desired, self._inventory, {}, at_s)
        started = {worker.name for worker in after.started(fleet)}
        for name in after.removed.keys() - started:
            del self._by_name[name]
        for worker in after.fleet:
            if worker.name in started:
                self._start(worker)
            else:
                self._by_name[worker.name].record = worker
        self._gpu_s = self.gpu_seconds(at_s)
        self._held_since_s = at_s
        self.held_gpus = sum(
            self._gpus_per_worker[worker.record.role]
            for worker in self.all()
            if worker.record.state in HOLDS_GPUS
        )
        self._changed(at_s)
        self.end_drained(at_s)

    def _changed(self, at_s: float) -> None:
        for worker in self.all():
            worker.is_ready = worker.record.state is WorkerState.READY
        self.prefillers = tuple(worker for worker in self.all(Role.PREFILL) if worker.is_ready)
        self.decoders = tuple(worker for worker in self.all(Role.DECODE) if worker.is_ready)
        draining = WorkerState.DRAINING
        self._leaving = tuple(worker for worker in self.all() if worker.record.state is draining)
        self.on_change(at_s)

    def _start(self, worker: Worker) -> None:
        self._numbers += 1
        engine = self._new_engine(worker.role)
        simulated = self._by_name[worker.name] = SimulatedWorker(worker, engine, self._numbers)
        self._on_start(simulated)


def _do_nothing(at_s: float) -> None:
    """Stand for an ``on_change`` that is not set."""
