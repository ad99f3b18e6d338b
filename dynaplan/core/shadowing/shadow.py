"""A policy that decides beside a live one, on workers that exist in the model only.

It sees what the live policy sees, as it would be with its own numbers of workers:

- *fleet and desired counts* are its own; what it asks for serves a start-up time later,
- *KV usage* is the measured one, spread over its own decode workers,
- *prefill queue* is the measured one, plus the difference between both fluids' queues,
- *mean TTFT and ITL* are the measured ones times the ratio of what the model expects with its workers and
  with the live ones. So corrections, which compare measured with expected times, are those of the live
  engines.

Traffic, forecasts, holds, start-up times and GPUs of the box are the same. What the model says wrong of both
cancels out in the differences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dynaplan.core.planning import guards
from dynaplan.core.planning.deciding import current_targets, decide
from dynaplan.core.planning.sla_policy import SlaModel, effective_correction
from dynaplan.core.planning.startup_time import startup_time_s
from dynaplan.core.planning.unmanaged import unmanaged_in
from dynaplan.core.shadowing.imagined_fleet import Fares, ImaginedFleet, fared
from dynaplan.domain.planning.decisions import Decision, PlannerState, ShadowRecord
from dynaplan.domain.planning.observation import Load, Observation, WorkerCounts
from dynaplan.domain.planning.scaling import SCALED_ROLES, DesiredCounts
from dynaplan.domain.planning.score import PolicyScore
from dynaplan.domain.planning.sizing import Corrections
from dynaplan.domain.planning.targets import Targets
from dynaplan.domain.planning.traffic import Traffic
from dynaplan.domain.settings.planner import PlannerSettings

LEAST_MS = 1e-9
"""Lowest time that is divided by, ms."""


@dataclass(frozen=True)
class Judge:
    """The settings whose promise both policies are judged by, and their model, whatever their own are."""

    settings: PlannerSettings
    model: SlaModel

    def fared(
        self, fleet: ImaginedFleet, observation: Observation, corrections: Corrections
    ) -> tuple[ImaginedFleet, Fares | None]:
        """Return the fleet after the observed interval, and what the requests got there."""
        if observation.traffic is None:
            return fleet, None
        service = self.model.service_for(current_targets(observation))
        if not self.model.formula:
            service = service.slowed(
                effective_correction(corrections.prefill), effective_correction(corrections.decode)
            )
        return fared(fleet, observation.traffic, observation.at_s, service, self.settings.targets())


@dataclass(frozen=True)
class Models:
    """The model that both policies are judged by, and the one that the shadow decides with, if it does."""

    judging: SlaModel
    deciding: SlaModel | None


@dataclass(frozen=True)
class Interval:
    """One interval of the live workers: the queues before and after it, and what requests got."""

    observation: Observation
    before: ImaginedFleet
    after: ImaginedFleet
    fares: Fares | None


class LiveScore:
    """Follows the workers that really served, and keeps the score of the policy that asked for them."""

    def __init__(self, settings: PlannerSettings, judge: Judge) -> None:
        self._settings = settings
        self._judge = judge
        self._fleet: ImaginedFleet | None = None
        self._last_s = 0.0
        self.score = PolicyScore()

    def follow(self, observation: Observation, decision: Decision, corrections: Corrections) -> Interval:
        """Return what was observed, and add it to the score; the first interval only begins it."""
        load = observation.load
        served = Targets(load.prefill_workers, load.decode_workers)
        queues = self._fleet or ImaginedFleet(served)
        before = replace(queues, asked=served)
        after, fares = self._judge.fared(before, observation, corrections)
        if self._fleet:
            lasted_s = max(0.0, observation.at_s - self._last_s)
            gpus = _gpus(self._settings, observation, decision.current)
            self.score += _scored(observation, fares, lasted_s, gpus, decision)
        self._fleet, self._last_s = after, observation.at_s
        return Interval(observation, before, after, fares)


class Shadow:
    """Follows a live planner with settings of its own; nothing that it decides is carried out."""

    def __init__(self, settings: PlannerSettings, model: SlaModel | None, judge: Judge) -> None:
        self._settings = settings
        self._model = model
        self._judge = judge
        self._fleet: ImaginedFleet | None = None
        self._last_s = 0.0
        self.state = PlannerState()
        self.score = PolicyScore()

    def follow(self, live: Interval, corrections: Corrections) -> Decision:
        """Decide after the interval that the live planner observed; begins with the live numbers."""
        observation, began = live.observation, self._fleet
        before = began or replace(live.before, asked=current_targets(observation))
        before = replace(before, alone=unmanaged_in(observation.fleet, before.asked))
        after, fares = self._judge.fared(before, observation, corrections)
        seen = _seen(live, before, after, fares)
        startup_s = startup_time_s(self._settings, (observation.startup_s,))
        load = seen.load
        if self._settings.is_by_targets and not load.changed:
            # Times that were measured while the live workers changed correct nothing.
            load = replace(load, changed=observation.load.changed)
        seen = replace(seen, startup_s=startup_s, load=load)
        self.state, decision = decide(self._settings, self.state, seen, self._model)
        if began:
            lasted_s = max(0.0, observation.at_s - self._last_s)
            gpus = _gpus(self._settings, observation, before.asked)
            self.score += _scored(observation, fares, lasted_s, gpus, decision)
        self._fleet = after.asking(decision.desired, observation.at_s, startup_s)
        self._last_s = observation.at_s
        return decision


class ShadowPlanner:
    """A second policy beside a live planner: it follows each decision, and both policies' scores."""

    def __init__(self, settings: PlannerSettings, shadow: PlannerSettings, models: Models) -> None:
        own, others = settings.to_options(), shadow.to_options()
        self._options = {name: value for name, value in others.items() if own.get(name) != value}
        self._is_judged_by_live = settings.is_by_targets
        judge = Judge(settings if self._is_judged_by_live else shadow, models.judging)
        self._live = LiveScore(settings, judge)
        self._shadow = Shadow(shadow, models.deciding, judge)
        self._since = ""

    def follow(
        self, observation: Observation, decision: Decision, after: PlannerState, wall_time: str
    ) -> ShadowRecord:
        """Return what the second policy decides where the live one has decided this."""
        self._since = self._since or wall_time
        corrections = after.corrections if self._is_judged_by_live else self._shadow.state.corrections
        live = self._live.follow(observation, decision, corrections)
        shadowed = self._shadow.follow(live, corrections)
        return ShadowRecord(self._options, shadowed, self._since, self._live.score, self._shadow.score)


def _scored(
    observation: Observation, fares: Fares | None, lasted_s: float, gpus: int, decision: Decision
) -> PolicyScore:
    """Return the score of one interval in which that number of GPUs was asked for."""
    requests = (observation.traffic.requests or 0.0) if observation.traffic and fares else 0.0
    late = requests * fares.late if fares else 0.0
    return PolicyScore(requests, late, gpus * lasted_s, int(decision.is_change), lasted_s)


def _gpus(settings: PlannerSettings, observation: Observation, asked: Targets) -> int:
    return sum(asked.of(role) * guards.gpus_of(settings, observation.fleet, role) for role in SCALED_ROLES)


def _seen(live: Interval, before: ImaginedFleet, after: ImaginedFleet, fares: Fares | None) -> Observation:
    """Return the interval as the shadow sees it."""
    observation, at_s = live.observation, live.observation.at_s
    fleet, serving = observation.fleet, after.managed(at_s)
    is_starting = serving != after.asked
    prefill, decode = after.asked.prefill, after.asked.decode
    return replace(
        observation,
        fleet=replace(
            fleet,
            prefill=_counts(fleet.prefill, serving.prefill, prefill),
            decode=_counts(fleet.decode, serving.decode, decode),
        ),
        desired=DesiredCounts(prefill, decode, 1, 0 if is_starting else 1),
        load=_load(live, before, after),
        traffic=_traffic(observation.traffic, live.fares, fares),
        failure="",
    )


def _counts(live: WorkerCounts, serving: int, asked: int) -> WorkerCounts:
    return WorkerCounts(
        starting=asked - serving,
        ready=serving,
        gpus=live.gpus,
        startup_s=live.startup_s,
        unmanaged=live.unmanaged,
    )


def _load(live: Interval, before: ImaginedFleet, after: ImaginedFleet) -> Load:
    """Return the load of the shadow's workers: of its own number, and with its own queue."""
    load, traffic, at_s = live.observation.load, live.observation.traffic, live.observation.at_s
    first, last = before.prompts - live.before.prompts, after.prompts - live.after.prompts
    began = before.serving(at_s - traffic.interval_s) if traffic else before.serving(at_s)
    serving = before.serving(at_s)
    usage = load.kv_usage
    if usage is not None and serving.decode:
        usage = usage * load.decode_workers / serving.decode
    return replace(
        load,
        kv_usage=usage,
        prefill_queue=_shifted(load.prefill_queue, (first + last) / 2),
        prefill_queue_first=_shifted(load.prefill_queue_first, first),
        prefill_queue_last=_shifted(load.prefill_queue_last, last),
        prefill_workers=serving.prefill,
        decode_workers=serving.decode,
        changed="" if began == serving else f"{began} -> {serving}",
        decode_asleep=0,
        prefill_asleep=0,
    )


def _shifted(depth: float | None, by: float) -> float | None:
    return None if depth is None else max(0.0, depth + by)


def _traffic(traffic: Traffic | None, live: Fares | None, own: Fares | None) -> Traffic | None:
    """Return the traffic with the mean times that the shadow's workers would have given."""
    if traffic is None or live is None or own is None:
        return traffic
    return replace(
        traffic,
        ttft_ms=_times(traffic.ttft_ms, own.ttft_ms / max(live.ttft_ms, LEAST_MS)),
        itl_ms=_times(traffic.itl_ms, own.itl_ms / max(live.itl_ms, LEAST_MS)),
    )


def _times(measured_ms: float | None, factor: float) -> float | None:
    return None if measured_ms is None else measured_ms * factor
