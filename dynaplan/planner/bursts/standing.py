"""A floor learnt from bursts: the fewest workers that, standing still, would have kept the promise lately.

A forecast knows nothing of a burst before it begins, and a worker that is asked for then serves when it is
over. So for every number of workers from 1 on it is computed how many of the requests that came would have
been late with that number all the time. The fewest with which no more were late than promised are the floor:
no decision goes below it (``learnt-floor``, off unless it is switched on).

**Symbols.** n workers; a arrivals in a metric pull of d seconds; q load of the n workers, carried on; T, D,
own, F, S as in ``workload.py``; target and promise of each role: prefill the TTFT, decode the ITL.

**Prefill.** A fluid queue, first come first served: q <- max(0, q + a - n u d). The wait of an arrival is
the queue before it over n u, so of the arrivals of a pull the part is late whose wait is more than the target
leaves:

    u     = B / (F + B m)             prompts/s of a worker at its largest batch (``prefill_model.py``)
    room  = target - F - m - transfer - 2.5 steps of half the ITL target, at least 0

**Decode.** q requests decode at once, a step takes x(q) = D(q / n, q ctx / n). An answer goes through k
stages of E[S] / k steps each, as Erlang's distribution does:

    k     = E[S]^2 / Var[S]           a whole number from 1 to 8
    q(1)  <- q(1) e + a (1 - e) / r,  r = d k / (E[S] x),  e = exp(-r);     what leaves goes to q(2), ...

Here a are the prompts that come out of the prefill queue: of the fewest prefill workers that keep the TTFT,
or of all that the GPUs hold beside the n decode workers, where these are fewer.
With one stage an answer may end as soon as it has begun; where all are equally long the number that decodes
rises for the whole life of an answer, and its crest is half as high again. An answer is too slow when the
mean of its steps is over the target, which is known when it leaves. Chance is added: the normal number of
requests of ``long_by_chance``. What exceeds slots and KV cache waits: full workers go on at their rate, and
the arrivals are late.

**Aggregated** workers compute u = 1 / (F + m) prompts/s. Beside requests that decode a prompt takes f + m
(``queueing/decode_model.py``): F is paid in its first step, whose decoding has a fixed part of its own. So
their steps take

    x = D(q / n, q ctx / n) / (1 - a (f + m) / (d n))

as if each prompt began in a step of its own, and the larger of the late and the too slow ones counts.

**Memory.** Of each number and role the load and the late requests, both faded by exp(-t / window) with the
window of the error budget (``slo-window``): no arrivals are kept. Nothing is learnt without arrivals by
pull (Prometheus as the source, a deployment without requests), nor with a window of 0.

**Constants.** None of its own: times come from the profile, the promise and the window are options.

**Where it is wrong.** It is a fluid: below its capacity nobody waits, where chance and batches make some
wait. Dispatch by deadline (``events/dispatch_order.py``) has fewer late than it says. Compared with
simulations of an order of arrival, two families, one to three workers: part in time 0.09, 0.24, 1.00 and
0.08, 0.41, 1.00 by the fluid, 0.08, 0.16, 1.00 and 0.08, 0.38, 1.00 simulated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from dynaplan.config.settings.planner import SlaTargets
from dynaplan.fleet.counts import Targets
from dynaplan.planner.bursts.fluid import Work, decoded, queued
from dynaplan.planner.bursts.memory import Standing, StandingTrial
from dynaplan.planner.model import Demand, WorkerLimits
from dynaplan.planner.sizing.queueing.queueing_model import ServiceModel, SteadyState


def tried(
    before: Standing,
    arrivals: Sequence[float],
    service: ServiceModel,
    demand: Demand,
    targets: SlaTargets,
    window_s: float,
    interval_s: float,
    limits: WorkerLimits,
) -> Standing:
    """Return the trials after an interval with these arrivals in equal pulls; as many as the GPUs hold."""
    work = Work(SteadyState(service, demand), targets)
    fade, pull_s = math.exp(-interval_s / window_s), interval_s / len(arrivals)
    is_aggregated = service.prefill is None
    requests = fade * before.requests + sum(arrivals)
    prefill, computed = [], []
    most = limits.max_gpus // limits.decode_gpus
    fitting = most if is_aggregated else limits.max_gpus // limits.prefill_gpus
    for number, each in enumerate(_known(before.prefill, fitting), 1):
        load, late, out = each.load, fade * each.late, []
        for arrived in arrivals:
            after, part = queued(load, arrived, pull_s, number * work.prompts_per_s, work.room_s)
            out.append(load + arrived - after)
            load, late = after, late + part * arrived
        prefill.append(StandingTrial(load, late))
        computed.append(out)
    enough = _fewest(prefill, targets.ttft_rest * requests)
    decode = []
    for number, each in enumerate(_known(before.decode, most), 1):
        late, decoding = fade * each.late, each.decoding
        beside = number if is_aggregated else min(enough, _prefill_beside(number, limits))
        for arrived in computed[beside - 1]:
            decoding, long = decoded(decoding, arrived, pull_s, number, work)
            late += long
        decode.append(StandingTrial(decoding.total, late, decoding))
    return Standing(requests, tuple(prefill), tuple(decode))


def _prefill_beside(decode: int, limits: WorkerLimits) -> int:
    """Return the most prefill workers that the GPUs hold beside that many decode workers, at least 1."""
    return max(1, (limits.max_gpus - decode * limits.decode_gpus) // limits.prefill_gpus)


def _known(trials: Sequence[StandingTrial], count: int) -> list[StandingTrial]:
    """Return as many trials; a number that is tried for the first time has missed nothing yet."""
    return [*trials[:count], *[StandingTrial()] * (count - len(trials))]


def _fewest(trials: Sequence[StandingTrial], may_be_late: float) -> int:
    """Return the fewest workers with which no more were late, the most that were tried where none are."""
    enough = (number for number, each in enumerate(trials, 1) if each.late <= may_be_late)
    return next(enough, len(trials))


def learnt_floor(
    trials: Standing, targets: SlaTargets, limits: WorkerLimits, *, is_aggregated: bool = False
) -> Targets:
    """Return the cheapest workers with which no more requests were late than promised; none without requests.

    Where nothing that fits the GPUs keeps the promise, it is the cheapest that is hardly worse than the best:
    by no more than the promised part, and no more than twice as many over the promise.
    """
    if not trials.requests or not trials.decode:
        return Targets()
    ttft, itl = (
        [max(0.0, each.late - rest * trials.requests) for each in role]
        for role, rest in ((trials.prefill, targets.ttft_rest), (trials.decode, targets.itl_rest))
    )
    if is_aggregated:
        over = {Targets(0, number + 1): max(late) for number, late in enumerate(zip(ttft, itl, strict=True))}
    else:
        over = {
            Targets(prefill + 1, decode + 1): late + long
            for prefill, late in enumerate(ttft)
            for decode, long in enumerate(itl)
        }
    fitting = {split: late for split, late in over.items() if limits.gpus(split) <= limits.max_gpus}
    least = min(fitting.values(), default=0.0)
    hardly_worse = least + min(least, targets.ttft_rest * trials.requests)
    good = (split for split, late in fitting.items() if late <= hardly_worse)
    return min(good, key=lambda split: (limits.gpus(split), fitting[split]), default=Targets())
