"""Policies on an hour of public traffic: the Azure conversation trace at 8 times its rate, for 4 to 6 GPUs.

All begin with as many workers as its first minutes need (``cases.py``), but for the best split that stands
still.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dynaplan.lab.simulate.options import SimulateOptions
from dynaplan.lab.simulate.simulation import best_static, run_simulations
from dynaplan.simulation.run import Result
from tests.bench.bursts import RULES
from tests.bench.cases import AZURE, AZURE_HOUR, AZURE_LONG_START
from tests.bench.rivals import RIVALS
from tests.bench.table import Row


def rows(_: int) -> Iterator[Row]:
    """Virtual time: the same on every machine, and measured once."""
    static = best_static(AZURE_HOUR).best
    yield from _figures(f"Azure, best-static:{static}", static.result)
    for case, hour in AZURE.items():
        for rule in ("sla", "sla, no hedge"):
            yield from _beside(case, rule, hour, static.result)
        for result in run_simulations(replace(hour, policies=RIVALS if case != AZURE_LONG_START else ())):
            yield from _figures(f"{case}, {result.policy}", result)


def _beside(case: str, rule: str, hour: SimulateOptions, static: Result) -> Iterator[Row]:
    [ours] = run_simulations(replace(hour, policies=("sla",), planner=RULES[rule]))
    met, hours = _met(ours) / _met(static), ours.gpu_hours / static.gpu_hours
    name = f"{case}, {rule}"
    yield from _figures(name, ours)
    yield Row(f"{name}: SLO over best-static's", "x", [met], more_is_better=True)
    yield Row(f"{name}: GPU-hours over best-static's", "x", [hours])


def _figures(name: str, result: Result) -> Iterator[Row]:
    yield Row(f"{name}: within both targets", "", [_met(result)], more_is_better=True)
    yield Row(f"{name}: mean GPUs", "", [result.gpu_hours * 3600 / result.trace_s])


def _met(result: Result) -> float:
    return result.outcome.attainment(result.outcome.both_met)
