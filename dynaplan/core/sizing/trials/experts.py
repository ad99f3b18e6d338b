"""Experts on how many workers to have, and what each would have cost: GPU time, and requests that were late.

For each split of a box's GPUs there are two: one stands still at it, one follows the forecast and is never
below it. The smallest that follows is *following alone*, the policy without a hedge. Each interval all are
run with the arrivals of its metric pulls through the fluid model of ``standing.py``, whatever the real
workers were:

    cost = GPUs held x interval + price x late                         GPU-seconds
    late = prompts over the TTFT + requests over the ITL whose prompt was not

Workers that an expert adds hold their GPUs at once and serve a start-up time later: that is the price of
changing. Prompts that can no longer be in time give way to the others, as with ``prefill-deadline``; with
the order of arrival more are late than it says. Aggregated workers keep that order.

**Price of a late request.** g is the GPU time that a request takes of fully used workers of both roles, r the
part that may be late (``ttft-percentile``, ``itl-percentile``). A worker pays for its GPU time where it is
needed more than r / (1 - r) of the time, the critical ratio of the newsvendor (Arrow, Harris and Marschak,
"Optimal inventory policy", 1951), if

    price = g (1 - r) / r  x  max(1, late part lately / r)

where "lately" counts what the same expert would have made late: one that breaks the promise pays for a late
request as many times as it breaks it, as a constraint's multiplier does.

**Trust** is that of ``regret.py``, so the workers that are asked for cost no more than any one expert but
for its bound, if two things hold: lateness is convex in the workers (each one more helps no more than the
one before; exact for prompts by deadline), and what the experts would have cost is what the model says.

**Constants.** First odds: of K experts following alone has all but 1 / K. First doubt: the GPU-seconds of the
whole box in a start-up time and an interval, the most that a wrong size costs before it can be mended. So
what leads away from following has to have saved as much. Nothing was fitted to a trace.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from dynaplan.core.sizing.fluid import Work, decoded, queued, queued_by_deadline
from dynaplan.core.sizing.gpu_budget import at_least
from dynaplan.core.sizing.trials.regret import gap, weights
from dynaplan.domain.planning.sizing import ExpertTrial, Hedge, SlaTargets, WorkerLimits
from dynaplan.domain.planning.targets import Targets

MOST_TRIED = 64
"""The largest number of workers of a role that is tried."""


def _tried_numbers(least: int, most: int) -> list[int]:
    """Return all numbers up to 8, and above it those of three significant bits: 10, 12, 14, 16, 20, ..."""
    every = range(max(1, least), min(most, MOST_TRIED) + 1)
    return [number for number in every if number % 2 ** max(0, number.bit_length() - 3) == 0]


@dataclass(frozen=True)
class ExpertPanel:
    """The experts of a box, following alone first. ``limits`` have the GPUs of all of it."""

    limits: WorkerLimits
    is_aggregated: bool

    @cached_property
    def experts(self) -> list[tuple[Targets, bool]]:
        """The workers of each, and whether it follows."""
        limits, least = self.limits, self.limits.least
        most = limits.max_gpus // limits.prefill_gpus
        prefills = [0] if self.is_aggregated else _tried_numbers(least.prefill, most)
        decodes = _tried_numbers(least.decode, limits.max_gpus // limits.decode_gpus)
        every = [Targets(prefill, decode) for prefill in prefills for decode in decodes]
        splits = [split for split in every if limits.gpus(split) <= limits.max_gpus]
        return [(split, follows) for follows in (True, False) for split in splits]

    @property
    def odds(self) -> list[float]:
        """The first weights: of K experts the others have 1 / K together."""
        others = len(self.experts) - 1
        each = 1 / (others + 1) / others
        return [1 - others * each, *[each] * others]

    def trials(self, hedge: Hedge) -> list[ExpertTrial]:
        """Return the trials of these experts; one that is tried for the first time begins as the first."""
        known = {(each.workers, each.follows): each for each in hedge.trials}
        alone = known.get(self.experts[0], ExpertTrial())
        return [known.get(key, replace(alone, workers=key[0], follows=key[1])) for key in self.experts]

    def trust(self, hedge: Hedge) -> list[float]:
        """Return the weight of each expert, 1 in all."""
        costs = [trial.cost_gpu_s for trial in self.trials(hedge)]
        return weights(costs, self.odds, hedge.doubt_gpu_s)


def wants(expert: ExpertTrial, wish: Targets) -> Targets:
    """Return the workers that the expert wants while the forecast needs those of ``wish``."""
    return at_least(expert.workers, wish) if expert.follows else expert.workers


@dataclass(frozen=True)
class Arrived:
    """An interval: the requests that came in each of its pulls, and their work; None where none came."""

    interval_s: float
    startup_s: float
    requests: float = 0.0
    arrivals: Sequence[float] = ()
    work: Work | None = None

    @property
    def pull_s(self) -> float:
        """The seconds of a metric pull."""
        return self.interval_s / len(self.arrivals)

    def serving(self, wishes: Sequence[int]) -> list[int]:
        """Return the workers that serve in each pull where these numbers were asked for, the newest last.

        A worker serves that was wanted all through the start-up time before.
        """
        backs = (
            math.ceil(max(0.0, self.startup_s - pull * self.pull_s) / self.interval_s)
            for pull in range(len(self.arrivals))
        )
        return [min(wishes[-1 - back :] if back < len(wishes) else wishes) for back in backs]


def tried(
    before: Hedge, panel: ExpertPanel, came: Arrived, targets: SlaTargets, fade: float, first_doubt: float
) -> Hedge:
    """Return the hedge after an interval; sums fade by ``fade``, ``first_doubt`` is in GPU-seconds."""
    before = replace(
        before, trials=tuple(panel.trials(before)), doubt_gpu_s=max(first_doubt, before.doubt_gpu_s)
    )
    trusted = panel.trust(before)
    fared: list[tuple[ExpertTrial, float, float]]
    if came.work is None:
        fared = [(replace(each, queue=0.0, in_time=0.0, decoding=0.0), 0.0, 0.0) for each in before.trials]
    else:
        fared = _Interval(before, came, came.work).fared()
    each_gpu_s = came.work.request_gpu_s(panel.limits) if came.work else 0.0
    costs, after = [], []
    for trial, late, long in fared:
        held = panel.limits.gpus(wants(trial, before.followed[-1])) * came.interval_s
        cost = held + each_gpu_s * priced(trial, before.requests, late, long, targets)
        costs.append(cost)
        after.append(
            replace(
                trial,
                cost_gpu_s=fade * trial.cost_gpu_s + cost,
                late=fade * trial.late + late + long,
            )
        )
    doubt = fade * before.doubt_gpu_s + gap(trusted, costs, panel.odds, before.doubt_gpu_s)
    return replace(
        before,
        trials=tuple(after),
        doubt_gpu_s=max(first_doubt, doubt),
        seconds=fade * before.seconds + came.interval_s,
        requests=fade * before.requests + came.requests,
    )


def priced(trial: ExpertTrial, requests: float, late: float, long: float, targets: SlaTargets) -> float:
    """Return the price of requests over the TTFT and of others over the ITL, in GPU times of a request."""
    share = trial.late / requests if requests else 0.0
    return sum(
        missed * (1 - rest) / rest * max(1.0, share / rest)
        for missed, rest in ((late, targets.ttft_rest), (long, targets.itl_rest))
    )


class _Interval:
    """An interval that all experts are run through; those with the same prefill workers share their queue."""

    def __init__(self, before: Hedge, came: Arrived, work: Work) -> None:
        self._trials = before.trials
        self._came = came
        self._work = work
        self._prompts_per_s = work.prompts_per_s
        self._room_s = work.room_s
        self._prefill = came.serving([each.prefill or each.decode for each in before.followed])
        self._decode = came.serving([each.decode for each in before.followed])
        self._queues: dict[tuple[int, bool, float], tuple[float, float, float, list[float]]] = {}

    def fared(self) -> list[tuple[ExpertTrial, float, float]]:
        """Return each trial after the interval, and its requests over the TTFT, and over the ITL alone."""
        return [self._fared(trial) for trial in self._trials]

    def _fared(self, trial: ExpertTrial) -> tuple[ExpertTrial, float, float]:
        key = (trial.workers.prefill or trial.workers.decode, trial.follows, trial.queue)
        if key not in self._queues:
            self._queues[key] = self._queue(trial, key[0])
        queue, in_time, late, out = self._queues[key]
        decoding, long = self._decoding(trial, out)
        long *= 1 - min(1.0, late / self._came.requests)
        return replace(trial, queue=queue, in_time=in_time, decoding=decoding), late, long

    def _serving(self, served: Sequence[int], number: int, *, follows: bool) -> list[int]:
        return [max(number, each) for each in served] if follows else [number] * len(served)

    def _queue(self, trial: ExpertTrial, number: int) -> tuple[float, float, float, list[float]]:
        queue, in_time, late, out = trial.queue, trial.in_time, 0.0, []
        pull_s, room_s = self._came.pull_s, self._room_s
        serving = self._serving(self._prefill, number, follows=trial.follows)
        for arrived, workers in zip(self._came.arrivals, serving, strict=True):
            per_s = workers * self._prompts_per_s
            after, part = queued(queue, arrived, pull_s, per_s, room_s)
            in_time, over = queued_by_deadline(in_time, arrived, pull_s, per_s, room_s)
            late += over if trial.workers.prefill else part * arrived
            out.append(queue + arrived - after)
            queue = after
        return queue, in_time, late, out

    def _decoding(self, trial: ExpertTrial, came: Sequence[float]) -> tuple[float, float]:
        decoding, long, pull_s, work = trial.decoding, 0.0, self._came.pull_s, self._work
        serving = self._serving(self._decode, trial.workers.decode, follows=trial.follows)
        for arrived, workers in zip(came, serving, strict=True):
            busy = 0.0 if trial.workers.prefill else arrived / pull_s / self._prompts_per_s / workers
            decoding, part = decoded(decoding, arrived, pull_s, workers, work, busy)
            long += part * arrived
        return decoding, long
