"""Options of the engines: what the last trial found and, with ``adjust-knobs``, what is done about it.

One option of one component at a time, which the fleet plugin changes as a rolling reload:

| the last change | what follows |
|---|---|
| is under way | nothing, until its result is known |
| did not get into the store | it is asked for again |
| is made | its traffic is counted for a quarter of ``slo-window`` |
| more missed than in the quarter before, beyond chance, under no more load | it is taken back, and barred |
| no more missed, or a window has passed in which more came than before | it stays |
| was not made, or a person has changed the option since | it is barred: not tried for ``BARRED_WINDOWS`` |
| was not made since a person has a reload to finish | it may be asked for again a window later |

Another one is asked for a window after the last, where a trial is sure of its gain, the record of the last
quarter has not kept as much already, and nothing objects. What "beyond chance" is says
``backtesting/record.py``: here what was kept before is what is foretold.
"""

from __future__ import annotations

import math
from dataclasses import replace

from dynaplan.config.settings.planner import PlannerSettings, worker_sizes
from dynaplan.contract.holds import RoleHolds
from dynaplan.contract.option_changes import DONE, RELOAD_INTERRUPTED, OptionChange
from dynaplan.graph.lifecycle import Role
from dynaplan.planner.backtesting.evidence import DEVIATIONS, GROWTH_RATIO
from dynaplan.planner.backtesting.record import excess_log_odds
from dynaplan.planner.backtesting.schedule import window_of
from dynaplan.planner.backtesting.search import MIN_GAIN
from dynaplan.planner.model import BacktestResult, DecisionStep, OptionTrial
from dynaplan.planner.option_memory import NOTHING_SERVED, BarredValue, OptionMemory, ServedPart, total
from dynaplan.planner.rules.load_policy import Situation
from dynaplan.planner.rules.sla_policy import limits_of

ENGINE_OPTION = "engine option"
"""The stage of a decision's trail that is about options of the engines."""

BARRED_WINDOWS = 24
"""Windows of the promise, a day of hours, in which a value is not tried that was of no use."""

JUDGED_PART = 4
"""A change is judged by the traffic of that part of a window, the fourth, before it and after."""


def plan_options(situation: Situation) -> tuple[OptionMemory, list[DecisionStep]]:
    """Return what to remember, and the steps that say what was found and what is done.

    A change that is to be asked for now has the ``asked_s`` of the observation.
    """
    answer, current = situation.observation.backtest, situation.current
    memory, why = _adjust(situation) if situation.settings.adjust_knobs else (OptionMemory(), "")
    found = describe_option(answer.best_trial, answer) if answer and answer.best_trial else ""
    change, at_s = memory.change, situation.observation.at_s
    is_older = change is not None and not memory.is_settled and change.asked_s != at_s
    lines = [why] if is_older else filter(None, [found, why])
    return memory, [DecisionStep(ENGINE_OPTION, current, current, line) for line in lines]


def describe_option(trial: OptionTrial, answer: BacktestResult) -> str:
    """Say what would have been in time with the option's other value, and as it is."""
    window = f"of the last {answer.window_s / 60:.0f} min"
    if trial.is_certain:
        return (
            f"{trial} would have kept {trial.in_time_after:.1%} {window}, {trial.in_time_before:.1%} as it is"
        )
    return (
        f"nothing that was tried keeps more beyond chance: at best {trial}, {trial.in_time_after:.1%} "
        f"{window}, {trial.in_time_before:.1%} as it is"
    )


def _adjust(situation: Situation) -> tuple[OptionMemory, str]:
    settings, observation = situation.settings, situation.observation
    memory = _of_store(situation.state.options, observation.option_change)
    change = memory.change
    if change is None or change.result:  # While workers are replaced it is the traffic of neither value.
        memory = memory.with_traffic(observation.traffic, window_of(settings) / JUDGED_PART)
    if change is None:
        return _ask(situation, memory)
    if change != observation.option_change:
        return _ask_again(situation, memory, change)
    if not change.result:
        return memory, f"{change} is being made, for {observation.at_s - change.asked_s:.0f} s now"
    if change.result == DONE and (value := _value_now(settings, change)) != change.after:
        if memory.bars(change.component, change.option, change.after, observation.at_s):
            return _ask(situation, memory)
        return _bar(situation, memory), f"{change} is not what a person wants: it is {value} since"
    if memory.is_settled:
        return _ask(situation, memory)
    if change.result != DONE:
        return _settle_failed(situation, memory, change)
    if memory.applied_at_s is None:
        is_compared = memory.served_before != NOTHING_SERVED
        since = replace(memory, applied_at_s=observation.at_s, recent_parts=(), is_settled=not is_compared)
        return since, f"{change} is made on all workers"
    return _judge(situation, memory, change, memory.applied_at_s)


def _of_store(memory: OptionMemory, seen: OptionChange | None) -> OptionMemory:
    """Return the memory of the change that the store has: its own, that of a lost planner, or none.

    Where the store has none another deployment has begun, with the options of its file. Where it has an
    older one than this planner asked for last, it has not got that: the memory is as it was.
    """
    if seen and memory.change and seen.asked_s == memory.change.asked_s:
        return replace(memory, change=seen)
    if seen and memory.change and not memory.change.result and seen.asked_s < memory.change.asked_s:
        return memory
    return OptionMemory(
        seen, None, bool(seen and seen.result), recent_parts=memory.recent_parts, barred=memory.barred
    )


def _judge(
    situation: Situation, memory: OptionMemory, change: OptionChange, applied_at_s: float
) -> tuple[OptionMemory, str]:
    """Return what follows of a change that stands, by the traffic before it and since."""
    at_s, window_s = situation.observation.at_s, window_of(situation.settings)
    before, served = memory.served_before, total(memory.recent_parts)
    missed_before, came = 1 - before.in_time, [each.requests for each in memory.recent_parts]
    kept = f"{served.in_time:.1%} of {served.requests:.0f} requests in time, {before.in_time:.1%} before"
    if served.length_s < window_s / JUDGED_PART:
        return memory, f"{change} stands for {(at_s - applied_at_s) / 60:.0f} min: {kept}"
    if _is_more(served, before):
        if at_s - applied_at_s < window_s:
            return memory, f"{change} is judged later, since more comes than before it: {kept}"
    elif excess_log_odds(
        came, [each.missed for each in memory.recent_parts], [missed_before * each for each in came]
    ):
        if objection := _in_the_way(situation, change.component):
            return memory, f"{change} is to be taken back, and is not yet: {objection}; {kept}"
        barred = _bar(situation, memory)
        back = replace(
            barred,
            change=change.reversed(at_s),
            applied_at_s=None,
            is_settled=False,
            served_before=NOTHING_SERVED,
        )
        return back, f"{change} is taken back: {kept}"
    return replace(memory, is_settled=True), f"{change} stays: {kept}"


def _is_more(served: ServedPart, before: ServedPart) -> bool:
    """Tell whether more came in a second than before, in requests or in tokens, beyond chance."""
    chance = DEVIATIONS / math.sqrt(max(1.0, before.requests))
    longer = (GROWTH_RATIO + chance) * served.length_s / max(1.0, before.length_s)
    return served.requests > longer * before.requests or served.tokens > longer * before.tokens


def _ask(situation: Situation, memory: OptionMemory) -> tuple[OptionMemory, str]:
    """Return the memory with the change that is to be asked for now, where there is one."""
    answer, at_s = situation.observation.backtest, situation.observation.at_s
    trial = answer.best_trial if answer else None
    if answer is None or trial is None or not trial.is_certain:
        return memory, ""
    if objection := _objection(situation, memory, answer, trial):
        return memory, f"{trial} is not made: {objection}"
    change = OptionChange(trial.component, trial.option, trial.value_before, trial.value_after, at_s)
    asked = replace(
        memory, change=change, applied_at_s=None, is_settled=False, served_before=total(memory.recent_parts)
    )
    return replace(asked, recent_parts=()), f"{change} is asked for: a worker after the other gets it"


def _ask_again(situation: Situation, memory: OptionMemory, change: OptionChange) -> tuple[OptionMemory, str]:
    """Return the memory with the change asked for now, since the store did not get it."""
    if objection := _in_the_way(situation, change.component):
        return memory, f"{change} has to be asked for again, and is not yet: {objection}"
    again = replace(change, asked_s=situation.observation.at_s)
    return replace(memory, change=again), f"{change} is asked for again: the store did not get it"


def _objection(situation: Situation, memory: OptionMemory, answer: BacktestResult, trial: OptionTrial) -> str:
    """Return why a change that a trial found is not to be made now; "" if nothing is in the way."""
    settings, observation = situation.settings, situation.observation
    at_s, window_s = observation.at_s, window_of(settings)
    if memory.bars(trial.component, trial.option, trial.value_after, at_s):
        return "it was of no use lately, or not wanted"
    if memory.change and 0 <= at_s - memory.change.asked_s < window_s:
        return f"the last change was {(at_s - memory.change.asked_s) / 60:.0f} min ago"
    if objection := answer.missing or _in_the_way(situation, trial.component):
        return objection
    before, compared_s = total(memory.recent_parts), window_s / JUDGED_PART
    if before.length_s < compared_s:
        return f"it is to be compared with {compared_s / 60:.0f} min before it"
    if before.in_time > trial.in_time_after - MIN_GAIN:
        return f"{before.in_time:.1%} of the last {compared_s / 60:.0f} min were in time as it is"
    return ""


def _in_the_way(situation: Situation, component: str) -> str:
    """Return why no worker of the component is to be replaced now; "" if nothing is in the way."""
    settings, observation, current = situation.settings, situation.observation, situation.current
    role, limits = _role_of(settings, component), limits_of(settings, observation, current)
    if settings.no_operation:
        return "no-operation"
    if current.of(role) == 1 and limits.gpus(current.plus(role, 1)) > limits.max_gpus:
        return "while its only worker starts again nobody answers, and no GPU is free for another"
    if observation.desired.is_pending:
        return "a decision is being carried out"
    if observation.holds != RoleHolds():
        return "somebody holds a number of workers"
    if observation.fleet.prefill.asleep or observation.fleet.decode.asleep:
        return "workers sleep"
    return ""


def _settle_failed(
    situation: Situation, memory: OptionMemory, change: OptionChange
) -> tuple[OptionMemory, str]:
    """Bar the value of a change that was not made, unless the reason says nothing of the value."""
    why = f"{change} was not made: {change.result}"
    if change.result == RELOAD_INTERRUPTED:
        return replace(memory, is_settled=True), why
    return _bar(situation, memory), why


def _bar(situation: Situation, memory: OptionMemory) -> OptionMemory:
    """Return the memory with the last change settled, and its value barred."""
    change, at_s = memory.change, situation.observation.at_s
    assert change
    until_s = at_s + BARRED_WINDOWS * window_of(situation.settings)
    barred = BarredValue(change.component, change.option, change.after, until_s)
    return replace(memory.with_barred(barred, at_s), is_settled=True)


def _value_now(settings: PlannerSettings, change: OptionChange) -> int | None:
    """Return the value that the option of the change has by the planner's settings; None if unknown."""
    name = worker_sizes(_role_of(settings, change.component).value).get(change.option)
    value: int | None = getattr(settings, name) if name else None
    return value


def _role_of(settings: PlannerSettings, component: str) -> Role:
    return Role.PREFILL if component == settings.prefill_component else Role.DECODE
