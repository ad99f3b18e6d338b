"""The simulated fleet and the live one agree: the same trace and settings come to the same in both."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.simulation.outcome import Distribution
from dynaplan.simulation.run import Result
from tests.e2e.deployment import Deployment
from tests.e2e.replay import percentile
from tests.e2e.traces import in_torture
from tests.e2e.two_fleets import Event, Live, TwoFleets

INTERVAL_S = 2.0
PLANNER = {
    "adjustment-interval": INTERVAL_S,
    "metric-pulling-interval": 0.25,
    "decode-kv-scale-up-threshold": 0.2,
    "decode-kv-scale-down-threshold": 0.1,
    "prefill-queue-scale-up-threshold": 1.2,
    "prefill-queue-scale-down-threshold": 0.25,
}

BY_TARGETS = {"policy": "sla", "ttft": 1500.0, "itl": 200.0}
"""Queued prompts are dispatched by that TTFT: without any other option, served as well as simulated."""

TTFT_TOLERANCE = 0.15
"""Relative: queues multiply what the machine adds to steps and to the start of workers."""

ITL_TOLERANCE = 0.1
SLACK_MS = 10.0
"""Half a decode step."""
LATE_S = INTERVAL_S + 0.5
"""A load near its threshold, and a start that took longer, may put a decision off to the next interval."""


def phases(*rates: tuple[float, float], isl: int, osl: int = 30) -> list[TracedRequest]:
    """So many requests/s for so many seconds, and then others: each anywhere in its share of the time.

    Poisson arrivals would have lulls in which a threshold is met in one fleet and missed in the other by
    luck. Lengths vary by half.
    """
    dice = random.Random(1)
    made: list[TracedRequest] = []
    begin_s = 0.0
    for rate, seconds in rates:
        for number in range(round(rate * seconds)):
            prompt, output = (round(mean * dice.uniform(0.5, 1.5)) for mean in (isl, osl))
            made.append(TracedRequest(begin_s + (number + dice.random()) / rate, prompt, output))
        begin_s += seconds
    return made


SURGE = phases((2, 2), (12, 12), (1.5, 8), isl=800)
"""More than one prefill worker computes."""


def apart_in_latency(live: Live, simulated: Result) -> list[str]:
    """Which percentiles of the live run lie too far from the simulated ones, in words."""
    ttfts_ms = [1000 * each.ttft_s for each in live.seen]
    itls_ms = [1000 * each.itl_s for each in live.seen if each.itl_s is not None]
    return [
        *apart("TTFT", ttfts_ms, simulated.outcome.ttft_ms, live.path_ms, TTFT_TOLERANCE),
        *apart("ITL", itls_ms, simulated.outcome.itl_ms, 0.0, ITL_TOLERANCE),
    ]


def apart(
    name: str, seen_ms: Sequence[float], simulated_ms: Distribution, path_ms: float, tolerance: float
) -> Iterable[str]:
    for percent in (50, 95):
        seen, expected = percentile(seen_ms, percent), simulated_ms.percentile(percent) + path_ms
        if abs(seen - expected) > tolerance * expected + SLACK_MS:
            yield f"{name} p{percent} is {seen:.0f} ms, simulated {expected:.0f} ms"


def apart_in_time(live: Live, simulated: Result, trace_s: float) -> list[str]:
    """Whether other numbers of workers were asked for than in the simulation, or not about then."""
    events: list[Event] = [
        (each.at_s, {"prefill": each.after.prefill, "decode": each.after.decode})
        for each in simulated.events
        if each.at_s < trace_s
    ]
    found = []
    for role in ("prefill", "decode"):
        one, two = changes(role, live.events), changes(role, events)
        is_same = [count for _, count in one] == [count for _, count in two]
        if not is_same or any(abs(mine[0] - yours[0]) > LATE_S for mine, yours in zip(one, two, strict=True)):
            found.append(f"{role} workers (at s, number) are {one}, simulated {two}")
    return found


def changes(role: str, events: Iterable[Event]) -> list[tuple[float, int]]:
    found: list[tuple[float, int]] = []
    for at_s, counts in events:
        if not found or counts[role] != found[-1][1]:
            found.append((round(at_s, 1), counts[role]))
    return found


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("mode", "gpus", "policy", "wait_s", "trace"),
    [
        ("disagg", 4, {}, 30.0, SURGE),
        pytest.param("agg", 2, {}, 30.0, phases((2, 2), (8, 9), (1.5, 8), isl=500), marks=in_torture),
        pytest.param("disagg", 2, BY_TARGETS, 30.0, SURGE, marks=in_torture),
        pytest.param("disagg", 2, BY_TARGETS, 2.5, SURGE, marks=in_torture),
    ],
    ids=["disaggregated", "aggregated", "by deadline", "giving up"],
)
async def test_a_trace_comes_to_the_same_served_as_simulated(
    deploy: Callable[..., Deployment],
    tmp_path: Path,
    mode: str,
    gpus: int,
    policy: dict[str, Any],
    wait_s: float,
    trace: list[TracedRequest],
) -> None:
    planner: dict[str, Any] = {**PLANNER, **policy, "max-gpu-budget": gpus}
    fleets = TwoFleets(tmp_path, mode, planner, wait_s)
    deployment = await asyncio.to_thread(deploy, *fleets.arguments)
    live = await fleets.live(deployment, trace)
    if not live.is_valid:
        live = await fleets.live(deployment, trace)
    simulated = fleets.simulated(trace, live.startup_s)

    assert all(each.is_whole for each in live.seen)
    assert simulated.outcome.lost == 0
    assert bool(simulated.outcome.given_up_prefills) is (wait_s < 30)
    assert len(changes("decode", live.events)) == (0 if policy else 2)  # by targets, the box is full
    assert apart_in_time(live, simulated, trace[-1].arrival_s) == [], str(live)
    if not live.is_valid:
        pytest.skip(f"the machine is too busy to compare latencies: {live}")
    assert apart_in_latency(live, simulated) == [], str(live)
