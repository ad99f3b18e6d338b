"""Options of the engines, tried on a window: what the present workers would have kept with other steps.

A longer step computes prompts sooner, and every stream waits for it; more requests in a step let fewer wait
in front of it, and each is slower. Which of the two a promise bears depends on the load. So a backtest
simulates its window, now and then, with each option halved and doubled (``FACTORS``), one at a time.

**Certain** is a gain of at least ``MIN_GAIN`` of the requests that is more than chance makes between two
samples of that size (``record.py``). The requests are the same ones, so this errs towards leaving it alone.

**Where it is wrong.** The model knows of an option how many tokens and requests it lets into a step. What it
costs besides, such as the memory of a longer batch, shows when a worker starts with it. Who sent what is not
recorded, so clients that wait for an answer before they ask again are drawn as if they did not: they come in
bunches that they cannot make, and the present value is foretold to miss more than it did. That is why a
change is made only where the record, too, has kept less (``rules/option_adjustment.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from dynaplan.config.settings.planner import PlannerSettings, worker_sizes
from dynaplan.config.settings.worker import SLOT_OPTION, STEP_OPTION, SimOptions
from dynaplan.engines.timing_model.engine_model import EngineSettings
from dynaplan.graph.lifecycle import Role
from dynaplan.planner.backtesting.record import excess_log_odds
from dynaplan.planner.backtesting.runs import MissCounts, SplitRun
from dynaplan.planner.backtesting.search import MIN_GAIN, Search
from dynaplan.planner.model import OptionTrial
from dynaplan.simulation.simulated_service import ServiceSettings

FACTORS = (0.5, 2.0)


@dataclass(frozen=True)
class EngineOption:
    """An option of one role's engines: its common name, and the field of ``EngineSettings`` that has it."""

    role: Role
    name: str
    field: str

    def values_beside(self, sizes: EngineSettings | SimOptions) -> Iterator[int]:
        """Yield the values to try: a step has room for one token of each of its requests."""
        for factor in FACTORS:
            tried = {
                "batched_tokens": sizes.batched_tokens,
                "request_slots": sizes.request_slots,
                self.field: int(getattr(sizes, self.field) * factor),
            }
            if tried["batched_tokens"] >= tried["request_slots"] >= 1:
                yield tried[self.field]


def options_to_try(*, is_disaggregated: bool) -> tuple[EngineOption, EngineOption]:
    """Return the tokens of a step of who computes prompts, and the requests of a step of who decodes."""
    prompts = Role.PREFILL if is_disaggregated else Role.DECODE
    return (
        EngineOption(prompts, STEP_OPTION, "batched_tokens"),
        EngineOption(Role.DECODE, SLOT_OPTION, "request_slots"),
    )


def configured_value(settings: PlannerSettings, role: Role, option: str) -> int | None:
    """Return the value that the deployment sets for a role's engines; None leaves it to the engine."""
    value: int | None = getattr(settings, worker_sizes(role.value)[option])
    return value


def component_of(settings: PlannerSettings, role: Role) -> str:
    return settings.prefill_component if role is Role.PREFILL else settings.decode_component


def try_options(search: Search, settings: PlannerSettings) -> OptionTrial | None:
    """Return the trial with the most requests in time, be they fewer than now; None where there is none.

    Simulates the window up to five times. Only options that the deployment sets are tried.
    """
    options = options_to_try(is_disaggregated=Role.PREFILL in search.service.engines)
    configured = [each for each in options if configured_value(settings, each.role, each.name)]
    if not configured or not search.requests:
        return None
    present = _misses(search, search.service, search.requests)
    trials = [
        _trial(search, present, component_of(settings, option.role), option, value)
        for option in configured
        for value in option.values_beside(search.service.engines[option.role][0])
    ]
    return max(trials, key=lambda each: each.in_time_after, default=None)


def _trial(
    search: Search, present: MissCounts, component: str, option: EngineOption, value: int
) -> OptionTrial:
    engine, timing = search.service.engines[option.role]
    sizes: dict[str, Any] = {option.field: value}
    changed = {option.role: (replace(engine, **sizes), timing)}
    service = replace(search.service, engines={**search.service.engines, **changed})
    other = _misses(search, service, present.since(search.begin_s).either)
    before, after = _in_time(search, present), _in_time(search, other)
    is_certain = after >= before + MIN_GAIN and _is_beyond_chance(search, present, other)
    present_value = getattr(engine, option.field)
    return OptionTrial(component, option.name, present_value, value, before, after, is_certain)


def _misses(search: Search, service: ServiceSettings, at_most: int) -> MissCounts:
    """Simulate the window with the workers that are there, until it is over or more than that have missed."""
    run = SplitRun(service, search.present, search.begin_s)
    for interval in search.window:
        run.serve(interval)
        if run.misses.since(search.begin_s).either > at_most:
            return run.misses
    run.finish()
    return run.misses


def _in_time(search: Search, misses: MissCounts) -> float:
    """Return the part of the requests that met both targets, held to the record by its odds.

    What the present workers missed more than foretold says nothing of the same workers with other options.
    """
    record = replace(search.record, worse=())
    held = record.held(search.present, search.requests, misses.since(search.begin_s))
    return round(1 - held / search.requests, 4)


def _is_beyond_chance(search: Search, more: MissCounts, fewer: MissCounts) -> bool:
    """Tell whether chance does not explain that many more misses; both are of the whole window."""
    came = [each.count for each in search.window]
    return excess_log_odds(came, more.by_interval(search.begin_s), fewer.by_interval(search.begin_s)) > 0
