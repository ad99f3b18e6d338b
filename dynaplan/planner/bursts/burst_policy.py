"""The burst mechanisms in one decision, as the SLA policy asks them: the seam of this folder."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.fleet.counts import Targets
from dynaplan.planner.bursts.burst_floor import (
    exchanged,
    kept_for_surprises,
    with_learnt_floor,
    without_requests,
)
from dynaplan.planner.bursts.hedging import hedged, remembered_hedge
from dynaplan.planner.bursts.memory import BurstMemory
from dynaplan.planner.model import Demand, Observation, PlannerState, Sizing, Step, WorkerLimits
from dynaplan.planner.sizing.demand_forecast import demand_of
from dynaplan.planner.sizing.queueing.queueing_model import ServiceModel


@dataclass(frozen=True)
class BurstPolicy:
    """What is known of bursts in one decision.

    ``state`` is the planner's, with the memory of the observed interval. ``limits`` have the learnt floor as
    minimums, which ``steps`` explain, and ``bounds`` have not. ``service`` has the measured step times.
    """

    settings: PlannerSettings
    observation: Observation
    service: ServiceModel
    current: Targets
    bounds: WorkerLimits
    state: PlannerState
    limits: WorkerLimits
    steps: tuple[Step, ...]

    @classmethod
    def observe(
        cls,
        settings: PlannerSettings,
        state: PlannerState,
        observation: Observation,
        service: ServiceModel,
        limits: WorkerLimits,
        current: Targets,
    ) -> BurstPolicy:
        """Learn from the observed interval, whose misses are in the state's error budget already."""
        standing, raised, steps = with_learnt_floor(settings, state, observation, service, limits, current)
        state = replace(state, bursts=replace(state.bursts, standing=standing))
        return cls(settings, observation, service, current, limits, state, raised, tuple(steps))

    def adjust(self, sizing: Sizing) -> Sizing:
        """Return the size with the workers that a surprise may want back, and with the GPUs exchanged."""
        settings, state, service = self.settings, self.state, self.service
        sizing = kept_for_surprises(
            sizing,
            self._surprised(),
            state.bursts.standing,
            service,
            settings.targets(),
            self.limits,
            self.current,
        )
        return exchanged(sizing, settings, state, service, self.limits, self.current)

    def hedge(self, state: PlannerState, sizing: Sizing) -> tuple[PlannerState, Sizing]:
        """Return the next state, and what the trusted expert wants instead of the forecast's size."""
        limits = self.limits if self.settings.learnt_floor else self.bounds
        return hedged(self.settings, state, self.observation, sizing, self.service, limits, self.current)

    def _surprised(self) -> Demand | None:
        """Return the demand of the farthest forecast and its surprise; None where either is not known."""
        settings, foresight = self.settings, self.observation.foresight
        farthest = foresight.expected[-1] if foresight and foresight.expected else None
        if not foresight or not farthest or farthest.requests is None or not farthest.surprise:
            return None
        if not settings.slo_window_s:
            return None
        requests = farthest.requests + farthest.surprise
        return demand_of(settings, foresight, replace(farthest, requests=requests))


def remembered(memory: BurstMemory, fade: float) -> BurstMemory:
    """Return what a planner that starts knows of bursts: the memory of the one before, faded."""
    return BurstMemory(without_requests(memory.standing, fade), remembered_hedge(memory.hedge, fade))
