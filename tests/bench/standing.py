"""A policy beside every number of workers that stands still, known only afterwards: is it dominated?

What comes before ``KNOWN_FROM_S`` does not count: nobody can know anything of a traffic before it was seen.
A split that stands still *dominates* when it has more than ``POINTS`` more of the requests within both
targets at no more GPU-hours, or as many of them at more than ``SAVED`` fewer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from unittest.mock import patch

from dynaplan.contract.store_keys import SCALED_ROLES
from dynaplan.graph.lifecycle import Role
from dynaplan.lab.simulate import policy_runs
from dynaplan.lab.simulate.options import SimulateOptions
from dynaplan.simulation.run import Result
from dynaplan.simulation.simulated_service import ServiceSettings
from tests.bench.autoscalers import run_policy

KNOWN_FROM_S = 900.0
POINTS = 0.02
SAVED = 0.1


@dataclass(frozen=True)
class Fared:
    """The part of the requests within both targets, mean GPUs, and changes of a pool's size per hour."""

    policy: str
    met: float
    gpus: float
    changes_per_hour: float = 0.0

    def dominates(self, other: Fared) -> bool:
        """Tell whether this one is clearly better in one of both, and no worse in the other."""
        is_better = self.met > other.met + POINTS and self.gpus <= other.gpus + 1e-6
        return is_better or (self.met >= other.met and self.gpus < (1 - SAVED) * other.gpus)

    def __str__(self) -> str:
        return f"{self.policy}: {self.met:.1%}, {self.gpus:.2f} GPUs, {self.changes_per_hour:.0f} changes/h"


def fared(options: SimulateOptions, policy: str) -> Fared:
    """Simulate the options' trace under the policy."""
    return judged(run_policy(options, policy), policy)


def judged(result: Result, name: str) -> Fared:
    """Return how a simulation fared once something could be known."""
    windows = result.outcome.windows
    counted = [each for index, each in enumerate(windows) if index * windows.width_s >= KNOWN_FROM_S]
    requests = sum(each.requests for each in counted)
    met = sum(each.both_met for each in counted) / max(requests, 1)
    changes = sum(
        each.after.of(role) != each.before.of(role)
        for each in result.events
        if each.at_s >= KNOWN_FROM_S
        for role in SCALED_ROLES
    )
    hours = (result.trace_s - KNOWN_FROM_S) / 3600
    return Fared(name, met, _mean_gpus(result), changes / hours)


def _mean_gpus(result: Result) -> float:
    moments = [(each.at_s, each.gpus) for each in result.fleet] + [(result.trace_s, 0.0)]
    gpu_s = sum(
        gpus * max(0.0, min(end_s, result.trace_s) - max(at_s, KNOWN_FROM_S))
        for (at_s, gpus), (end_s, _) in pairwise(moments)
    )
    return gpu_s / (result.trace_s - KNOWN_FROM_S)


def best_standing(options: SimulateOptions, gpus: float) -> Fared | None:
    """Return the split that met most with exactly as many GPUs as fit into these; None where none does.

    The likely ones are tried first, two prefill workers for each decode worker; none is better than all met.
    """
    return _best_standing(_Deployment(options), int(gpus + 1e-6))


def dominating(options: SimulateOptions, ours: Fared) -> Fared | None:
    """Return a split that stands still and dominates, the one that met most; None where there is none.

    Fewer GPUs are never better, so of each of both conditions the largest number of GPUs is tried only.
    """
    for gpus in (ours.gpus, (1 - SAVED) * ours.gpus - 1e-6):
        best = best_standing(options, gpus)
        if best and best.dominates(ours):
            return best
    return None


@contextmanager
def engines_at(speed: float) -> Iterator[None]:
    """Have simulations run engines that are that many times as fast as the profile that planners know."""
    found = policy_runs.service_settings

    def settings(options: SimulateOptions) -> ServiceSettings:
        service = found(options)
        engines = {role: (own, timing.with_speedup(speed)) for role, (own, timing) in service.engines.items()}
        return replace(service, engines=engines)

    _best_standing.cache_clear()
    try:
        with patch.object(policy_runs, "service_settings", settings):
            yield
    finally:
        _best_standing.cache_clear()


class _Deployment:
    """Options without what a number that stands still does not depend on, to be remembered by."""

    def __init__(self, options: SimulateOptions) -> None:
        self.options = replace(options, planner={}, policies=(), first=None, startup_time_s=0.0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Deployment) and self.options == other.options

    def __hash__(self) -> int:
        return hash((self.options.trace, self.options.seed))


@cache
def _best_standing(deployment: _Deployment, gpus: int) -> Fared | None:
    options = deployment.options
    sizes = policy_runs.service_settings(options).gpus_per_worker
    most = gpus // sizes[Role.DECODE] if options.is_disaggregated else 0
    numbers = range(1, most + 1) if options.is_disaggregated else [gpus // sizes[Role.DECODE]]
    splits = []
    for decode in numbers:
        prefill, left = divmod(gpus - decode * sizes[Role.DECODE], sizes.get(Role.PREFILL, gpus + 1))
        if decode and left < min(sizes.values()) and bool(prefill) == options.is_disaggregated:
            splits.append((prefill, decode))
    best = None
    for prefill, decode in sorted(splits, key=lambda split: abs(split[0] - 2 * split[1])):
        each = fared(options, f"static:{prefill},{decode}" if prefill else f"static:{decode}")
        best = max(best, each, key=lambda found: found.met) if best else each
        if best.met == 1:
            break
    return best
