"""The workers of the simulated service: the live fleet's own lifecycle and reconciling, engines behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dynaplan.core.engine.model import EngineModel
from dynaplan.core.fleet.reconcile import reconcile
from dynaplan.domain.gpus import Gpu
from dynaplan.domain.graph import GraphSpec, ServiceSpec
from dynaplan.domain.lifecycle import HOLDS_GPUS, Role, Worker, WorkerState
from dynaplan.domain.planning.observation import FleetCounts, WorkerCounts
from dynaplan.domain.planning.targets import Targets
from dynaplan.domain.settings.routing import DECODE_COMPONENT, PREFILL_COMPONENT
from dynaplan.simulator.engines import SimulatedEngine, Told

NAMES: Mapping[Role, str] = {Role.PREFILL: PREFILL_COMPONENT, Role.DECODE: DECODE_COMPONENT}


@dataclass
class SimulatedWorker:
    """One worker: where it stands in its life, its engine, and how many requests it has.

    ``prompt_blocks`` are the KV blocks of their prompts, ``prefill_blocks`` those of them that it has yet to
    compute: both as the ``kv`` router books them, which sees no engine.
    """

    worker: Worker
    engine: SimulatedEngine
    number: int
    in_flight: int = 0
    prompt_blocks: int = 0
    prefill_blocks: int = 0

    @property
    def is_ready(self) -> bool:
        """Whether it gets requests."""
        return self.worker.state is WorkerState.READY


class Pools:
    """The workers of both roles on one box. ``starting`` is told of each worker that begins to start.

    ``on_change`` is told, with the moment, whenever workers have come, gone or become ready, or others are
    wanted. ``held_gpus`` are those that workers have, whatever they are doing.
    """

    def __init__(
        self,
        gpus: int,
        gpus_per_worker: Mapping[Role, int],
        new_model: Callable[[Role], EngineModel],
        told: Mapping[Role, tuple[Told, Told]],
        starting: Callable[[SimulatedWorker], None],
    ) -> None:
        services = tuple(ServiceSpec(NAMES[role], role, 0, count) for role, count in gpus_per_worker.items())
        self._graph = GraphSpec("simulation", "/", "simulation", services)
        self._gpus_per_worker = gpus_per_worker
        self._inventory = tuple(Gpu(index, f"GPU-SIM-{index}") for index in range(gpus))
        self._new_model = new_model
        self._told = told
        self._starting = starting
        self._by_name: dict[str, SimulatedWorker] = {}
        self._serving: dict[Role, tuple[SimulatedWorker, ...]] = dict.fromkeys(Role, ())
        self._numbers = 0
        self.on_change: Callable[[float], None] = _ignore
        self.held_gpus = 0.0
        self._held_since_s = 0.0
        self._gpu_s = 0.0
        self.wanted = Targets()

    def want(self, targets: Targets, at_s: float) -> None:
        """So many workers from now on; those that are too many begin to leave."""
        self.wanted = targets
        self._reconcile(at_s)

    def ready(self, each: SimulatedWorker, at_s: float) -> None:
        """The worker has started, unless it was told to leave meanwhile."""
        if each.worker.state is WorkerState.STARTING:
            each.worker = each.worker.moved(WorkerState.READY, at_s, "started")
            each.engine.now_s = at_s
            self._changed(at_s)

    def end_drained(self, at_s: float) -> None:
        """Workers that leave and have nothing left to do are gone, and their GPUs free."""
        gone = [each for each in self.all() if _is_drained(each)]
        for each in gone:
            each.worker = replace(each.worker.moved(WorkerState.STOPPED, at_s, "drained"), gpus=())
        if gone:
            self._reconcile(at_s)

    def all(self, role: Role | None = None) -> Iterator[SimulatedWorker]:
        """Every worker, of one role or of both, the oldest first."""
        return (each for each in self._by_name.values() if role is None or each.worker.role is role)

    def serving(self, role: Role) -> Sequence[SimulatedWorker]:
        """The workers that get requests."""
        return self._serving[role]

    def counts(self) -> FleetCounts:
        """What the supervisor would publish."""
        return FleetCounts(self._counts(Role.PREFILL), self._counts(Role.DECODE), len(self._inventory))

    def is_carried_out(self) -> bool:
        """Whether every wanted worker serves; those that leave do so without being waited for."""
        return all(len(self.serving(role)) == self.wanted.of(role) for role in self._gpus_per_worker)

    def gpu_seconds(self, at_s: float) -> float:
        """The GPU seconds that workers have held until that moment."""
        return self._gpu_s + self.held_gpus * max(0.0, at_s - self._held_since_s)

    def _counts(self, role: Role) -> WorkerCounts:
        states = [each.worker.state for each in self.all(role)]
        return WorkerCounts(
            starting=states.count(WorkerState.STARTING),
            ready=states.count(WorkerState.READY),
            draining=states.count(WorkerState.DRAINING),
            gpus=self._gpus_per_worker.get(role, 0),
        )

    def _reconcile(self, at_s: float) -> None:
        fleet = tuple(each.worker for each in self._by_name.values())
        desired = {NAMES[role]: self.wanted.of(role) for role in self._gpus_per_worker}
        after = reconcile(self._graph, fleet, desired, self._inventory, frozenset(), at_s)
        started = {worker.name for worker in after.started(fleet)}
        for name in after.removed.keys() - started:
            del self._by_name[name]
        for worker in after.fleet:
            if worker.name in started:
                self._start(worker)
            else:
                self._by_name[worker.name].worker = worker
        self._gpu_s = self.gpu_seconds(at_s)
        self._held_since_s = at_s
        self.held_gpus = sum(
            self._gpus_per_worker[each.worker.role] for each in self.all() if each.worker.state in HOLDS_GPUS
        )
        self._changed(at_s)
        if any(_is_drained(each) for each in self.all()):
            self.end_drained(at_s)

    def _changed(self, at_s: float) -> None:
        self._serving = {role: tuple(each for each in self.all(role) if each.is_ready) for role in Role}
        self.on_change(at_s)

    def _start(self, worker: Worker) -> None:
        started, finished = self._told[worker.role]
        engine = SimulatedEngine(self._new_model(worker.role), started, finished)
        self._numbers += 1
        each = self._by_name[worker.name] = SimulatedWorker(worker, engine, self._numbers)
        self._starting(each)


def _ignore(at_s: float) -> None:
    """Nobody wants to know."""


def _is_drained(each: SimulatedWorker) -> bool:
    return each.worker.state is WorkerState.DRAINING and not each.in_flight
