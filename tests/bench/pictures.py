"""Draws the examples in the documents: ``python -m tests.bench.pictures [POLICY ...]``, from the repository.

Each policy gets the same made-up load, and a picture ``docs/images/policy-NAME.svg`` of what it did.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Sequence
from html import escape
from pathlib import Path

from dynaplan.lab.drawing import panels
from dynaplan.lab.drawing.svg import document
from dynaplan.lab.simulate import page
from dynaplan.lab.simulate.options import SimulateOptions
from dynaplan.simulation.outcome import Slo
from dynaplan.simulation.run import Result
from tests.bench.autoscalers import run_policy

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


MOST_DECISIONS = 6
"""The number of decisions written below a picture."""

LINE_LETTERS, LINE_PX = 150, 15
"""The length of a line of text below a picture, and its height."""


def draw(name: str) -> str:
    """Simulate the policy of that name, and return its picture."""
    policy, called = POLICIES[name]
    planner = {"adjustment-interval": 10}
    options = SimulateOptions(LOAD, (policy,), startup_time_s=STARTUP_S, slo=SLO, planner=planner)
    result = run_policy(options, policy)
    met = result.outcome.attainment(result.outcome.both_met)
    title = f"{called}: SLO met {met:.1%}, {result.gpu_hours:.2f} GPU-hours"
    return picture(options, result, title, PANELS)


def picture(options: SimulateOptions, result: Result, title: str, keys: Sequence[str]) -> str:
    """Return an SVG of the panels of those keys, with the first decisions written below them."""
    axis = page.axis_of([result])
    every = page.panels_of([result], options.slo, options.gpus, is_disaggregated=options.is_disaggregated)
    shown = [panel for key in keys for panel in every if panel.key == key]
    drawing, height = panels.draw(shown, page.lanes_of([result], axis), axis)
    texts = [f"{axis.text(each.at_s)}: {page.change_text(each)}" for each in result.events[:MOST_DECISIONS]]
    more = len(result.events) - MOST_DECISIONS
    texts += [f"and {more} more"] if more > 0 else []
    lines = [line for text in texts for line in textwrap.wrap(text, LINE_LETTERS)]
    top = height + 18
    legend = "\n".join(
        f'<text class="legend" x="{panels.LEFT}" y="{top + LINE_PX * index:g}">{escape(line)}</text>'
        for index, line in enumerate(lines)
    )
    return document(title, f"{drawing}\n{legend}", panels.WIDTH, top + LINE_PX * len(lines))


def main(names: Sequence[str]) -> None:
    IMAGES.mkdir(exist_ok=True)
    for name in names or POLICIES:
        (IMAGES / f"policy-{name}.svg").write_text(draw(name), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
