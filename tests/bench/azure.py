"""Policies on an hour of public traffic: the Azure conversation trace at 8 times its rate, for 4 to 6 GPUs.

The oracle is not searched for here, that takes minutes: its schedule was found by ``dynaplan simulate`` with
the policy ``oracle`` (effort 12), and is simulated like the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from dynaplan import wiring
from dynaplan.domain.planning.targets import Targets
from dynaplan.simulator.options import SimulateOptions
from dynaplan.simulator.oracle.schedule import SchedulePolicy
from dynaplan.simulator.outcome import Slo
from dynaplan.simulator.run import Result, simulate
from dynaplan.simulator.shell.simulation import run_simulations, service_settings
from tests.bench.table import Row

TRACE = Path(__file__).parent.parent / "fixtures" / "traces" / "azure_conv.csv"
HOUR = SimulateOptions(str(TRACE), ("sla",), rate_scale=8.0, slo=Slo(500.0, 20.0), first=Targets(2, 2))

ORACLE = (
    *((0, 2, 2), (100, 2, 3), (496, 2, 2), (588, 2, 3), (664, 2, 2), (820, 2, 3), (928, 2, 2), (1060, 2, 3)),
    *((1304, 2, 2), (1308, 3, 2), (1960, 2, 2), (2912, 1, 2), (3472, 1, 1)),
)
"""From which second on how many prefill and decode workers are wanted."""


def rows(repeats: int) -> Iterator[Row]:
    """Virtual time: the same on every machine, and measured once. Half a minute of CPU for each policy."""
    oracle = _oracle()
    for name, options in {
        "sla": HOUR,
        "sla, start-up 240 s": replace(HOUR, startup_time_s=240.0),
        "hpa": replace(HOUR, policies=("hpa",)),
        "kpa": replace(HOUR, policies=("kpa",)),
    }.items():
        [result] = run_simulations(options)
        met, hours = _met(result) / _met(oracle), result.gpu_hours / oracle.gpu_hours
        least = {"sla": 0.95, "sla, start-up 240 s": 0.9}.get(name)
        yield Row(f"Azure hour, {name}: SLO over the oracle's", "x", [met], least, True)
        yield Row(
            f"Azure hour, {name}: GPU-hours over the oracle's", "x", [hours], 1.1 if name == "sla" else None
        )


def _oracle() -> Result:
    schedule = [(float(at_s), Targets(prefill, decode)) for at_s, prefill, decode in ORACLE]
    trace = wiring.planning.read_requests(HOUR.trace, HOUR.rate_scale, HOUR.seed)
    return simulate(trace, service_settings(HOUR), schedule[0][1], SchedulePolicy("oracle", schedule))


def _met(result: Result) -> float:
    return result.outcome.attainment(result.outcome.both_met)
