"""A load that stays as it is, but for noise: the number of workers stays too.

The engines are four times as slow as the profile, and so are targets and load: the same numbers of workers
are needed, and there are four times fewer requests to simulate.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from dynaplan.config.planner import settings_of
from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.lab.simulate.options import SimulateOptions
from dynaplan.lab.simulate.planner_policy import PlannerPolicy
from dynaplan.lab.simulate.policy_runs import service_settings
from dynaplan.planner.model import Decision, Observation, PlannerState
from dynaplan.planner.sla_model import build_sla_model
from dynaplan.simulation.outcome import Slo
from dynaplan.simulation.run import simulate
from tests.e2e.traces import in_torture

H200 = "h200_sxm-Llama-3.1-8B-Instruct-FP8"
SLOWNESS = 4
ENGINE = {"profile": H200, "speedup-ratio": 1 / SLOWNESS}
SLO = Slo(ttft_ms=500 * SLOWNESS, itl_ms=20 * SLOWNESS)
WORTH_OF_A_WORKER = 5.0 / SLOWNESS
"""Requests/s; eight times that need eight workers, prefill and decode together."""

DURATION_S, SETTLED_S = 840, 640
"""It begins with one worker of each role, so a backlog of minutes has to be worked off first, and the first
backtest comes after ten minutes of evidence, which begins when the first answers have ended."""

GPUS = 16


def noisy(requests_per_s: float) -> Iterator[TracedRequest]:
    """In every second as many requests as the rate says, which varies by 5 % (standard deviation)."""
    draws, due = random.Random(1), 0.0
    for second in range(DURATION_S):
        due += max(0.0, requests_per_s * draws.gauss(1, 0.05))
        arriving = int(due)
        due -= arriving
        for number in range(arriving):
            yield TracedRequest(second + (number + 0.5) / arriving, 3000, 150)


def changes(policy: str, requests_per_s: float, first: PoolSizes) -> list[str]:
    """Every decision for another number of workers, after settling."""
    late: list[str] = []

    def decided(_: PlannerState, seen: Observation, decision: Decision, __: PlannerState) -> None:
        if decision.is_change and seen.at_s > SETTLED_S:
            late.append(f"{seen.at_s:g} s: {decision.current} -> {decision.desired}: {decision.reason}")

    options = SimulateOptions(
        "",
        gpus=GPUS,
        is_disaggregated=first.prefill > 0,
        startup_time_s=15.0,
        slo=SLO,
        engine=ENGINE,
    )
    settings = settings_of(
        {
            "policy": policy,
            "profile-results-dir": H200,
            "max-gpu-budget": GPUS,
            "adjustment-interval": 20.0,
            "ttft": SLO.ttft_ms,
            "itl": SLO.itl_ms,
        }
    )
    planner = PlannerPolicy(policy, settings, build_sla_model(settings, ENGINE), on_decision=decided)
    simulate(noisy(requests_per_s), service_settings(options), first, planner)
    return late


LARGE = {**ENGINE, "profile": "h100_sxm-Llama-3.3-70B-Instruct-FP8-tp2", "tensor-parallel-size": 2}
LARGE_SLO = Slo(ttft_ms=2000.0 * SLOWNESS, itl_ms=40.0 * SLOWNESS)
FEW, LONG_S, KNOWN_S = 1.5, 2400.0, 600.0
"""Requests/s of independent clients, at a size's edge: 45 in an interval, give or take 7."""


def independent(seed: int) -> Iterator[TracedRequest]:
    """Requests of clients that know nothing of each other."""
    draws, at_s = random.Random(seed), 0.0
    while (at_s := at_s + draws.expovariate(FEW)) < LONG_S:
        yield TracedRequest(at_s, 3000, 150)


@pytest.mark.parametrize("seed", [1, *(pytest.param(each, marks=in_torture) for each in range(2, 20))])
def test_what_chance_makes_of_a_constant_load_lets_no_worker_of_two_gpus_come_and_go(seed: int) -> None:
    """Those leave that a backtest does not need; one may come."""
    late: list[str] = []

    def decided(_: PlannerState, seen: Observation, decision: Decision, __: PlannerState) -> None:
        current, desired = decision.current, decision.desired
        if seen.at_s > KNOWN_S and (desired.prefill > current.prefill or desired.decode > current.decode):
            late.append(f"{seen.at_s:g} s: {decision.current} -> {decision.desired}: {decision.reason}")

    sizes = {f"{role}-engine-num-gpu": 2 for role in ("prefill", "decode")}
    settings = settings_of(
        {
            "policy": "sla",
            "profile-results-dir": LARGE["profile"],
            "max-gpu-budget": GPUS,
            "ttft": LARGE_SLO.ttft_ms,
            "itl": LARGE_SLO.itl_ms,
            **sizes,
        }
    )
    options = SimulateOptions("", gpus=GPUS, startup_time_s=60.0, slo=LARGE_SLO, engine=LARGE)
    model = build_sla_model(settings, LARGE)
    planner = PlannerPolicy("sla", settings, model, on_decision=decided)
    simulate(independent(seed), service_settings(options), PoolSizes(1, 1), planner)
    assert len(late) <= 1, late


@pytest.mark.parametrize("first", [PoolSizes(0, 1), PoolSizes(1, 1)], ids=["aggregated", "disaggregated"])
@pytest.mark.parametrize(
    "workers",
    [
        1,
        2,
        5,
        pytest.param(8, marks=pytest.mark.slow),
        *(pytest.param(each, marks=in_torture) for each in (3, 4, 6, 7)),
    ],
)
def test_a_constant_load_with_noise_changes_nothing_after_settling(workers: int, first: PoolSizes) -> None:
    assert changes("sla", workers * WORTH_OF_A_WORKER, first) == []
