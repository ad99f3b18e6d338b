"""Golden outcomes: what twenty-two short simulations come to, to the last digit.

They take both modes, every policy and router, queues with and without deadlines, full and shared caches,
refusals, prompts that are given up, and several seeds. Between two versions of the simulator nothing of it
may change unmeant: ``python -m tests.unit.simulation.golden`` writes the fixture anew where it is meant, and
the commit says why.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dynaplan.config.settings.frontend import DisaggregationSettings
from dynaplan.contract.counts import PoolSizes
from dynaplan.lab.simulate.options import EVERY_PROMPT_REMOTE, SimulateOptions
from dynaplan.lab.simulate.policy_runs import run_simulations
from dynaplan.simulation.outcome import Distribution, Slo
from dynaplan.simulation.router import SimulatedRouting
from dynaplan.simulation.run import Result

FIXTURE = Path(__file__).parents[2] / "fixtures" / "simulated_outcomes.json"
REGENERATE = "python -m tests.unit.simulation.golden"
PERCENTILES = (1, 50, 90, 99, 100)
COUNTS = (
    *("requests", "lost", "ttft_met", "itl_met", "both_met", "output_tokens"),
    *("remote_prefills", "given_up_prefills", "hashed_tokens", "cached_tokens"),
)

BURSTS = "bursts:duration=240,isl-cv=1,osl-cv=0.8"
CROWDS = "crowds:duration=240,isl-cv=1,osl-cv=0.8"
WAVE = "sinusoid:low=0.5,high=6,period=200,duration=300,isl=6000,osl=150,isl-cv=0.5,osl-cv=0.5"
TALKS = "conversations:rate=0.6,duration=150,isl-cv=0.7,osl-cv=0.7,think=5"
PLANNER = {"adjustment-interval": 15.0, "slo-window": 120.0}
SMALL_CACHE = {"num-gpu-blocks-override": 700, "max-model-len": 8000}
SHORT_ONES_STAY = DisaggregationSettings(
    is_on=True, is_conditional=True, max_local_prefill_length_tokens=1500, max_prefill_queue_size=8
)
BY_EVENTS = SimulatedRouting("kv", is_kv_events=True)
BY_PREDICTION = SimulatedRouting("kv", is_kv_events=False, temperature=0.5)


def run(trace: str, policy: str, **options: Any) -> SimulateOptions:
    quick = {"startup_time_s": 15.0, "slo": Slo(1500.0, 20.0), "planner": PLANNER}
    return SimulateOptions(trace, (policy,), **{**quick, **options})


RUNS: Mapping[str, SimulateOptions] = {
    "static": run(BURSTS, "static:2,2"),
    "static, aggregated": run(BURSTS, "static:3", is_disaggregated=False),
    "static, too few": run(CROWDS, "static:1,1", seed=2, rate_scale=4.0),
    "static, least loaded": run(CROWDS, "static:2,3", routing=SimulatedRouting("least-loaded"), seed=3),
    "static, random": run(BURSTS, "static:1,3", routing=SimulatedRouting("random"), seed=4),
    "static, uneven steps": run(BURSTS, "static:2,2", engine={"jitter": 0.1}, seed=5),
    "static, small cache": run(BURSTS, "static:3", engine=SMALL_CACHE, is_disaggregated=False),
    "static, small cache and remote": run(BURSTS, "static:2,2", engine=SMALL_CACHE, rate_scale=2.0),
    "static, short prompts local": run(BURSTS, "static:1,2", disaggregation=SHORT_ONES_STAY, seed=6),
    "static, prompts given up": run(BURSTS, "static:1,3", prefill_wait_s=3.0, rate_scale=3.0),
    "static, refusals": run(CROWDS, "static:1,2", max_waiting_requests=12, rate_scale=6.0, seed=7),
    "static, several prompts at once": run(
        BURSTS, "static:1,2", prefill_engine={"max-concurrent-prefills": 4}, seed=8
    ),
    "kv by events": run(TALKS, "static:2,2", routing=BY_EVENTS),
    "kv by events, aggregated": run(TALKS, "static:3", routing=BY_EVENTS, is_disaggregated=False, seed=2),
    "kv by prediction": run(TALKS, "static:2,3", routing=BY_PREDICTION, engine={"block-size": 32}),
    "load": run(WAVE, "load"),
    "load, aggregated": run(WAVE, "load", is_disaggregated=False, seed=9),
    "sla": run(WAVE, "sla"),
    "sla, aggregated": run(WAVE, "sla", is_disaggregated=False, first=PoolSizes(0, 2), seed=10),
    "both": run(BURSTS, "both", seed=11, disaggregation=EVERY_PROMPT_REMOTE),
    "formula": run(WAVE, "formula", gpus=4),
    "best-static": run(BURSTS, "best-static", gpus=4, slo=Slo(1500.0, 30.0)),
}
"""By the name in the fixture."""


def outcome(options: SimulateOptions) -> dict[str, Any]:
    """What one run comes to: every count, every sum, some percentiles, and the course of the fleet."""
    [result] = run_simulations(options)
    return described(result)


def described(result: Result) -> dict[str, Any]:
    outcome = result.outcome
    windows = [
        [each.requests, each.answered, each.both_met, each.ttft_ms.total, each.itl_ms.total]
        for each in outcome.windows
    ]
    counts = {name: getattr(outcome, name) for name in COUNTS}
    spreads = {name: spread(getattr(outcome, name)) for name in ("ttft_ms", "itl_ms", "queued_ms")}
    return {
        "policy": result.policy,
        **counts,
        **spreads,
        "total_duration_s": outcome.total_duration_s,
        "by_worker": {str(number): outcome.by_worker[number] for number in sorted(outcome.by_worker)},
        "windows": [sum(column) for column in zip(*windows, strict=True)] + [len(windows)],
        "gpu_hours": result.gpu_hours,
        "trace_s": result.trace_s,
        "end_s": result.end_s,
        "scale_events": result.scale_events,
        "flaps": result.flaps,
        "fleet": [
            [each.at_s, each.serving.prefill, each.serving.decode, each.gpus] for each in result.fleet[-4:]
        ],
        "events": [asdict(each) for each in result.events[-2:]],
        "moments": [sum(each.in_service for each in result.moments), len(result.moments)],
    }


def spread(values: Distribution) -> list[float]:
    return [values.count, values.total, values.highest, *map(values.percentile, PERCENTILES)]


def kept() -> dict[str, Any]:
    """The outcomes of the fixture, by the names of the runs."""
    return dict(json.loads(FIXTURE.read_text(encoding="utf-8")))


def main() -> None:
    """Write the fixture anew: a line for each run."""
    lines = [f"{json.dumps(name)}: {json.dumps(outcome(options))}" for name, options in RUNS.items()]
    FIXTURE.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
