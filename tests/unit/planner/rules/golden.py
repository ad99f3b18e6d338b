"""Golden decision trails: every decision of a few short simulations, as lines of text.

``python -m tests.unit.planner.rules.golden`` writes the fixtures anew. Do that when a change of the
decisions is meant, and let the commit say why they changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dynaplan.config.planner import settings_of
from dynaplan.contract.counts import PoolSizes
from dynaplan.lab.simulate.options import SimulateOptions
from dynaplan.lab.simulate.planner_policy import OnDecision, PlannerPolicy
from dynaplan.lab.simulate.policy_runs import service_settings
from dynaplan.planner.model import Decision, Observation, PlannerState
from dynaplan.planner.sla_model import build_sla_model
from dynaplan.simulation.outcome import Slo
from dynaplan.simulation.run import simulate
from dynaplan.simulation.traces.reading import read_requests

FOLDER = Path(__file__).parents[3] / "fixtures" / "decision_trails"
REGENERATE = "python -m tests.unit.planner.rules.golden"
H200 = "h200_sxm-Llama-3.1-8B-Instruct-FP8"

LONG = "isl=12000,osl=300"
"""Long requests: few of them keep several workers busy, and a simulation is short."""

STEP = f"step:low=0.5,high=4,at=60,duration=200,{LONG}"
WAVE = f"sinusoid:low=0.5,high=5,period=160,duration=240,{LONG}"
PULSE = f"onoff:low=0.5,high=4,on=60,off=100,duration=240,{LONG}"
ONE_EACH = PoolSizes(1, 1)


@dataclass(frozen=True)
class Scenario:
    """One simulation. ``planner`` are the planner's options, ``first`` the workers to begin with."""

    policy: str
    load: str
    planner: Mapping[str, object] = field(default_factory=dict)
    gpus: int = 8
    first: PoolSizes = ONE_EACH


SCENARIOS = {
    "load-sinusoid": Scenario("load", WAVE),
    "sla-step": Scenario("sla", STEP),
    "sla-sinusoid": Scenario("sla", WAVE, {"no-correction": True}),
    "sla-tight-budget": Scenario("sla", WAVE, {"load-predictor": "constant"}, gpus=3),
    "sla-aggregated": Scenario("sla", PULSE, first=PoolSizes(0, 2)),
    "both-pulse": Scenario("both", PULSE, {"load-predictor": "constant"}),
}
"""By the name of their fixture."""


def trail(scenario: Scenario) -> list[str]:
    """One line per decision: when, from how many workers to how many, and why."""
    lines: list[str] = []

    def decided(_: PlannerState, seen: Observation, decision: Decision, __: PlannerState) -> None:
        lines.append(f"{seen.at_s:g} s: {decision.current} -> {decision.desired}: {decision.reason}")

    _simulate(scenario, decided)
    return lines


def _simulate(scenario: Scenario, decided: OnDecision) -> None:
    slo = Slo(ttft_ms=1500.0, itl_ms=20.0)
    engine = {"profile": H200}
    service = service_settings(
        SimulateOptions(
            scenario.load,
            gpus=scenario.gpus,
            is_disaggregated=scenario.first.prefill > 0,
            startup_time_s=15.0,
            slo=slo,
            engine=engine,
        )
    )
    settings = settings_of(
        {
            "policy": scenario.policy,
            "profile-results-dir": H200,
            "max-gpu-budget": scenario.gpus,
            "adjustment-interval": 10.0,
            "ttft": slo.ttft_ms,
            "itl": slo.itl_ms,
            **scenario.planner,
        }
    )
    model = build_sla_model(settings, engine) if settings.is_by_targets else None
    policy = PlannerPolicy(scenario.policy, settings, model, on_decision=decided)
    simulate(read_requests(scenario.load, 1.0, 1), service, scenario.first, policy)


def fixture(name: str) -> Path:
    """Where the trail of that scenario is kept."""
    return FOLDER / f"{name}.txt"


def main() -> None:
    """Write every fixture anew, and no other."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    for old in FOLDER.glob("*.txt"):
        old.unlink()
    for name, scenario in SCENARIOS.items():
        fixture(name).write_text("".join(f"{line}\n" for line in trail(scenario)), encoding="utf-8")


if __name__ == "__main__":
    main()
