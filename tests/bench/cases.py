"""The hours of traffic that policies are measured on: made-up bursts and smooth load, in four cases.

Engines at a quarter of their speed and targets four times as long, so that an hour takes seconds. Beside
them the public Azure hour, whose engines have their own speed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dynaplan.contract.counts import PoolSizes
from dynaplan.lab.simulate.options import EVERY_PROMPT_REMOTE, SimulateOptions
from dynaplan.simulation.outcome import Slo

SLOW = {"speedup-ratio": 0.25}
HOUR = SimulateOptions(
    "",
    slo=Slo(2000.0, 80.0),
    engine=SLOW,
    prefill_engine=SLOW,
    disaggregation=replace(EVERY_PROMPT_REMOTE, prefill_deadline_ms=2000.0),
)
LARGE = {**SLOW, "profile": "h100_sxm-Llama-3.3-70B-Instruct-FP8-tp2", "tensor-parallel-size": 2}
FIRST_CASE = "8B"
CASES: Mapping[str, SimulateOptions] = {
    FIRST_CASE: HOUR,
    "8B, start-up 240 s": replace(HOUR, startup_time_s=240.0),
    "8B, aggregated": replace(HOUR, is_disaggregated=False),
    "70B": replace(
        HOUR,
        gpus=16,
        rate_scale=0.25,
        slo=Slo(8000.0, 160.0),
        engine=LARGE,
        prefill_engine=LARGE,
        disaggregation=replace(EVERY_PROMPT_REMOTE, prefill_deadline_ms=8000.0),
    ),
}
FAMILIES = {
    "bursts": "bursts:high=10,on=60,off=120,duration=3600",
    "levels": "levels:low=0.5,high=12,stay=60,duration=3600",
    "batches": "batches:every=40,size=60,duration=3600",
    "sessions": "sessions:people=16,on=120,off=360,duration=3600",
    "crowds": "crowds:low=1,high=8,every=300,duration=3600",
}
TRACES: Mapping[str, str] = {
    **FAMILIES,
    "steady": "poisson:rate=6,duration=3600",
    "wave": "sinusoid:low=2,high=10,period=1200,duration=3600",
}

AZURE_TRACE = Path(__file__).parent.parent / "fixtures" / "traces" / "azure_conv.csv"
AZURE_HOUR = SimulateOptions(
    str(AZURE_TRACE),
    rate_scale=8.0,
    slo=Slo(500.0, 20.0),
    disaggregation=replace(EVERY_PROMPT_REMOTE, prefill_deadline_ms=500.0),
    first=PoolSizes(2, 2),
)
AZURE_LONG_START = "Azure, start-up 240 s"
AZURE: Mapping[str, SimulateOptions] = {
    "Azure": AZURE_HOUR,
    AZURE_LONG_START: replace(AZURE_HOUR, startup_time_s=240.0, first=PoolSizes(2, 3)),
}
"""The conversation trace of 2023 at 8 times its rate, for 4 to 6 GPUs; as many serve its first minutes."""


def hour_of(case: str, name: str, seed: int) -> SimulateOptions:
    """Return the options of an hour: a case, a trace's name and a seed."""
    return replace(CASES[case], trace=f"{TRACES[name]},seed={seed}")
