"""Recorded observations decided again with other settings: where the decisions differ, and why."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dynaplan.config.settings.fields import options_of
from dynaplan.config.settings.planner import ForecastSettings, PlannerSettings
from dynaplan.contract.option_changes import OptionChange
from dynaplan.planner.forecasting.library_forecaster import make_forecaster
from dynaplan.planner.forecasting.traffic_history import TrafficHistory
from dynaplan.planner.model import Decision, DecisionRecord, Observation, PlannerState, Tuning
from dynaplan.planner.own_policy import load_own_policy
from dynaplan.planner.recorders.decision_log import read_recording
from dynaplan.planner.rules.cycle import startup_time_s
from dynaplan.planner.rules.decision import decide
from dynaplan.planner.rules.sla_policy import PerformanceModel
from dynaplan.planner.sizing.demand_forecast import forecast_traffic
from dynaplan.planner.sla_model import build_sla_model
from dynaplan.util.errors import ConfigError, UserError

COMMON_OPTIONS = ("adjustment-interval", "metric-pulling-interval")
"""Options that cannot change: averages and counts over them cannot be taken apart again."""

MAX_FAULT_CHARACTERS = 400
"""The part of a fault that is shown: a record may hold values of any length."""


@dataclass(frozen=True)
class ReplayedDecision:
    """One recorded interval: its recorded and its replayed decision, and what each sets besides."""

    wall_time: str
    recorded: Decision
    replayed: Decision
    recorded_tuning: Tuning
    replayed_tuning: Tuning
    recorded_change: OptionChange | None = None
    replayed_change: OptionChange | None = None

    @property
    def is_tuned_alike(self) -> bool:
        """True when both set the same besides numbers of workers."""
        is_same_change = self.recorded_change == self.replayed_change
        return is_same_change and self.recorded_tuning == self.replayed_tuning

    @property
    def is_same(self) -> bool:
        """True when both ask for the same numbers of workers, and set the same besides."""
        return self.is_tuned_alike and self.recorded.desired == self.replayed.desired


def replay(path: Path, options: Mapping[str, Any]) -> list[ReplayedDecision]:
    """Decide every recorded interval again, with these options in place of the recorded ones.

    Each decision is made from the recorded numbers of workers; the memory between decisions is that of the
    replayed ones. Forecasts are made anew when an option of forecasting differs. Raises ConfigError for a
    file that is no recording, and for options that a recording cannot answer.
    """
    return asyncio.run(_replay_records(read_decisions(path), options))


async def _replay_records(
    records: Iterable[DecisionRecord], options: Mapping[str, Any]
) -> list[ReplayedDecision]:
    replayed: list[ReplayedDecision] = []
    replayer: Replayer | None = None
    for record in records:
        if replayer is None or replayer.recorded != record.settings:
            if replayer:
                await replayer.close()
            replayer = Replayer(record, options)
        replayed.append(await replayer.decide(record))
    if replayer:
        await replayer.close()
    return replayed


class Replayer:
    """Decides the records of one planner again: those in a row with the same settings."""

    def __init__(self, first: DecisionRecord, options: Mapping[str, Any]) -> None:
        self.recorded = first.settings
        self._settings = settings = _override(first.settings, options)
        self._model: PerformanceModel | None = build_sla_model(settings) if settings.is_by_targets else None
        self._own_policy = load_own_policy(settings)
        self._state: PlannerState = first.state
        self._history = TrafficHistory(settings.adjustment_interval_s)
        self._forecaster = None
        if settings.sees_traffic and _forecasting(settings) != _forecasting(first.settings):
            self._forecaster = make_forecaster(settings, settings.adjustment_interval_s)

    async def decide(self, record: DecisionRecord) -> ReplayedDecision:
        """Decide the record's interval again, from its observation and the last replayed state."""
        observation = await self._with_forecast(record.observation)
        self._state, decision = decide(
            self._settings, self._state, observation, self._model, self._own_policy
        )
        return ReplayedDecision(
            record.wall_time,
            recorded=record.decision,
            replayed=decision,
            recorded_tuning=record.next_state.tuning,
            replayed_tuning=self._state.tuning,
            recorded_change=record.next_state.options.change,
            replayed_change=self._state.options.change,
        )

    async def close(self) -> None:
        """End the processes that compute forecasts, if any were needed."""
        if self._forecaster:
            await self._forecaster.close()

    async def _with_forecast(self, observation: Observation) -> Observation:
        """Return the observation, with new forecasts where the settings of forecasting differ.

        Raises ConfigError where targets are planned for, and no traffic was recorded.
        """
        settings = self._settings
        if settings.is_by_targets and observation.traffic is None and not observation.unknown:
            raise ConfigError(
                f"Planner.policy: {settings.policy!r}, but the planner that recorded saw no traffic",
                hint=f"expected a recording of a planner with that policy, not {self.recorded.policy}; "
                "`dynaplan simulate` tries it on a trace",
            )
        startup_s = startup_time_s(settings, (observation.startup_s,))
        observation = replace(observation, startup_s=startup_s)
        if observation.traffic is None or self._forecaster is None:
            return observation
        self._history.add(observation.traffic)
        expected = await forecast_traffic(self._history, self._forecaster.forecast_all, startup_s, settings)
        return replace(observation, foresight=expected)


def _override(recorded: PlannerSettings, options: Mapping[str, Any]) -> PlannerSettings:
    settings = recorded.overridden(options)
    before, after = recorded.to_options(), settings.to_options()
    for name in COMMON_OPTIONS:
        if before[name] != after[name]:
            raise ConfigError(
                f"Planner.{name}: {after[name]}, but what is replayed was recorded with {before[name]}",
                hint="expected the recorded one; `dynaplan simulate` tries others, on recorded traffic",
            )
    return settings


def _forecasting(settings: PlannerSettings) -> tuple[Any, ...]:
    names = set(options_of(ForecastSettings))
    options = settings.to_options()
    return (settings.startup_time_s, *(options.get(name) for name in sorted(names)))


def read_decisions(path: Path) -> Iterator[DecisionRecord]:
    """Yield the decisions at the ends of intervals, oldest first; raises ConfigError for an invalid one.

    Earlier versions decided before the end of an interval, too; these records are left out.
    """
    for number, document in read_recording(path):
        try:
            record = DecisionRecord.from_json(document)
        except (KeyError, TypeError, ValueError, AttributeError, UserError) as error:
            fault = f"{type(error).__name__}: {error}"[:MAX_FAULT_CHARACTERS]
            raise ConfigError(
                f"{path}, line {number} is no decision ({fault})",
                hint="expected a decisions.jsonl that a planner wrote, of this version or an older one",
            ) from error
        if not document["observation"].get("early"):
            yield record
