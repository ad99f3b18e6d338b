"""Draws the examples in the documents: ``python -m tests.bench.pictures [POLICY ...]``, from the repository.

Each policy gets the same made-up load, and a picture ``docs/images/policy-NAME.svg`` of what it did.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from dynaplan.simulator.outcome import Slo
from dynaplan.simulator.report.page import picture
from dynaplan.simulator.shell.simulation import SimulateOptions, run_simulations

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"

LOAD = "sinusoid:low=4,high=24,period=600,duration=900,isl=3000,osl=500"
SLO = Slo(ttft_ms=500, itl_ms=20)
STARTUP_S = 30.0
PANELS = ("requests", "prefill", "decode", "ttft_ms", "itl_ms")

POLICIES = {
    "static": ("static:3,3", "A static deployment of 3 prefill and 3 decode workers"),
    "load": ("load", "The load planner"),
    "sla": ("sla", "The SLA planner"),
    "hpa": ("hpa", "Kubernetes' HPA"),
    "kpa": ("kpa", "Knative's KPA"),
}
"""The name of the picture: the policy and what it is called."""


def draw(name: str) -> str:
    """The picture of that name."""
    policy, called = POLICIES[name]
    planner = {"adjustment-interval": 10}
    options = SimulateOptions(LOAD, (policy,), startup_time_s=STARTUP_S, slo=SLO, planner=planner)
    results = list(run_simulations(options))
    met = results[0].outcome.attainment(results[0].outcome.both_met)
    title = f"{called}: SLO met {met:.1%}, {results[0].gpu_hours:.2f} GPU-hours"
    return picture(options, results, title, PANELS)


def main(names: Sequence[str]) -> None:
    IMAGES.mkdir(exist_ok=True)
    for name in names or POLICIES:
        (IMAGES / f"policy-{name}.svg").write_text(draw(name), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
