"""The owner of loads: models are loaded on request and put away, by the one place that owns workers and GPUs.

``dynaplan.models.step`` decides. Here is what it sees and causes: the keys of the store, or what the
statefile has of them while the store is away, the host's memory, orders to sleep and to wake, and the log.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any, TypeVar

from dynaplan.config.model_entries import models_together, served_models
from dynaplan.config.planner import settings_of_models
from dynaplan.config.settings.models import ServedModel, WorkerPool
from dynaplan.config.settings.worker import engine_of
from dynaplan.contract.model_keys import (
    MODEL_EVENTS,
    MODEL_MEMORY,
    MODEL_ORDERS,
    MODEL_WORKERS,
    MODELS_FIELD,
    DeviceReport,
    ModelOrders,
    planned_workers_in,
)
from dynaplan.engines.registry import engine_kind
from dynaplan.fleet.launch import Launch
from dynaplan.fleet.plugin.document import Statefile
from dynaplan.fleet.plugin.host_memory import HostMemoryPoll, ReadHost, is_in_memory, read_host_memory
from dynaplan.fleet.plugin.store_link import StoreLink
from dynaplan.fleet.startup_times import StartupTimes, median_startup_s, startup_key
from dynaplan.graph.lifecycle import Role, Worker
from dynaplan.models.deployed import DeployedModels
from dynaplan.models.desired import NO_MODELS, DesiredModels
from dynaplan.models.model import ModelPolicies, ModelPolicy
from dynaplan.models.policies import model_constraints, model_policy
from dynaplan.models.reports import reports
from dynaplan.models.shared_memory import SharedGpus
from dynaplan.models.step import (
    FleetObservation,
    ModelsState,
    after_load,
    after_saying,
    coming_host_bytes,
    step,
)
from dynaplan.models.workers import Moment
from dynaplan.util.amounts import gib
from dynaplan.util.errors import StatefileUnwritable

log = logging.getLogger(__name__)

T = TypeVar("T")


class ModelManager:
    """The models of one deployment. Without any, as where a graph has one model, it does nothing."""

    def __init__(
        self,
        launch: Launch,
        startup_times: StartupTimes,
        statefile: Statefile,
        link: StoreLink,
        read_host: ReadHost = read_host_memory,
    ) -> None:
        self._startup_times = startup_times
        self._statefile = statefile
        self._link = link
        self._host = HostMemoryPoll(
            read_host, launch.scratch_dir if is_in_memory(launch.scratch_dir) else None
        )
        self._launch = launch
        self.deployed = deployed_models(launch, startup_times)
        self.state = ModelsState(learnt=dict(statefile.learnt))

    @property
    def next_at_s(self) -> float:
        """The monotonic time at which the plan is to be made again, if nothing happens before."""
        return self.state.last.plan.next_at_s

    def decide(
        self, launch: Launch, fleet: tuple[Worker, ...], gpus: SharedGpus, moment: Moment
    ) -> DesiredModels:
        """Return the workers that models are to have now, and where new ones go.

        On the way it removes saved KV entries for the models that need memory, and sends engines to sleep or
        wakes them.
        """
        if launch is not self._launch:  # reloaded
            self._launch, self.deployed = launch, deployed_models(launch, self._startup_times)
        if not self.deployed.models:
            return NO_MODELS
        self.state, desired = step(self.deployed, self.state, self._observe(fleet, gpus, moment))
        for model, needed_bytes in coming_host_bytes(self.state):
            if removed_bytes := self._host.make_room(model, needed_bytes):
                log.info("%s of saved KV entries were removed for model %s", gib(removed_bytes), model)
        for instance_id, level in desired.sleep_orders(fleet):
            self._link.put_to_sleep(instance_id, level)
        for instance_id in desired.wake_orders(fleet):
            self._link.wake_up(instance_id)
        return desired

    def learn(self, worker: Worker, load_s: float) -> None:
        """Note that a worker was seen ready after its load, with the memory that it holds."""
        if worker.component not in self.deployed.components.values():
            return
        held = self.state.memory.held(worker, worker.component)
        held_bytes = max(held.values(), default=0)
        if worker.pid and not worker.gpus:
            held_bytes = self._host.held_bytes(worker.pid)
        self.state = after_load(self.deployed, self.state, worker, held_bytes, load_s)

    def tell(self, unwritable: str) -> None:
        """Log what was decided; ``unwritable`` is why no load begins, or empty."""
        before, self.state = self.state.events, after_saying(self.state, unwritable)
        for each in self.state.events:
            if each not in before:
                log.info("model %s: %s", each.model, each.sentence)

    def document(self, unwritable: str) -> dict[str, Any]:
        """Return what is published of models, and write what was learnt of them into the statefile.

        ``unwritable`` is why no load begins, or empty.
        """
        found = reports(self.deployed, self.state, unwritable)
        if not found:
            return {}
        if self.state.learnt != self._statefile.learnt:
            try:
                self._statefile.record_learnt(self.state.learnt)
            except StatefileUnwritable as error:
                log.warning("what was learnt of models is not in the statefile yet: %s", error)
        devices = self.state.memory.devices
        shared = [DeviceReport.of(each.index, each.total_bytes, each.foreign_bytes) for each in devices]
        return {
            MODELS_FIELD: {name: each.to_json() for name, each in found.items()},
            MODEL_EVENTS: [asdict(each) for each in self.state.events],
            MODEL_MEMORY: [each.to_json() for each in shared],
        }

    def _observe(self, fleet: tuple[Worker, ...], gpus: SharedGpus, moment: Moment) -> FleetObservation:
        link, components, host = self._link, self.deployed.components.values(), None
        if self.deployed.has_host:
            on_host = (each for each in fleet if each.component in components and not each.gpus)
            host = self._host.read([each.pid for each in on_host if each.pid], moment.now_s)
        return FleetObservation(
            moment,
            fleet,
            gpus,
            host,
            link.model_demand,
            self._read(MODEL_ORDERS, link.model_orders, ModelOrders.from_text),
            self._read(MODEL_WORKERS, link.model_workers, planned_workers_in),
            link.sleep_reasons,
            link.sleep_orders,
        )

    def _read(self, name: str, text: str | None, parse: Callable[[str], T]) -> T:
        """Return the parsed value of a key; where ``text`` is None, of the statefile's copy of the key.

        What cannot be parsed is logged, and taken as empty.
        """
        try:
            return parse(self._statefile.planner_keys.get(name, "") if text is None else text)
        except ValueError as error:
            log.warning("the key %s about models cannot be read: %s", name, error)
            return parse("")


def deployed_models(launch: Launch, startup_times: StartupTimes) -> DeployedModels:
    """Return the models of the configuration, with what their files and earlier loads tell of them."""
    known = {service.name for service in launch.graph.on_demand}
    models = tuple(each for each in served_models(launch.config) if each.component in known)
    planners = settings_of_models(launch.config, launch.namespace)
    by_driver = (
        pool.component
        for each in models
        for pool in each.pools
        if not engine_kind(engine_of(launch.settings_of(pool.component))).takes_given_memory
    )
    return DeployedModels(
        models,
        ModelPolicies(
            {each.name: _policy_of(each, launch, startup_times) for each in models},
            model_constraints(models, models_together(launch.config)),
        ),
        frozenset(name for name, settings in planners.items() if not settings.no_operation),
        frozenset(by_driver),
        launch.model_memory_bytes,
    )


def _policy_of(model: ServedModel, launch: Launch, startup_times: StartupTimes) -> ModelPolicy:
    """Return the policy of a model; one that has prefill workers is not put to sleep."""
    decode, *prefill = (_pool_policy(each, launch, startup_times) for each in model.pools)
    return replace(decode, prefill=prefill[0], sleep_levels=()) if prefill else decode


def _pool_policy(pool: WorkerPool, launch: Launch, startup_times: StartupTimes) -> ModelPolicy:
    service, options = launch.graph.service(pool.component), launch.settings_of(pool.component)
    gpus, environment = (service.gpus, service.envs) if service else (0, {})
    policy = model_policy(pool.settings, options, gpus, launch.gpus, environment)
    role = Role.PREFILL if pool.is_prefill else Role.DECODE
    anybody = Worker("", pool.component, role, gpus=tuple(range(math.ceil(gpus))))
    usual_s = median_startup_s(startup_times.read(), startup_key(anybody, options))
    return replace(policy, estimate_load_s=usual_s or 0.0)
