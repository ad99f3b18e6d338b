"""The best static deployment: the split of workers that a trace needed, known only afterwards.

The yardstick of a policy that scales: of all splits that keep the promise the one with the fewest GPU-hours,
and where none does within the GPUs, the one with most requests in time. Both are found by simulating splits.

A worker that stands still holds its GPUs all the time, so the splits are in the order of their GPU-hours
before any is simulated. Each number of prefill workers has one row of splits, by their decode workers:

1. Splits with more GPUs than the best that keeps the promise are not tried, so each row ends where it costs
   as much as that one. A split that costs as much is tried: it may have more requests in time.
2. The end of a row is tried first. Where it does not keep the promise, no split of the row does.
3. Where it does, the least number of decode workers that keeps it is found by bisection.

Steps 2 and 3 take for granted that decode workers never make a row worse. Queues hold to it but for chance: a
split that keeps the promise by a few requests, while one with more workers does not, may be left out.
Of 16 GPUs some 5 to 20 splits are tried.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from dynaplan.config.settings.planner import SlaTargets
from dynaplan.contract.counts import PoolSizes
from dynaplan.graph.lifecycle import Role
from dynaplan.simulation.run import Result
from dynaplan.simulation.simulated_service import ServiceSettings

BEST_STATIC = "best-static"
"""The name of the policy."""


@dataclass(frozen=True)
class TriedSplit:
    """Numbers of workers, the GPUs that they hold, the result, and whether it keeps the promise."""

    workers: PoolSizes
    gpus: int
    result: Result
    is_promise_kept: bool

    @property
    def attainment(self) -> float:
        """The part of all requests, 0 to 1, that met both targets."""
        return self.result.outcome.attainment(self.result.outcome.both_met)

    @property
    def gpu_hours(self) -> float:
        """The GPU-hours until the last arrival."""
        return self.result.gpu_hours

    def __str__(self) -> str:
        """Return the split as ``static:P,D`` and ``static:N`` have it."""
        return ",".join(str(count) for count in (self.workers.prefill, self.workers.decode) if count)


@dataclass(frozen=True)
class BestStatic:
    """The best split, and all that were simulated, in their order."""

    best: TriedSplit
    tried: tuple[TriedSplit, ...]

    def summarize(self, promise: SlaTargets, gpus: int) -> Result:
        """Return the result of the best split under its name; its note says whether it keeps the promise."""
        best, number = self.best, len(self.tried)
        ttft, itl = promise.ttft_percentile, promise.itl_percentile
        shares = f"TTFT for {ttft:g} %, ITL for {itl:g} % of the requests"
        if best.is_promise_kept:
            found = f"has the fewest GPU-hours of the splits that keep the promise ({shares})"
        else:
            found = f"has most requests in time; with {gpus} GPUs no split keeps the promise ({shares})"
        note = f"{BEST_STATIC}: {best} {found}. Splits simulated: {number}."
        return replace(best.result, policy=f"{BEST_STATIC}:{best}", note=note)


def find_best_static(
    simulate_split: Callable[[PoolSizes], Result], settings: ServiceSettings, promise: SlaTargets
) -> BestStatic:
    """Return the best split of the deployment's GPUs, which have to be enough for one worker of each role.

    ``simulate_split`` runs these workers, and no others, through the whole load.
    """
    sizes, most_gpus = settings.gpus_per_worker, settings.gpus
    prefill_gpus, decode_gpus = sizes.get(Role.PREFILL, 0), sizes[Role.DECODE]
    tried: list[TriedSplit] = []

    def keeps(prefill: int, decode: int) -> bool:
        workers = PoolSizes(prefill, decode)
        result = simulate_split(workers)
        gpus = prefill * prefill_gpus + decode * decode_gpus
        tried.append(TriedSplit(workers, gpus, result, result.outcome.keeps(promise)))
        return tried[-1].is_promise_kept

    rows = range(1, 1 + (most_gpus - decode_gpus) // prefill_gpus) if prefill_gpus else [0]
    for prefill in rows:
        most_decode = (most_gpus - prefill * prefill_gpus) // decode_gpus
        if most_decode > 0 and keeps(prefill, most_decode):
            decode = _bisect(partial(keeps, prefill), most_decode)
            most_gpus = prefill * prefill_gpus + decode * decode_gpus
    return BestStatic(min(tried, key=_rank), tuple(tried))


def _bisect(holds: Callable[[int], bool], most: int) -> int:
    """Return the least number from 1 on for which ``holds`` is true, as it is for ``most``."""
    failing = 0
    while most - failing > 1:
        middle = (failing + most) // 2
        if holds(middle):
            most = middle
        else:
            failing = middle
    return most


def _rank(split: TriedSplit) -> tuple[bool, int, float, int]:
    """Return a key by which the best split is the least, as the module says."""
    price = split.gpus if split.is_promise_kept else 0
    return not split.is_promise_kept, price, -split.attainment, split.gpus
