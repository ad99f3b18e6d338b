"""The number of workers that a demand needs, by the queueing model (``sizing: queueing``).

**Criterion.** The smallest numbers with which both targets hold: chance(ITL > target) and chance(TTFT >
target) are at most the allowed parts, 1 - percentile / 100.

1. *Decode workers first*: the smallest number that is not overloaded, keeps the ITL, and would keep the
   TTFT if no prompt waited for a prefill worker: only then can prefill workers do the rest.
2. *Prefill workers* then: the smallest number, with these decode workers, that keeps the TTFT.

Aggregated services need step 1 only, with the TTFT of the aggregated workers. More workers are never worse
in the model, so the search may halve (``limits.py``).

**A target that nobody can meet**, because a request alone on an engine exceeds it, is replaced by 1.1 times
the time of a request alone, at the same percentile: otherwise the whole budget would be spent for nothing.

**More than the GPUs.** Cutting both numbers by the same factor would not do: the fewer workers a role
needs, the more of its capacity is reserve, so half of them carry less than half of the demand. So the
largest part of the demand is sought (by halving) whose workers fit the budget: these come first, and what
is left goes to the role that lacks most (``limits.py``).
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

from dynaplan.config.settings.planner import SlaTargets
from dynaplan.contract.counts import PoolSizes
from dynaplan.planner.model import DecisionStep, Demand, Prediction, Sizing, WorkerLimits
from dynaplan.planner.sizing.limits import find_smallest, raise_to, within_limits
from dynaplan.planner.sizing.queueing.queueing_model import QueueingModel, SteadyState

DEMAND_BISECTIONS = 6
"""Halvings of the demand, until the part of it that the budget can carry is known to 1.6 %."""

UNLOADED_MARGIN = 1.1
"""Factor on a request's time alone that replaces an unreachable target."""


def size_pools(
    service: QueueingModel, demand: Demand, targets: SlaTargets, limits: WorkerLimits, current: PoolSizes
) -> Sizing:
    """Return the workers that the demand needs within the limits, and why.

    No requests need the minimums. A demand that is not known (no lengths, not a number) changes nothing.
    """
    unknown = _unknown(demand)
    if unknown:
        why = f"no data: change nothing, because {unknown}"
        return Sizing(current, (DecisionStep("demand", current, current, why),))
    if demand.requests_per_s == 0:
        steps = [DecisionStep("demand", current, PoolSizes(), "no requests are expected: no demand")]
        allowed, bounds = within_limits(PoolSizes(), limits, current)
        return Sizing(allowed, (*steps, *bounds))
    return _size(SteadyState(service, demand), targets, limits, current)


def _size(state: SteadyState, targets: SlaTargets, limits: WorkerLimits, current: PoolSizes) -> Sizing:
    reachable, notes = _reachable(state, targets)
    steps = [DecisionStep("demand", current, current, _describe(state))]
    steps += [DecisionStep("targets", current, current, note) for note in notes]
    wanted = _workers(state, reachable)
    after = replace(current, prefill=0 if state.is_aggregated else current.prefill, decode=wanted.decode)
    steps.append(DecisionStep("decode", current, after, _why_decode(state, reachable, wanted.decode)))
    if not state.is_aggregated:
        steps.append(DecisionStep("prefill", after, wanted, _why_prefill(state, reachable, wanted)))
    if _is_scarce(wanted, limits):
        limits, note = _largest_share_minimums(state, reachable, limits)
        steps.append(DecisionStep("scarcity", wanted, wanted, note))
    allowed, bounds = within_limits(wanted, limits, current)
    return Sizing(allowed, (*steps, *bounds), partial(_prediction, state, targets, allowed))


def _workers(state: SteadyState, targets: SlaTargets) -> PoolSizes:
    """Return the fewest workers with which both targets hold."""
    decode = find_smallest(lambda workers: _decode_meets(state, targets, workers), 1)
    if state.is_aggregated:
        return PoolSizes(0, decode)
    prefill = find_smallest(
        lambda workers: (
            state.chance_of_ttft_over(targets.ttft_ms, PoolSizes(workers, decode)) <= targets.ttft_rest
        ),
        _min_prefill(state),
    )
    return PoolSizes(prefill, decode)


def _min_prefill(state: SteadyState) -> int:
    """Return the fewest prefill workers that compute prompts as fast as they come."""
    return max(1, math.ceil(state.prefill_waiting(1).utilisation))


# -- more than there is -----------------------------------------------------------------------------------


def _is_scarce(wanted: PoolSizes, limits: WorkerLimits) -> bool:
    """Tell whether the wanted workers exceed the budget while the minimums do not."""
    enough = limits.cap(raise_to(wanted, limits.least))
    return limits.gpus(enough) > limits.max_gpus >= limits.gpus(limits.cap(limits.least))


def _largest_share_minimums(
    state: SteadyState, targets: SlaTargets, limits: WorkerLimits
) -> tuple[WorkerLimits, str]:
    """Return limits whose minimums keep the promises to the largest part of the demand, and a note on it."""
    low, high, least = 0.0, 1.0, limits.least
    for _ in range(DEMAND_BISECTIONS):
        part = (low + high) / 2
        workers = limits.cap(raise_to(_workers(state.part(part), targets), limits.least))
        if limits.gpus(workers) <= limits.max_gpus:
            low, least = part, workers
        else:
            high = part
    note = f"{least} keep the promises for {low:.0%} of this demand: they come first"
    return replace(limits, least=least), note


def _decode_meets(state: SteadyState, targets: SlaTargets, workers: int) -> bool:
    """Tell whether that many decode workers keep the ITL, and leave the TTFT within reach."""
    decoding = state.decode_batch(workers)
    if decoding.overload:
        return False
    if decoding.chance_of_itl_over(targets.itl_ms) > targets.itl_rest:
        return False
    return state.min_chance_of_ttft_over(targets.ttft_ms, workers) <= targets.ttft_rest


def _reachable(state: SteadyState, targets: SlaTargets) -> tuple[SlaTargets, list[str]]:
    """Return the targets, with those replaced that no number of workers meets, and a note on each."""
    idle, one = state.idle(), PoolSizes(1, 1)
    is_ttft = idle.chance_of_ttft_over(targets.ttft_ms, one) <= targets.ttft_rest
    is_itl = idle.decode_batch(1).chance_of_itl_over(targets.itl_ms) <= targets.itl_rest
    if is_ttft and is_itl:
        return targets, []
    alone, notes = idle.predict(one, targets), []
    if not is_ttft:
        notes.append(_unreachable("TTFT", alone.ttft_ms, targets.ttft_percentile, targets.ttft_ms))
        targets = replace(targets, ttft_ms=UNLOADED_MARGIN * alone.ttft_ms)
    if not is_itl:
        notes.append(_unreachable("ITL", alone.itl_ms, targets.itl_percentile, targets.itl_ms))
        targets = replace(targets, itl_ms=UNLOADED_MARGIN * alone.itl_ms)
    return targets, notes


def _prediction(state: SteadyState, targets: SlaTargets, workers: PoolSizes) -> Prediction | None:
    """Return what is expected of these workers; None where a role has none."""
    is_served = workers.decode > 0 and (state.is_aggregated or workers.prefill > 0)
    return state.predict(workers, targets) if is_served else None


# -- in words ------------------------------------------------------------------------------------------


def _unknown(demand: Demand) -> str:
    """Say what is missing of a demand, "" when nothing is."""
    if not (math.isfinite(demand.requests_per_s) and demand.requests_per_s >= 0):
        return "the expected number of requests is not known"
    if demand.requests_per_s and not (demand.isl.total and demand.osl.total):
        return "the lengths of the expected requests are not known"
    return ""


def _describe(state: SteadyState) -> str:
    answers = state.answers
    return (
        f"{state.demand.requests_per_s:.3g} requests/s of {state.prompts.mean_tokens:.0f} prompt tokens to "
        f"compute and {answers.mean_steps + 1:.0f} answer tokens, on average"
    )


def _unreachable(name: str, alone_ms: float, percentile: float, target_ms: float) -> str:
    return (
        f"a request alone has a {name} of {alone_ms:.3g} ms at the {percentile:g}th percentile, over the "
        f"target of {target_ms:g}: no number of workers meets it, so the aim is "
        f"{UNLOADED_MARGIN:g} times that"
    )


def _why_decode(state: SteadyState, targets: SlaTargets, workers: int) -> str:
    chosen = _describe_decode(state, targets, workers)
    if workers == 1:
        return f"with 1 worker {chosen}"
    fewer = _describe_decode(state, targets, workers - 1)
    return f"with {workers} workers {chosen}; with {workers - 1} {fewer}"


def _describe_decode(state: SteadyState, targets: SlaTargets, workers: int) -> str:
    decoding = state.decode_batch(workers)
    if decoding.overload:
        return decoding.overload
    late = decoding.chance_of_itl_over(targets.itl_ms)
    words = (
        f"{late:.1%} of the ITLs are over {targets.itl_ms:g} ms, {decoding.batch:.0f} requests in the batch"
    )
    if state.is_aggregated:
        words += (
            f", {decoding.chance_of_ttft_over(targets.ttft_ms):.1%} of the TTFTs over {targets.ttft_ms:g} ms"
        )
    return words


def _why_prefill(state: SteadyState, targets: SlaTargets, workers: PoolSizes) -> str:
    least = _min_prefill(state)

    def in_words(prefill: int) -> str:
        if prefill < least:
            return "prompts come faster than they are computed"
        late = state.chance_of_ttft_over(targets.ttft_ms, replace(workers, prefill=prefill))
        busy = state.prefill_waiting(prefill).utilisation
        return f"{late:.1%} of the TTFTs are over {targets.ttft_ms:g} ms, {busy:.0%} busy"

    if workers.prefill == 1:
        return f"with 1 worker {in_words(1)}"
    fewer = in_words(workers.prefill - 1)
    return f"with {workers.prefill} workers {in_words(workers.prefill)}; with {workers.prefill - 1} {fewer}"
