"""The workers of the simulated service: the lifecycle and the reconciling of the live fleet, over engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dynaplan.config.settings.frontend import DECODE_COMPONENT, PREFILL_COMPONENT
from dynaplan.fleet.counts import FleetCounts, Targets, WorkerCounts
from dynaplan.fleet.gpus import Gpu
from dynaplan.fleet.rules.reconcile import reconcile
from dynaplan.gateway.routing.booking import WorkerBook
from dynaplan.graph.lifecycle import HOLDS_GPUS, Role, Worker, WorkerState
from dynaplan.graph.model import GraphSpec, ServiceSpec
from dynaplan.simulation.engines import SimulatedEngine

NAMES: Mapping[Role, str] = {Role.PREFILL: PREFILL_COMPONENT, Role.DECODE: DECODE_COMPONENT}
"""The service that each role's workers belong to."""


@dataclass
class SimulatedWorker:
    """One worker: its life as the supervisor records it, its engine, and the router's book of it.

    ``number`` is the id by which the router knows it. The book of a prefill worker counts its prompts only.
    """

    record: Worker
    engine: SimulatedEngine
    number: int
    book: WorkerBook = field(default_factory=WorkerBook)

    @property
    def is_ready(self) -> bool:
        """True while the worker gets requests: it has started, and does not drain."""
        return self.record.state is WorkerState.READY


class Pools:
    """The workers of both roles on one box. ``on_start`` is called with every worker that begins to start.

    ``on_change`` is called with the moment when workers have come, gone or become ready, or others are
    wanted. ``cache_worth`` returns for a moment the tokens that caches have lately served, by number.
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
        self._serving: dict[Role, tuple[SimulatedWorker, ...]] = dict.fromkeys(Role, ())
        self._numbers = 0
        self.on_change: Callable[[float], None] = _do_nothing
        self.cache_worth: Callable[[float], Mapping[int, int]] = _not_known
        self.held_gpus = 0.0
        self._held_since_s = 0.0
        self._gpu_s = 0.0
        self.wanted = Targets()

    def want(self, targets: Targets, at_s: float) -> None:
        """Ask for these numbers of workers: missing ones begin to start, surplus ones to leave."""
        self.wanted = targets
        self._reconcile(at_s)

    def ready(self, worker: SimulatedWorker, at_s: float) -> None:
        """Note that the worker has started, unless it was told to leave meanwhile."""
        if worker.record.state is WorkerState.STARTING:
            worker.record = worker.record.moved(WorkerState.READY, at_s, "started")
            worker.engine.now_s = at_s
            self._changed(at_s)

    def end_drained(self, at_s: float) -> None:
        """Remove workers that leave and have nothing left to do, which frees their GPUs."""
        gone = [worker for worker in self.all() if _is_drained(worker)]
        for drained in gone:
            drained.record = replace(drained.record.moved(WorkerState.STOPPED, at_s, "drained"), gpus=())
        if gone:
            self._reconcile(at_s)

    def all(self, role: Role | None = None) -> Iterator[SimulatedWorker]:
        """Iterate over the workers of one role or of both, the oldest first."""
        workers = self._by_name.values()
        return (worker for worker in workers if role is None or worker.record.role is role)

    def serving(self, role: Role) -> Sequence[SimulatedWorker]:
        """Return the workers of that role that get requests."""
        return self._serving[role]

    def counts(self) -> FleetCounts:
        """Return the counts that the supervisor of a live service would publish."""
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
        served = self.cache_worth(at_s)
        worth = {name: served.get(worker.number, 0) for name, worker in self._by_name.items()}
        after = reconcile(self._graph, fleet, desired, self._inventory, {}, at_s, worth=worth)
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
        if any(map(_is_drained, self.all())):
            self.end_drained(at_s)

    def _changed(self, at_s: float) -> None:
        self._serving = {role: tuple(worker for worker in self.all(role) if worker.is_ready) for role in Role}
        self.on_change(at_s)

    def _start(self, worker: Worker) -> None:
        self._numbers += 1
        engine = self._new_engine(worker.role)
        simulated = self._by_name[worker.name] = SimulatedWorker(worker, engine, self._numbers)
        self._on_start(simulated)


def _do_nothing(at_s: float) -> None:
    """Stand for an ``on_change`` that is not set."""


def _not_known(at_s: float) -> Mapping[int, int]:
    """Stand for a ``cache_worth`` that is not set."""
    return {}


def _is_drained(worker: SimulatedWorker) -> bool:
    return worker.record.state is WorkerState.DRAINING and not worker.book.in_flight
