"""Recorded traffic with other settings: whether they would have done worse than the recorded ones."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dynaplan import wiring
from dynaplan.core.shadowing.shadow import Judge, LiveScore, Shadow
from dynaplan.domain.errors import ConfigError
from dynaplan.domain.planning.decisions import DecisionRecord
from dynaplan.domain.planning.score import PolicyScore
from dynaplan.domain.settings.planner import PlannerSettings
from dynaplan.planner.replay import Replayer, read_decisions


@dataclass(frozen=True)
class Compared:
    """The scores of the workers that served, of the recorded settings and of the new ones; and intervals.

    The last two are by the model alone, from the same first interval on.
    """

    served: PolicyScore = field(default_factory=PolicyScore)
    old: PolicyScore = field(default_factory=PolicyScore)
    new: PolicyScore = field(default_factory=PolicyScore)
    intervals: int = 0


def compare(path: Path, options: Mapping[str, Any]) -> Compared:
    """Follow the recorded and the new settings through a recording, each with workers of its own.

    Raises ConfigError for a file that is no recording, one without traffic, and for options that a recording
    cannot answer.
    """
    return asyncio.run(_compared(read_decisions(path), options))


async def _compared(records: Iterable[DecisionRecord], options: Mapping[str, Any]) -> Compared:
    followed: list[_Followed] = []
    try:
        for record in records:
            if not followed or followed[-1].recorded != record.settings:
                followed.append(_Followed(record, options))
            if not record.observation.early:
                await followed[-1].follow(record)
    finally:
        for each in followed:
            await each.new.close()
    total = Compared()
    for each in followed:
        total = each.added_to(total)
    if not total.served.requests:
        raise ConfigError(
            "no interval of the recording has requests whose lengths are known: nothing can be compared",
            hint="expected a recording of a planner with policy: sla or both, or with a shadow, under load",
        )
    return total


class _Followed:
    """Follows settings for as long as the recorded ones stay the same."""

    def __init__(self, first: DecisionRecord, options: Mapping[str, Any]) -> None:
        self.recorded = first.settings
        old, self.new = Replayer(first, {}), Replayer(first, options)
        judge = _judge(first.settings, old, self.new)
        self._live = LiveScore(old.settings, judge)
        self._old = Shadow(old.settings, old.model, judge)
        self._new = Shadow(self.new.settings, self.new.model, judge)
        self._intervals = 0

    async def follow(self, record: DecisionRecord) -> None:
        """Have the recorded, the old and the new options each serve one recorded interval, and score them."""
        observation = await self.new.with_forecast(record.observation)
        corrections = record.next_state.corrections
        live = self._live.follow(record.observation, record.decision, corrections)
        self._old.follow(live, corrections)
        self._new.follow(replace(live, observation=observation), corrections)
        self._intervals += 1

    def added_to(self, total: Compared) -> Compared:
        """Return the total with these intervals."""
        return Compared(
            total.served + self._live.score,
            total.old + self._old.score,
            total.new + self._new.score,
            total.intervals + self._intervals,
        )


def _judge(recorded: PlannerSettings, old: Replayer, new: Replayer) -> Judge:
    """Return the judge: the recorded promise, without one that of the new options, or of the shadow."""
    for replayer in (old, new):
        if replayer.model:
            return Judge(replayer.settings, replayer.model)
    settings = recorded.of_shadow() or old.settings
    return Judge(settings, wiring.planning.sla_model(settings, {}))
