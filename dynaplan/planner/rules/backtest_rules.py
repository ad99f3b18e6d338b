"""What the last backtest makes of a size: who leaves, and who is added for a load that was seen before.

| the present load, beside what the backtest saw | the workers |
|---|---|
| no answer yet | as many as there are, and those that the forecast adds |
| above: it has outgrown the window | likewise, and no fewer than the answer |
| below: it has ended | those of the forecast; none leaves if something objects |
| within | the answer; none leaves unless the answer is of this interval and nothing objects |
| within, and no more than a part of the peak can come | that part of the answer, unless something objects |

Where the GPUs do not hold that, an answer that has them all goes first: it was simulated under scarcity.
Else it is what the forecast needs, for a load above, or the answer.

Objections: workers that fail, a backtest that was not computed, and workers that failed within its window.
"""

from __future__ import annotations

import math
from dataclasses import replace

from dynaplan.contract.counts import PoolSizes
from dynaplan.planner.model import (
    LOAD_ABOVE,
    LOAD_BELOW,
    BacktestResult,
    DecisionStep,
    Observation,
    Sizing,
    SplitRecord,
    SplitTrial,
    WorkerLimits,
)
from dynaplan.planner.sizing.limits import fit_budget, raise_to


def apply_backtest(
    sizing: Sizing, observation: Observation, limits: WorkerLimits, current: PoolSizes
) -> Sizing:
    """Return the size that the backtest allows, in place of the one that the forecast needs.

    It is within the limits; ``current`` where not even the minimums are.
    """
    answer = observation.backtest or BacktestResult(missing="no backtest was made")
    after, scarce, why = _choose(sizing.workers, answer, observation, current)
    after = limits.cap(raise_to(after, limits.least))
    if limits.gpus(after) > limits.max_gpus:
        if answer.workers and limits.gpus(answer.workers) >= limits.max_gpus:
            scarce = answer.workers
        fitting = limits.cap(raise_to(scarce, limits.least))
        after = fit_budget(fitting, limits) or current
    if answer.workers is None and after == sizing.workers:
        note = DecisionStep("backtest", current, current, f"none yet: {answer.missing}")
        return replace(sizing, steps=(*sizing.steps[:-1], note, *sizing.steps[-1:]))
    steps = sizing.steps
    if answer.stood:
        steps = (DecisionStep("record", current, current, describe_record(answer)), *steps)
    if answer.workers and not answer.change:
        note = DecisionStep("forecast", current, current, f"the forecast alone needs {sizing.workers}")
        steps = (*steps[: bool(answer.stood)], note)
    predict = sizing.predict if after == sizing.workers else None
    return Sizing(after, (*steps, DecisionStep("backtest", steps[-1].after, after, why)), predict)


def _choose(
    wanted: PoolSizes, answer: BacktestResult, observation: Observation, current: PoolSizes
) -> tuple[PoolSizes, PoolSizes, str]:
    """Return the workers, those that go first where GPUs lack, and why."""
    added = raise_to(current, wanted)
    if answer.workers is None:
        return added, wanted, f"nothing is removed: {answer.missing}"
    if answer.change == LOAD_ABOVE:
        why = "the load is above all that was backtested: the forecast adds, and nothing is removed"
        return raise_to(added, answer.workers), wanted, why
    objection, why = _objection(observation, answer), describe_backtest(answer)
    if answer.change == LOAD_BELOW:
        why = "the load is below all that was backtested: the forecast counts"
        if objection and added != wanted:
            return added, wanted, f"{why}, and nothing is removed {objection}"
        return wanted, wanted, why
    if not objection and (needed := _part_of(answer.workers, answer.peak_part)) != answer.workers:
        return needed, answer.workers, f"{why}; at most {answer.peak_part:.0%} of its peak can come now"
    if answer.is_new and not objection:
        return answer.workers, answer.workers, why
    after = raise_to(current, answer.workers)
    if after != answer.workers:
        why = f"{why}; nothing is removed {objection or 'until the next backtest'}"
    return after, answer.workers, why


def _part_of(workers: PoolSizes, part: float) -> PoolSizes:
    return PoolSizes(math.ceil(part * workers.prefill), math.ceil(part * workers.decode))


def _objection(observation: Observation, answer: BacktestResult) -> str:
    fleet = observation.fleet
    failing = sum(role.failed + role.backoff for role in (fleet.prefill, fleet.decode))
    if failing:
        return f"while workers fail ({failing})"
    return f"because {answer.missing}" if answer.missing else ""


def describe_backtest(answer: BacktestResult) -> str:
    """Say what the chosen split would have kept, and the best of the splits with fewer GPUs."""
    [chosen, *others] = answer.tried or (SplitTrial(answer.workers or PoolSizes(), 0, 0.0),)
    cheaper = max(
        (each for each in others if each.gpus < chosen.gpus), key=lambda each: each.in_time, default=None
    )
    text = (
        f"{_split(chosen)} would have kept {chosen.in_time:.1%} of the {answer.requests} requests of the "
        f"last {answer.window_s / 60:.0f} min in time with {chosen.gpus} GPUs"
    )
    if cheaper is None:
        return text
    at_most = "at most " if cheaper.is_at_most else ""
    return f"{text}, {_split(cheaper)} {at_most}{cheaper.in_time:.1%} with {cheaper.gpus}"


def describe_record(answer: BacktestResult) -> str:
    """Say what the last split that served really kept, what was predicted of it, and what follows."""
    [last, *_] = answer.stood
    factors = {"prefill": answer.corrections.prefill, "decode": answer.corrections.decode}
    slower = " and ".join(f"{factor:g} of {role}" for role, factor in factors.items() if factor != 1)
    ttft, itl = _kept(last, last.late, last.foretold_late), _kept(last, last.long, last.foretold_long)
    return (
        f"{_split(last)} kept the TTFT of {ttft} and the ITL of {itl} of its {last.requests:.0f} requests"
        + ("; what stood missed more than foretold, so every split is held to that" if answer.is_held else "")
        + (f"; steps take this many times the model's: {slower}" if slower else "")
    )


def _kept(record: SplitRecord, missed: float, foretold: float) -> str:
    came = max(1.0, record.requests)
    return f"{max(0.0, 1 - missed / came):.1%} ({max(0.0, 1 - foretold / came):.1%} foretold)"


def _split(each: SplitTrial | SplitRecord) -> str:
    workers = each.workers
    return f"{workers.prefill} + {workers.decode}" if workers.prefill else f"{workers.decode}"
