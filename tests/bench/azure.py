"""Policies on an hour of public traffic: the Azure conversation trace at 8 times its rate, for 4 to 6 GPUs.

The oracle is not searched for here, that takes minutes: its schedule is kept (``schedules.py``), and is
simulated like the others. All begin with its first workers: nobody is late before the first decision.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dynaplan.lab.simulate.options import SimulateOptions
from dynaplan.lab.simulate.run import Result
from dynaplan.lab.simulate.simulation import run_simulations
from tests.bench.bursts import LEAST_OF_ORACLE, LEAST_OF_ORACLE_WITH_LONG_START, MOST_GPUS_FORETOLD, RULES
from tests.bench.cases import AZURE, AZURE_LONG_START
from tests.bench.rivals import RIVALS
from tests.bench.schedules import run_oracle
from tests.bench.table import Row


def rows(_: int) -> Iterator[Row]:
    """Virtual time: the same on every machine, and measured once."""
    for case, hour in AZURE.items():
        oracle = run_oracle(case, hour)
        assert oracle is not None
        hour = replace(hour, first=oracle.fleet[0].serving)
        yield from _figures(f"{case}, {oracle.policy}", oracle)
        for rule in ("sla", "sla, no hedge"):
            yield from _beside(case, rule, hour, oracle)
        for result in run_simulations(replace(hour, policies=RIVALS if case != AZURE_LONG_START else ())):
            yield from _figures(f"{case}, {result.policy}", result)


def _beside(case: str, rule: str, hour: SimulateOptions, oracle: Result) -> Iterator[Row]:
    [ours] = run_simulations(replace(hour, policies=("sla",), planner=RULES[rule]))
    met, hours = _met(ours) / _met(oracle), ours.gpu_hours / oracle.gpu_hours
    least = LEAST_OF_ORACLE_WITH_LONG_START if case == AZURE_LONG_START else LEAST_OF_ORACLE
    name = f"{case}, {rule}"
    yield from _figures(name, ours)
    yield Row(f"{name}: SLO over the oracle's", "x", [met], least, True)
    yield Row(f"{name}: GPU-hours over the oracle's", "x", [hours], MOST_GPUS_FORETOLD)


def _figures(name: str, result: Result) -> Iterator[Row]:
    yield Row(f"{name}: within both targets", "", [_met(result)], more_is_better=True)
    yield Row(f"{name}: mean GPUs", "", [result.gpu_hours * 3600 / result.trace_s])


def _met(result: Result) -> float:
    return result.outcome.attainment(result.outcome.both_met)
