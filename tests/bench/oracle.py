"""The oracle against random changes of its schedules, and its lower bound: ten traces, some with hashes.

Every change is simulated, and the next ones begin from the cheapest that meets the SLO: a random search that
uses none of the oracle's models, nor its costs of prompts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from time import process_time

from dynaplan.gateway.traced_requests import TracedRequest
from dynaplan.lab.simulate.options import SimulateOptions
from dynaplan.lab.simulate.oracle.oracle import OracleOptions, find_oracle
from dynaplan.lab.simulate.simulation import service_settings
from dynaplan.planner import factory
from dynaplan.simulation.outcome import Slo
from dynaplan.simulation.router import SimulatedRouting
from dynaplan.simulation.service import ServiceSettings
from tests.bench.cases import HOUR, SLOW
from tests.bench.kv_routing import LONG, MOONCAKE
from tests.bench.table import Row
from tests.unit.lab.simulate.oracle.changes import cheaper

CHANGES = 60
"""Changes that are simulated of each schedule."""

H200 = SimulateOptions("", slo=Slo(500.0, 20.0))
FITTING = {**SLOW, "max-model-len": 32_768}
TALKS = replace(HOUR, slo=Slo(1500.0, 80.0), engine=FITTING, prefill_engine=FITTING)
MOON = replace(H200, slo=Slo(4000.0, 40.0), engine=LONG, prefill_engine=LONG)
TALK = "conversations:turns=6,think=15,duration=240,rate=1,system=2000,isl=1500,osl=200"
KV = SimulatedRouting("kv")

TRACES: Mapping[str, tuple[SimulateOptions, float]] = {
    "wave": (replace(H200, trace="sinusoid:low=5,high=20,period=150,duration=300,isl=3000,osl=150"), 300),
    "step": (replace(H200, trace="step:low=10,high=40,at=100,duration=200,isl=2000,osl=200"), 200),
    "bursts": (replace(HOUR, trace="bursts:high=10,on=60,off=120,duration=900"), 900),
    "levels": (replace(HOUR, trace="levels:low=0.5,high=12,stay=60,duration=600"), 600),
    "crowds": (replace(HOUR, trace="crowds:low=1,high=8,every=300,duration=900"), 900),
    "sessions, aggregated": (
        replace(HOUR, trace="sessions:people=16,on=120,off=360,duration=900", is_disaggregated=False),
        900,
    ),
    "talks, round-robin": (replace(TALKS, trace=TALK), 400),
    "talks, kv": (replace(TALKS, trace=TALK, routing=KV), 400),
    "talks, kv, aggregated": (replace(TALKS, trace=TALK, routing=KV, is_disaggregated=False), 400),
    "Mooncake, 200 s": (replace(MOON, trace=MOONCAKE), 200),
}


def requests_of(options: SimulateOptions, length_s: float) -> list[TracedRequest]:
    """Return the beginning of the trace."""
    found = factory.read_requests(options.trace, options.rate_scale, options.seed)
    return [request for request in found if request.arrival_s <= length_s]


def rows(_: int) -> Iterator[Row]:
    """Virtual time: the same on every machine but for the CPU time, and measured once."""
    for name, (options, length_s) in TRACES.items():
        yield from _of_trace(name, requests_of(options, length_s), service_settings(options))


def _of_trace(name: str, trace: list[TracedRequest], settings: ServiceSettings) -> Iterator[Row]:
    begun_s = process_time()
    oracle = find_oracle(lambda: trace, settings, OracleOptions(effort=8))
    cpu_s = process_time() - begun_s
    verdict, result = oracle.verdict, oracle.result
    found = list(cheaper(oracle, lambda: trace, settings, CHANGES, seed=1))
    best_hours = found[-1][1].gpu_hours if found else result.gpu_hours
    met = result.outcome.attainment(result.outcome.both_met)
    note = f"{len(trace)} requests" + ("" if verdict.is_slo_met else ", the SLO is not met")
    yield Row(f"{name}: within both targets", "", [met], more_is_better=True, note=note)
    yield Row(f"{name}: GPU-hours", "", [result.gpu_hours])
    if verdict.lower_bound_gpu_hours:
        over = result.gpu_hours / verdict.lower_bound_gpu_hours
        yield Row(f"{name}: GPU-hours over the lower bound", "x", [over])
    yield Row(f"{name}: best of {CHANGES} random changes, GPU-hours", "x", [best_hours / result.gpu_hours])
    yield Row(f"{name}: CPU", "s", [cpu_s])
