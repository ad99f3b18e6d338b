"""Learns the steps of the engines that a planner counts workers of: from the counters in each worker's load.

Workers of a role are alike, so their equations go to one regression. What is learnt is written to a file once
a minute, and a planner that starts begins with it: its first decision is by what the last one knew.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dynaplan.config.planner import gpus_of_worker
from dynaplan.config.service_config import SERVICE_ARGS, section_options
from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.config.settings.worker import engine_of
from dynaplan.engines.engine_counters import EngineSpans
from dynaplan.engines.machine_speed import find_machine, prior_line
from dynaplan.engines.model_memory import memory_need
from dynaplan.engines.timing_model.learnt_timing import (
    MEASURED_SPREAD,
    UNKNOWN_MACHINE,
    LearntTiming,
    StepLearner,
    StepLine,
)
from dynaplan.engines.worker_load import WorkerLoad
from dynaplan.graph.lifecycle import Role
from dynaplan.planner.learnt_files import LearntOf, learnt_dir, learnt_of, read_file, write_file
from dynaplan.planner.learnt_timings import LearntTimings
from dynaplan.planner.sizing.queueing.queueing_model import QueueingModel
from dynaplan.planner.sizing.queueing.workload import WorkerKind

log = logging.getLogger(__name__)

SAVE_EVERY_S = 60.0


@dataclass
class RoleLearning:
    """The regression of one role's workers, the spans of each worker, and the file that keeps it."""

    learner: StepLearner
    of: LearntOf | None = None
    spans: dict[str, EngineSpans] = field(default_factory=dict)
    kv_tokens: int = 0
    request_slots: int = 0

    def read(self, loads: Mapping[str, WorkerLoad | None]) -> None:
        """Learn from the counters of all workers that there are, and forget the others."""
        for gone in self.spans.keys() - loads.keys():
            del self.spans[gone]
        for url, load in loads.items():
            if load:
                self._read_worker(url, load)

    def _read_worker(self, url: str, load: WorkerLoad) -> None:
        """Learn step times from one worker's counters; begin anew when it is asleep or reports none."""
        if load.counters is None or load.is_asleep:
            self.spans.pop(url, None)
            return
        counters = load.counters
        self.request_slots = load.request_slots or self.request_slots
        self.kv_tokens = round(counters.kv_capacity_tokens) or self.kv_tokens
        if counts := self.spans.setdefault(url, EngineSpans()).read(counters, load.running_requests):
            self.learner.learn(counts)

    @property
    def known(self) -> LearntTiming:
        known = self.learner.known
        return replace(
            known,
            kv_tokens=self.kv_tokens or known.kv_tokens,
            request_slots=self.request_slots or known.request_slots,
        )


class StepLearning:
    """What one planner learns of its engines' steps. ``is_needed``: without a profile planning waits."""

    def __init__(
        self, roles: Mapping[Role, RoleLearning], directory: Path | None, *, is_needed: bool
    ) -> None:
        self._roles = roles
        self._directory = directory
        self._is_needed = is_needed
        self._saved_s = 0.0
        self._begin()

    def read(self, role: Role, loads: Mapping[str, WorkerLoad | None]) -> None:
        """Learn from the counters in the loads of a role's workers, by address; None: it does not answer."""
        if role in self._roles:
            self._roles[role].read(loads)

    def known(self) -> LearntTimings:
        """Return what is known now; None for a role of which no measurement was usable yet."""
        known = {role: each.known for role, each in self._roles.items() if each.learner.known.equations}
        return LearntTimings(known.get(Role.DECODE), known.get(Role.PREFILL), self._is_needed)

    def save(self, now_s: float, *, is_due: bool = False) -> None:
        """Write the file of each role whose steps are known, once a minute or when ``is_due``.

        Errors are logged.
        """
        if self._directory is None or (not is_due and now_s - self._saved_s < SAVE_EVERY_S):
            return
        self._saved_s = now_s
        for each in self._roles.values():
            if each.of and each.known.is_usable:
                try:
                    write_file(self._directory, each.of, each.known)
                except OSError as error:
                    log.warning("what was learnt is not kept: %s", error)

    def _begin(self) -> None:
        for role, each in self._roles.items():
            found = read_file(self._directory / each.of.file_name) if self._directory and each.of else None
            if found:
                each.learner.begin_with(found.learnt)
                log.info("%s workers begin with what was learnt before: %s", role.value, found.path)


def learning_of(
    settings: PlannerSettings,
    config: Mapping[str, Mapping[str, Any]],
    service: QueueingModel,
    *,
    is_needed: bool,
) -> StepLearning:
    """Return what learns the steps of a planner's workers.

    With ``is_needed`` it begins with what is expected of the model on this machine, else with the profile's
    step times in ``service``; a file of an earlier planner goes before both.
    """
    roles = {}
    components = {Role.DECODE: settings.decode_component, Role.PREFILL: settings.prefill_component}
    kinds = {Role.DECODE: service.decode, Role.PREFILL: service.prefill or service.decode}
    for role, component in components.items():
        options = section_options(config, component)
        gpus = _gpus(config, component)
        machine = find_machine(gpus)
        of = learnt_of(config, component, machine, gpus, role.value) if options else None
        if is_needed:
            need = memory_need(engine_of(options), options, gpus) if options else None
            learner = StepLearner(prior_line(need, machine, gpus))
        else:
            learner = _learner_from(kinds[role])
        roles[role] = RoleLearning(learner, of)
    return StepLearning(roles, learnt_dir(os.environ), is_needed=is_needed)


def simulated_learning(service: QueueingModel, *, is_needed: bool) -> StepLearning:
    """Return the learning for a simulation: nothing is known of the machine, and no file is kept."""
    kinds = {Role.DECODE: service.decode, Role.PREFILL: service.prefill or service.decode}
    learners = {
        role: StepLearner(UNKNOWN_MACHINE) if is_needed else _learner_from(kind)
        for role, kind in kinds.items()
    }
    return StepLearning(
        {role: RoleLearning(each) for role, each in learners.items()}, None, is_needed=is_needed
    )


def _learner_from(kind: WorkerKind) -> StepLearner:
    """Return a learner that begins with the profile's times of these workers."""
    line = StepLine.through(kind.timing, kind.kv_tokens)
    return StepLearner(line, kind.timing, MEASURED_SPREAD)


def _gpus(config: Mapping[str, Mapping[str, Any]], component: str) -> float:
    """Return the GPUs of one worker; 0 where it computes on the processor."""
    resources = ((config.get(component) or {}).get(SERVICE_ARGS) or {}).get("resources") or {}
    return float(gpus_of_worker(config, component)) if resources.get("gpu") else 0.0
