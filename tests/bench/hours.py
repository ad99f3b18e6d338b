"""Random hours of bursts, and the ones on which a number that stands still dominates the policy.

The goal is that there are none (``standing.py`` says what dominates). What there are, and why, stands in
docs/benchmarks.md. ``python -m tests.bench hours`` takes four minutes of CPU.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from dynaplan.lab.simulate.options import SimulateOptions
from tests.bench.bursts import RULES
from tests.bench.cases import HOUR
from tests.bench.standing import dominating, fared
from tests.bench.table import Row

HOURS = 20
MOST_DOMINATED = 8
"""Of ``HOURS``: 4, the mean of the first four twenties, and two standard deviations."""

RANGES: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "bursts": {"high": (4, 16), "on": (20, 180), "off": (60, 360)},
    "levels": {"low": (0.2, 2), "high": (4, 16), "stay": (30, 300)},
    "batches": {"every": (20, 120), "size": (15, 120)},
    "sessions": {"people": (8, 48), "on": (60, 300), "off": (120, 900)},
    "crowds": {"low": (0.5, 3), "high": (4, 16), "every": (120, 900)},
}
"""The least and the most of each parameter of a family of bursts; drawn log-uniformly."""


def random_hour(seed: int) -> SimulateOptions:
    """An hour of bursts from a seed: the families in turns, their parameters drawn."""
    family = list(RANGES)[seed % len(RANGES)]
    draws = random.Random(seed)
    given = {name: least * (most / least) ** draws.random() for name, (least, most) in RANGES[family].items()}
    parameters = ",".join(f"{name}={value:.3g}" for name, value in given.items())
    return replace(HOUR, trace=f"{family}:{parameters},duration=3600,seed={seed}")


def dominated(seeds: Iterable[int], planner: Mapping[str, Any]) -> Iterator[str]:
    """Yield, of each hour on which the policy is dominated, how both fared."""
    for seed in seeds:
        hour = replace(random_hour(seed), planner=planner)
        ours = fared(hour, "sla")
        better = dominating(hour, ours)
        if better:
            yield f"{hour.trace}: {ours}; {better}"


def rows(_: int) -> Iterator[Row]:
    """Virtual time: the same on every machine, and measured once."""
    for rule in ("sla", "sla, no hedge"):
        found = list(dominated(range(HOURS), RULES[rule]))
        name = f"of {HOURS} random hours of bursts: {rule} is dominated by a number that stands still on"
        yield Row(name, "", [float(len(found))], float(MOST_DOMINATED), note="; ".join(found))
