"""The owner of loads: models are loaded on request and put away, by the one place that owns workers and GPUs.

Level-triggered, as the reconciler that calls it: at each pass it observes all models and all memory, and
``dynaplan.models`` plans what is loaded, what leaves and whom to refuse. Nothing is remembered of a plan: a
load that has begun is a worker that starts, one that leaves is a worker that drains, and both are in the
statefile. So a load is begun once for any number of callers, and a manager that starts anew goes on. The
memory that they share is followed by ``shared_memory``.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from dynaplan.config.model_entries import models_together, served_models
from dynaplan.config.planner import settings_of_models
from dynaplan.config.settings.models import OnDemandSettings, ServedModel
from dynaplan.config.settings.worker import engine_of
from dynaplan.contract.model_keys import (
    MAX_EVENTS,
    ModelDemand,
    ModelEvent,
    ModelOrders,
    ModelReport,
    PoolReport,
    Refusal,
)
from dynaplan.engines.registry import engine_kind
from dynaplan.fleet.launch import Launch
from dynaplan.fleet.plugin.shared_memory import (
    ReadHost,
    SharedDevices,
    SharedMemory,
    is_in_memory,
    read_host_memory,
)
from dynaplan.fleet.startup_times import StartupTimes, median_startup_s, startup_key
from dynaplan.graph.lifecycle import COUNTS, Role, Worker, WorkerState
from dynaplan.models.model import (
    HOST,
    Device,
    Load,
    ModelPolicies,
    ModelPolicy,
    ModelsObservation,
    ModelState,
    ModelStatus,
    Plan,
    Refuse,
)
from dynaplan.models.policies import model_constraints, model_policy
from dynaplan.models.rules.ladder import failed_sleep, idle_until_s
from dynaplan.models.rules.memory import gb, level_of
from dynaplan.models.rules.planning import plan
from dynaplan.models.rules.replicas import as_replica, prefill_pool_name, replica_name, wanted_workers
from dynaplan.models.rules.turns import DEMAND_PAUSE_S
from dynaplan.models.sleepers import Sleepers
from dynaplan.models.workers import (
    NO_MODELS,
    NOTHING_LEARNT,
    DesiredModels,
    Learnt,
    Moment,
    desired_models,
    learn_ready,
    model_status,
    workers_of,
)

log = logging.getLogger(__name__)

USE_KEPT_S = 60.0
"""The precision with which the last use of a model is written down, in seconds."""


_SECONDS = re.compile(r"\d[\d.]* s\b")


MEASURED_MORE = 1.02
"""By how much the memory of a worker has to exceed what was learnt of it to be learnt anew."""

UNWRITABLE_PATIENCE_S = 10.0
"""For how long a request waits for a load that cannot begin, as the statefile cannot be written."""

UNWRITABLE_RETRY_S = 30.0
"""The ``Retry-After`` of those that are refused then."""

PLANNER_GRACE_S = 60.0
"""What a planner wanted last counts for so long after its process was seen ready; then requests count."""


class ModelWishes(NamedTuple):
    """What persons have asked for models, and how many workers planners want, by the model's name."""

    orders: ModelOrders
    planned: Mapping[str, int]


class _PoolSettings(NamedTuple):
    """The decode workers of a model, which have its name, or its prefill workers: of one component."""

    name: str
    component: str
    model: str
    settings: OnDemandSettings
    is_prefill: bool = False


def _pools_of(model: ServedModel) -> tuple[_PoolSettings, ...]:
    """Return the pools of a model, the decode workers first."""
    decode = _PoolSettings(model.name, model.component, model.name, model.settings)
    own = model.prefill
    if own is None:
        return (decode,)
    return decode, _PoolSettings(
        prefill_pool_name(model.name), own.component, model.name, own.settings, is_prefill=True
    )


class _Wait(NamedTuple):
    """Since when somebody has waited for a model, and when that was seen last."""

    since_s: float
    last_s: float


class ModelManager:
    """Plans the models of one deployment. Without any, as where a graph has one model, it plans nothing."""

    def __init__(
        self,
        launch: Launch,
        startup_times: StartupTimes,
        learnt: Mapping[str, Learnt] | None = None,
        read_host: ReadHost = read_host_memory,
    ) -> None:
        self._startup_times = startup_times
        saved = launch.scratch_dir if is_in_memory(launch.scratch_dir) else None
        self._memory = SharedMemory(read_host, launch.model_memory_bytes, saved)
        self._plan = Plan()
        self._settings_now = ModelPolicies({})
        self._statuses: dict[str, ModelStatus] = {}
        self._moment = Moment(0.0, 0.0)
        self._said: dict[str, str] = {}
        self._waits: dict[str, _Wait] = {}
        self._wanted_s: dict[str, float] = {}
        self._preload_asked_s: dict[str, float] = {}
        self._failed_to_sleep: set[str] = set()
        self._held_up: frozenset[str] = frozenset()
        self._planner_seen_s: float | None = None
        self._planned: frozenset[str] = frozenset()
        self._fleet: tuple[Worker, ...] = ()
        self.sleepers = Sleepers()
        self.learnt = dict(learnt or {})
        self.events: deque[ModelEvent] = deque(maxlen=MAX_EVENTS)
        self.devices: tuple[Device, ...] = ()
        self._launch = launch
        self._models: tuple[ServedModel, ...] = ()
        self._settings = ModelPolicies({})
        self._take_over(launch)

    def _take_over(self, launch: Launch) -> None:
        """Take over the configuration of the deployment, which a reload may have changed."""
        self._launch = launch
        known = {service.name for service in launch.graph.on_demand}
        self._models = tuple(each for each in served_models(launch.config) if each.component in known)
        self._pools = tuple(pool for each in self._models for pool in _pools_of(each))
        self._planned = frozenset(
            name
            for name, settings in settings_of_models(launch.config, launch.namespace).items()
            if not settings.no_operation
        )
        self._measured_by_driver = frozenset(
            each.component
            for each in self._pools
            if not engine_kind(engine_of(launch.settings_of(each.component))).takes_given_memory
        )
        self._settings = ModelPolicies(
            {each.name: self._policy_of(each) for each in self._models},
            model_constraints(self._models, models_together(launch.config)),
        )

    @property
    def components(self) -> dict[str, str]:
        """The component of each pool of workers, by the pool's name: the first of a model has its name."""
        return {each.name: each.component for each in self._pools}

    @property
    def next_at_s(self) -> float:
        """When the plan is due again, on the clock of the workers, if nothing happens before."""
        return self._plan.next_at_s

    def decide(
        self,
        launch: Launch,
        fleet: Sequence[Worker],
        devices: SharedDevices,
        demand: Mapping[str, ModelDemand] | None,
        wishes: ModelWishes,
        moment: Moment,
    ) -> DesiredModels:
        """Return the workers that models are to have now, and where new ones go.

        While the demand is not known, None, every model stays as it is.
        """
        if launch is not self._launch:
            self._take_over(launch)
        if not self._models:
            self._plan = Plan()
            return NO_MODELS
        if demand is None:
            self._plan = Plan()
            return desired_models(self._plan, self.components, fleet)
        orders = wishes.orders
        self._moment, self._fleet = moment, tuple(fleet)
        self._follow_planner(fleet)
        self._follow_memory(fleet, devices)
        self._statuses = {each.name: self._status(each, fleet, demand, orders) for each in self._models}
        pinned = {
            name: replace(each, is_pinned=wish) if (wish := orders.of(name).is_pinned) is not None else each
            for name, each in self._settings.models.items()
        }
        self._settings_now = replace(self._settings, models=pinned)
        for each in self._models:
            self._statuses[each.name] = self._as_planned(each, fleet, wishes.planned)
            for pool in _pools_of(each):
                self._statuses |= self._further_workers(pool, fleet, orders)
        observation = ModelsObservation(tuple(self._statuses.values()), self.devices)
        self._plan = plan(observation, self._settings_now, moment.now_s)
        self._log()
        self._make_room_on_host()
        return desired_models(self._plan, self.components, fleet)

    def _follow_memory(self, fleet: Sequence[Worker], devices: SharedDevices) -> None:
        components = set(self.components.values())
        self.devices = self._memory.follow(
            (each for each in fleet if each.component in components),
            devices,
            has_host=any(
                each.devices == 0 or each.sleep_levels or (each.prefill and each.prefill.devices == 0)
                for each in self._settings.models.values()
            ),
            now_s=self._moment.now_s,
            kept_bytes=self._kept_bytes(fleet),
            by_driver=self._measured_by_driver,
        )
        self._learn_by_driver(fleet)

    def _learn_by_driver(self, fleet: Iterable[Worker]) -> None:
        """Note what ready workers hold by the driver, which sees all of it only some time after the load."""
        for pool in self._pools:
            if pool.component not in self._measured_by_driver:
                continue
            ready = (each for each in fleet if each.gpus and each.state is WorkerState.READY)
            for worker in workers_of(pool.component, ready):
                held = max(self._memory.held(worker, pool.component).values(), default=0)
                learnt = self.learnt.get(pool.name, NOTHING_LEARNT)
                if held > learnt.memory_bytes * MEASURED_MORE:
                    self.learnt[pool.name] = replace(learnt, memory_bytes=held)

    def _make_room_on_host(self) -> None:
        """Remove saved KV entries where loads of this plan, beside those under way, need their memory."""
        coming_bytes = sum(
            max(0, self._assumed_bytes(status) - status.held_bytes.get(HOST, 0))
            for status in self._statuses.values()
            if status.state is ModelState.LOADING and HOST in status.placed_on
        )
        for each in self._plan.actions:
            if isinstance(each, Load) and HOST in each.devices:
                coming_bytes += each.bytes_each
                if removed_bytes := self._memory.make_room_on_host(each.model, coming_bytes):
                    log.info(
                        "%s of saved KV entries were removed for model %s", gb(removed_bytes), each.model
                    )

    def learn(self, worker: Worker, load_s: float) -> None:
        """Note that a worker was seen ready after its load, with the memory that it holds."""
        for pool in self._pools:
            if pool.component == worker.component:
                before = self.learnt.get(pool.name, NOTHING_LEARNT)
                self.learnt[pool.name] = learn_ready(
                    before, self._memory.measure(worker), load_s, self._moment.unix_s
                )

    def reports(self, unwritable: str = "") -> dict[str, ModelReport]:
        """Return what is published of each model, by name.

        ``unwritable``: why the statefile cannot be written, and no load begins, or empty.
        """
        workers = defaultdict[str, list[ModelStatus]](list)
        for each in self._statuses.values():
            workers[each.replica_of or each.name].append(each)
        known = (each for each in self._models if each.name in self._statuses)
        reports = {each.name: self._report(each, workers[each.name]) for each in known}
        loads = {each.model: each for each in self._plan.actions if isinstance(each, Load)}
        before, self._held_up = self._held_up, frozenset(loads if unwritable else ())
        for name in before & loads.keys() - self._held_up:
            self._say(name, f"load: {loads[name].why}")
        return {
            name: self._blocked_report(name, each, unwritable) if name in self._held_up else each
            for name, each in reports.items()
        }

    def _blocked_report(self, name: str, report: ModelReport, why: str) -> ModelReport:
        """Return the report of a model whose load cannot begin; who has waited for some time is refused."""
        self._say(name, f"held up: {why}")
        came_until_s = self._moment.to_unix_s(self._moment.now_s - UNWRITABLE_PATIENCE_S)
        return replace(report, why=why, refusal=Refusal(503, why, came_until_s, UNWRITABLE_RETRY_S))

    # -- observe ---------------------------------------------------------------------------------

    def _status(
        self,
        model: ServedModel,
        fleet: Iterable[Worker],
        demand: Mapping[str, ModelDemand],
        orders: ModelOrders,
    ) -> ModelStatus:
        worker = next(iter(workers_of(model.component, fleet)), None)
        learnt = self._learn_too_little(model.name, worker)
        used_unix_s = demand[model.name].last_use_unix_s if model.name in demand else 0.0
        if used_unix_s > learnt.last_use_unix_s + USE_KEPT_S:
            learnt = self.learnt[model.name] = replace(learnt, last_use_unix_s=used_unix_s)
        status = model_status(
            *(model.name, worker, demand.get(model.name), orders.of(model.name), learnt, self._moment),
            self.sleepers.of(worker),
        )
        rules = self._settings.models[model.name]
        if held := self._memory.held(worker, model.component):
            status = replace(status, held_bytes=held)
        if status.sleep_failure or failed_sleep(rules, status, self._moment.now_s):
            self._failed_to_sleep.add(model.name)
        if model.name in self._failed_to_sleep:
            status = replace(status, has_failed_to_sleep=True)
        if model.settings.preload and not learnt.ready_unix_s and status.load_asked_s is None:
            asked_s = self._preload_asked_s.setdefault(model.name, self._moment.now_s)
            status = replace(status, load_asked_s=asked_s)
        if status.load_asked_s is not None and status.state is ModelState.READY:  # it was there already
            self.learnt[model.name] = replace(learnt, ready_unix_s=round(self._moment.unix_s, 2))
            status = replace(status, load_asked_s=None)
        if (waiting_since_s := self._waiting_since_s(status)) < math.inf:
            status = replace(status, waiting_since_s=waiting_since_s)
        if held and worker is None:  # it has gone, and its memory is not back
            return replace(status, state=ModelState.DRAINING, placed_on=tuple(held))
        return status

    def _follow_planner(self, fleet: Iterable[Worker]) -> None:
        """Note when the planners' process was seen ready last; a manager that begins takes it to be."""
        is_ready = any(each.role is Role.PLANNER and each.state is WorkerState.READY for each in fleet)
        if is_ready or self._planner_seen_s is None:
            self._planner_seen_s = self._moment.now_s

    def _as_planned(
        self, model: ServedModel, fleet: Iterable[Worker], planned: Mapping[str, int]
    ) -> ModelStatus:
        """Return the model with the workers that its planner wants: those that it has until one was asked.

        Without a planner, or when that has been away for too long, its requests count.
        """
        status = self._statuses[model.name]
        seen_s = self._planner_seen_s
        if model.name not in self._planned or seen_s is None or self._moment.now_s - seen_s > PLANNER_GRACE_S:
            return status

        def wanted(pool: _PoolSettings) -> int:
            own = [each for each in fleet if each.component == pool.component]
            present = sum(each.state in COUNTS and each.state is not WorkerState.FAILED for each in own)
            return planned.get(pool.name, max(1, present))

        decode, *prefill = map(wanted, _pools_of(model))
        return replace(
            status, planned_workers=decode, planned_prefill_workers=prefill[0] if prefill else None
        )

    def _kept_bytes(self, fleet: Iterable[Worker]) -> dict[str, int]:
        """Return what sleeping workers keep on each device, by name."""
        kept = {}
        for model in self._models:
            for worker in workers_of(model.component, fleet):
                progress = self.sleepers.of(worker)
                level = level_of(self._settings.models[model.name], progress.level) if progress else None
                if progress and level and progress.state is ModelState.ASLEEP:
                    kept[worker.name] = level.kept_bytes
        return kept

    def _further_workers(
        self, pool: _PoolSettings, fleet: Iterable[Worker], orders: ModelOrders
    ) -> dict[str, ModelStatus]:
        """Return the status of the pool's workers but the model's first, and of leftovers with memory."""
        first, rules = self._statuses[pool.model], self._settings.models[pool.model]
        rules = rules.prefill if pool.is_prefill and rules.prefill else rules
        found: dict[str, ModelStatus] = {}
        planned = first.planned_prefill_workers if pool.is_prefill else first.planned_workers
        wanted = wanted_workers(rules, first.in_flight + first.waiting, planned)
        begin = 1 if pool.is_prefill else 2
        for number, worker in enumerate(workers_of(pool.component, fleet)[begin - 1 :], begin):
            name = replica_name(pool.name, number)
            learnt = self._learn_too_little(pool.name, worker if pool.is_prefill else None)
            status = model_status(name, worker, None, orders.of(pool.model), learnt, self._moment)
            if number <= wanted:
                self._wanted_s[name] = self._moment.now_s
            last_use_s = self._wanted_s.get(name, status.since_s)
            held = self._memory.held(worker, pool.component)
            status = replace(status, last_use_s=last_use_s, held_bytes=held)
            found[name] = as_replica(status, name, first, number <= wanted, pool.is_prefill)
        left = self._memory.held(None, pool.component)
        if left and (pool.is_prefill or first.state is not ModelState.DRAINING):
            name = f"{pool.name} (gone)"
            gone = ModelStatus(name, ModelState.DRAINING, replica_of=pool.model, is_prefill=pool.is_prefill)
            found[name] = replace(gone, held_bytes=left, placed_on=tuple(left))
        return found

    def _waiting_since_s(self, status: ModelStatus) -> float:
        """Return since when the model has been in demand without being ready; see ``turns``."""
        now_s, wait = self._moment.now_s, self._waits.get(status.name)
        if wait and (status.state is ModelState.READY or now_s - wait.last_s > DEMAND_PAUSE_S):
            del self._waits[status.name]
            wait = None
        if status.waiting and status.state is not ModelState.READY:
            since_s = min(status.oldest_arrival_s, wait.since_s if wait else math.inf)
            wait = self._waits[status.name] = _Wait(since_s, now_s)
        return wait.since_s if wait else math.inf

    def _learn_too_little(self, pool: str, worker: Worker | None) -> Learnt:
        """Return what was learnt of the pool; of a load that lacked memory, how much was too little."""
        learnt = self.learnt.get(pool, NOTHING_LEARNT)
        given = worker.failed_memory_bytes if worker else 0
        if given > learnt.failed_memory_bytes:
            learnt = self.learnt[pool] = replace(learnt, failed_memory_bytes=given)
        return learnt

    def _policy_of(self, model: ServedModel) -> ModelPolicy:
        """Return the policy of a model; one of several workers is not put to sleep."""
        decode, *prefill = map(self._pool_policy, _pools_of(model))
        return replace(decode, prefill=prefill[0], sleep_levels=()) if prefill else decode

    def _pool_policy(self, pool: _PoolSettings) -> ModelPolicy:
        service = self._launch.graph.service(pool.component)
        options = self._launch.settings_of(pool.component)
        gpus = service.gpus if service else 0
        environment = service.envs if service else {}
        policy = model_policy(pool.settings, options, gpus, self._launch.gpus, environment)
        return replace(policy, estimate_load_s=self._usual_load_s(pool, gpus))

    def _usual_load_s(self, pool: _PoolSettings, gpus: float) -> float:
        role = Role.PREFILL if pool.is_prefill else Role.DECODE
        anybody = Worker("", pool.component, role, gpus=tuple(range(math.ceil(gpus))))
        key = startup_key(anybody, self._launch.settings_of(pool.component))
        return median_startup_s(self._startup_times.read(), key) or 0.0

    # -- publish ---------------------------------------------------------------------------------

    def _report(self, model: ServedModel, workers: Iterable[ModelStatus]) -> ModelReport:
        status, rules = self._statuses[model.name], self._settings_now.models[model.name]
        refusal = next(
            (each for each in self._plan.actions if isinstance(each, Refuse) and each.model == model.name),
            None,
        )
        loaded = status.state not in (ModelState.UNLOADED, ModelState.FAILED)
        return ModelReport(
            component=model.component,
            state=status.state.value,
            since_unix_s=round(self._moment.to_unix_s(status.since_s), 1) if loaded else 0.0,
            load_s=round(status.measured_load_s or rules.estimate_load_s, 1),
            why=self._why(status),
            is_pinned=rules.is_pinned,
            memory_bytes=self._shown_bytes(status),
            gpus=tuple(sorted({index for each in workers for index in each.placed_on if index != HOST})),
            max_workers=rules.max_workers,
            leaves_unix_s=self._leaves_unix_s(rules, status),
            workers=self._count_workers(model.component),
            gpus_each=rules.devices,
            planned_workers=status.planned_workers,
            prefill=self._prefill_report(model, rules.prefill) if rules.prefill else None,
            last_lines=status.last_lines,
            refusal=Refusal(
                refusal.status,
                refusal.why,
                self._moment.to_unix_s(min(refusal.arrived_until_s, self._moment.now_s)),
                refusal.retry_after_s,
            )
            if refusal
            else None,
        )

    def _prefill_report(self, model: ServedModel, rules: ModelPolicy) -> PoolReport:
        learnt = self.learnt.get(prefill_pool_name(model.name), NOTHING_LEARNT)
        return PoolReport(
            workers=self._count_workers(self.components[prefill_pool_name(model.name)]),
            max_workers=rules.max_workers,
            gpus_each=rules.devices,
            load_s=round(learnt.load_s or rules.estimate_load_s, 1),
            memory_bytes=rules.claim_bytes or learnt.memory_bytes or rules.estimate_bytes,
            planned_workers=self._statuses[model.name].planned_prefill_workers,
        )

    def _count_workers(self, component: str) -> dict[str, int]:
        """Return the numbers of the component's workers by state."""
        return dict(Counter(each.state.value for each in self._fleet if each.component == component))

    def _why(self, status: ModelStatus) -> str:
        """Return the last sentence about the model: while somebody waits for it, what it waits for."""
        steps = [step.why for step in self._plan.trail if step.model == status.name] if status.waiting else []
        return steps[-1] if steps else self._said.get(status.name, "") or status.reason

    def _leaves_unix_s(self, rules: ModelPolicy, status: ModelStatus) -> float:
        """Return when the model leaves unless it is used before; 0 where it does not."""
        until_s = idle_until_s(rules, status)
        return 0.0 if math.isinf(until_s) else round(self._moment.to_unix_s(until_s), 1)

    def _shown_bytes(self, status: ModelStatus) -> int:
        """Return the memory that is shown of a model: what it holds; until it is loaded what it will hold."""
        held_bytes = max(status.held_bytes.values(), default=0)
        if status.state is ModelState.LOADING or not held_bytes:
            return max(held_bytes, self._assumed_bytes(status))
        return held_bytes

    def _assumed_bytes(self, status: ModelStatus) -> int:
        rules = self._settings_now.models[status.replica_of or status.name]
        rules = rules.prefill if status.is_prefill and rules.prefill else rules
        if status.state is ModelState.ASLEEP and (level := level_of(rules, status.sleep_level)):
            return level.kept_bytes
        return rules.claim_bytes or status.measured_bytes or rules.estimate_bytes

    def _log(self) -> None:
        """Log each new sentence about a model, once; one that only counts seconds down is not new."""
        for action in self._plan.actions:
            if not (isinstance(action, Load) and action.model in self._held_up):
                self._say(action.model, f"{type(action).__name__.lower()}: {action.why}")

    def _say(self, model: str, sentence: str) -> None:
        before = self._said.get(model, "")
        self._said[model] = sentence
        if _SECONDS.sub("", before) != _SECONDS.sub("", sentence):
            self.events.append(ModelEvent(self._moment.unix_s, model, sentence))
            log.info("model %s: %s", model, sentence)
