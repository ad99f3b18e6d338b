"""The recommendation of a recording: a deployment as it is, beside other policies and the best static split.

The promise is a condition and GPU-hours are the price: of all that kept the promise the cheapest is
recommended, and where nothing kept it, the one with most of its requests in time. A simulation is a model, so
the deployment stays as it is unless the difference is above a tolerance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dynaplan.config.settings.planner import SlaTargets
from dynaplan.simulation.best_static import BEST_STATIC
from dynaplan.simulation.run import Result

MAY_LOSE = 0.01
"""The part of the requests below which a difference in time is none."""
MAY_COST = 0.05
"""The part of the GPU-hours below which a difference is none; likewise."""

CANDIDATES = ("load", "sla", BEST_STATIC)
"""The policies that are tried beside the one that a deployment has."""


@dataclass(frozen=True)
class PolicyRecommendation:
    """The policy that a recording recommends, or the deployment's own where none is better; why, in words."""

    policy: str
    words: str
    results: Sequence[Result]


def tried_beside(own: str) -> tuple[str, ...]:
    """Return the deployment's own policy and the others that are tried."""
    return own, *(each for each in CANDIDATES if each != own)


def recommendation(results: Sequence[Result], promised: SlaTargets) -> PolicyRecommendation:
    """Return what the results recommend; the first is that of the deployment as it is."""
    own, kept = results[0], [each for each in results if each.outcome.keeps(promised)]
    if kept:
        best = min(kept, key=lambda each: each.gpu_hours)
        is_better = not own.outcome.keeps(promised) or best.gpu_hours < own.gpu_hours * (1 - MAY_COST)
        told = "keeps the promise"
    else:
        best = max(results, key=_in_time)
        is_better = _in_time(best) > _in_time(own) + MAY_LOSE
        told = "keeps the promise least badly; nothing that was tried keeps it"
    if not is_better:
        words = f"stay with {own.policy}: {_figures(own)}. Nothing else is better"
        return PolicyRecommendation(own.policy, words, results)
    words = f"{how_to(best.policy)}: {_figures(best)}, where {own.policy} had {_figures(own)}. It {told}"
    return PolicyRecommendation(best.policy, words, results)


def how_to(policy: str) -> str:
    """Say what a user sets to have that policy."""
    kind, _, workers = policy.partition(":")
    if kind != BEST_STATIC:
        return f"set --Planner.policy={kind}"
    *prefill, decode = workers.split(",")
    split = f"{prefill[0]} prefill and {decode} decode" if prefill else decode
    return f"stop scaling and keep {split} workers"


def _figures(result: Result) -> str:
    return f"{_in_time(result):.1%} in time with {_mean_gpus(result):.1f} GPUs"


def _in_time(result: Result) -> float:
    return result.outcome.attainment(result.outcome.both_met)


def _mean_gpus(result: Result) -> float:
    return result.gpu_hours * 3600 / result.trace_s if result.trace_s else 0.0
