"""The planner's policies in virtual time: Dynamo's benchmark, the best static split, a simulation's cost.

Dynamo published that its local planner, against a fixed 2 prefill and 2 decode workers, was 1.5 times as fast
with 7.4 % less GPU: a sinusoid of 5 to 20 requests/s, period 150 s, for 600 s, ISL 3000, OSL 150, 8 GPUs, a
decision every 10 s. Their hardware and engine are not known to the millisecond; that two prefill workers were
overloaded at the crest is. So here an H100's prefill runs at half speed, once with its decode and once
without; a worker starts in 10 s. "Fast" is the mean duration of a request. Both begin with the same four
workers, and the planner knows such a day from a warm-up trace of other requests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from time import process_time

from dynaplan.contract.counts import PoolSizes
from dynaplan.lab.simulate.options import EVERY_PROMPT_REMOTE, SimulateOptions
from dynaplan.lab.simulate.policy_runs import best_static, run_simulations
from dynaplan.simulation.outcome import Slo
from dynaplan.simulation.run import Result
from tests.bench.autoscalers import run_policy
from tests.bench.table import Row

WAVE = "sinusoid:low=5,high=20,period=150,duration=600,isl=3000,osl=150"
HALF_SPEED = {"profile": "h100-bf16", "speedup-ratio": 0.5}
DYNAMO = SimulateOptions(
    WAVE,
    ("static:2,2", "sla"),
    startup_time_s=10.0,
    slo=Slo(1000.0, 50.0),
    first=PoolSizes(2, 2),
    engine={"profile": "h100-bf16"},
    prefill_engine=HALF_SPEED,
    planner={"adjustment-interval": 10, "load-predictor-warmup-trace": f"{WAVE},seed=7"},
)

ASSUMED = {
    "prefill at half speed": DYNAMO,
    "everything at half speed": replace(DYNAMO, engine=HALF_SPEED),
}

LOADS = {
    "wave of 10 minutes": "sinusoid:low=5,high=40,period=600,duration=1200,isl=3000,osl=150",
    "step": "step:low=8,high=32,at=400,duration=800,isl=3000,osl=150",
    "steady": "poisson:rate=30,duration=600,isl=3000,osl=150",
}
RIVALS = ("formula", "hpa", "kpa")
SMALL = SimulateOptions(
    "poisson:rate=10,duration=500,isl=3000,osl=150",
    ("sla",),
    slo=Slo(500.0, 20.0),
    disaggregation=replace(EVERY_PROMPT_REMOTE, prefill_deadline_ms=500.0),
)


def rows(repeats: int) -> Iterator[Row]:
    """Everything but the CPU time is the same each time, and is measured once."""
    for assumed, options in ASSUMED.items():
        static, planned = run_simulations(options)
        speed = _mean_s(static) / _mean_s(planned)
        hours = planned.gpu_hours / static.gpu_hours
        yield Row(f"Dynamo's benchmark, {assumed}: 2P 2D over sla, mean duration", "x", [speed], 1.5, True)
        yield Row(f"Dynamo's benchmark, {assumed}: sla over 2P 2D, GPU-hours", "x", [hours], 0.926)
    for name, trace in LOADS.items():
        yield from _beside_best_static(name, trace)
    times_s = []
    for _ in range(repeats):
        begun_s = process_time()
        list(run_simulations(SMALL))
        times_s.append(process_time() - begun_s)
    yield Row("simulate 5000 requests, 500 s, policy sla: CPU", "s", times_s, 1.6)


def _beside_best_static(name: str, trace: str) -> Iterator[Row]:
    """All begin with the workers of the best static split: nobody is late before the first decision."""
    options = replace(SMALL, trace=trace)
    static = best_static(options).best
    name = f"{name}, best-static:{static}"
    yield Row(f"{name}: within both targets", "", [static.attainment], more_is_better=True)
    for policy in ("sla", *RIVALS):
        result = run_policy(replace(options, first=static.workers), policy)
        met = result.outcome.both_met / static.result.outcome.both_met
        yield Row(f"{name}, {policy}: SLO over its own", "x", [met], more_is_better=True)
        yield Row(f"{name}, {policy}: GPU-hours over its own", "x", [result.gpu_hours / static.gpu_hours])


def _mean_s(result: Result) -> float:
    return result.outcome.total_duration_s / result.outcome.requests
