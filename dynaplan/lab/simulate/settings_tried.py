"""Settings that a recommendation tries beside policies: each is the deployment's own policy with one changed.

Of an engine these are the tokens and the requests of a step, halved and doubled: longer steps compute prompts
sooner, and make every stream wait. Of the planner they are what it sets of running workers by itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from dynaplan.config.settings.frontend import DECODE_COMPONENT, PREFILL_COMPONENT
from dynaplan.config.settings.planner import AUTO, PlannerSettings
from dynaplan.config.settings.worker import SimOptions
from dynaplan.graph.lifecycle import Role
from dynaplan.lab.simulate.options import SimulateOptions
from dynaplan.planner.backtesting.option_trials import options_to_try

MARK = " --"
"""What comes before the setting in a name: ``sla --VllmWorker.max-num-seqs=128``."""

COMPONENTS: Mapping[Role, str] = {Role.DECODE: DECODE_COMPONENT, Role.PREFILL: PREFILL_COMPONENT}


@dataclass(frozen=True)
class TriedSetting:
    """One setting, as it is written on the command line, and the simulation with it."""

    text: str
    options: SimulateOptions

    def name_beside(self, policy: str) -> str:
        return f"{policy}{MARK}{self.text}"


def settings_beside(options: SimulateOptions) -> Iterator[TriedSetting]:
    """Yield the settings to try: sizes of the engines' steps and batches, and what the planner may tune.

    The planner's options have to be those of the deployment's own policy: only one with step times can tune.
    """
    for option in options_to_try(is_disaggregated=options.is_disaggregated):
        sizes = SimOptions.from_options(options.engine_of(option.role))
        for value in option.values_beside(sizes):
            yield _with_engine(options, option.role, option.name, value)
    yield from (_with_planner(options, name) for name in _untuned(options))


def _with_engine(options: SimulateOptions, role: Role, option: str, value: int) -> TriedSetting:
    engine = {**options.engine_of(role), option: value}
    if role is Role.PREFILL:
        changed = replace(options, prefill_engine=engine)
    else:
        changed = replace(options, engine=engine, prefill_engine=options.engine_of(Role.PREFILL))
    return TriedSetting(f"{COMPONENTS[role]}.{option}={value}", changed)


def _with_planner(options: SimulateOptions, option: str) -> TriedSetting:
    planner = {**options.planner, option: AUTO}
    return TriedSetting(f"Planner.{option}={AUTO}", replace(options, planner=planner))


def _untuned(options: SimulateOptions) -> list[str]:
    """Return the options that the planner could tune by itself, and does not."""
    planner = PlannerSettings.from_options(options.planner)
    if not planner.has_step_times:
        return []
    names = ["max-running-requests"]
    if options.is_disaggregated and options.disaggregation.is_conditional:
        names.append("max-local-prefill-length")
    return [name for name in names if name not in planner.tuned]
