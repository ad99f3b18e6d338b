"""What each part of the SLA policy is for: hours of traffic with that part switched off.

``python -m tests.bench ablations``: seven families of traffic, with start-up times of 20 and 240 s, each with
every part and without each of them; then, for the parts that no family shows, the loads that do. A part
without which no hour is a point worse is to be deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

from dynaplan.lab.simulate.options import SimulateOptions
from dynaplan.planner.backtesting.evidence import load_change
from dynaplan.planner.backtesting.record import ServedRecord
from dynaplan.planner.model import LOAD_ABOVE, LOAD_BELOW, LOAD_WITHIN
from dynaplan.planner.sizing.look_ahead import lookahead
from tests.bench import standing
from tests.bench.cases import FIRST_CASE, HOUR, TRACES, hour_of
from tests.bench.decisions import fared_row
from tests.bench.standing import Fared, engines_at, fared
from tests.bench.table import Row

SEED = 101
STARTUPS_S = (20.0, 240.0)


@dataclass(frozen=True)
class Part:
    """How a part is switched off: names below ``dynaplan`` with what takes their place, and options."""

    replaced: Mapping[str, Any] = field(default_factory=dict)
    planner: Mapping[str, object] = field(default_factory=dict)


def never(change: str) -> Callable[..., str]:
    """Return ``load_change`` without that answer: such a load counts as one that was backtested."""

    def changed(*known: Any) -> str:
        found = load_change(*known)
        return LOAD_WITHIN if found == change else found

    return changed


SCHEDULE, POLICY = "planner.backtesting.schedule", "planner.rules.sla_policy"
EVERY = "every part"
PARTS: Mapping[str, Part] = {
    EVERY: Part(),
    "backtests": Part({f"{POLICY}.apply_backtest": lambda sizing, *_: sizing}),
    "slow loads": Part({f"{SCHEDULE}.peak_part": lambda *_: 1.0}),
    "an ended load": Part({f"{SCHEDULE}.load_change": never(LOAD_BELOW)}),
    "the forecast adds": Part({f"{SCHEDULE}.load_change": never(LOAD_ABOVE)}),
    "exchange of roles": Part({"planner.backtesting.search._Climb._exchange": lambda _, best: best}),
    "held to the record": Part({"planner.backtesting.record.compare": lambda *_: ServedRecord()}),
    "the Kalman filter": Part(planner={"load-predictor": "constant"}),
    "looking ahead": Part(
        {"planner.sizing.demand_forecast.lookahead": lambda _, interval_s: lookahead(0.0, interval_s)}
    ),
    "backlog": Part({f"{POLICY}.backlog_demand": lambda *_: None}),
    "refitted step times": Part(planner={"no-correction": True}),
    "dispersion by scale": Part({"planner.forecasting.traffic_history.dispersions_of": lambda *_: ()}),
    "dispersion": Part({"simulation.meter.TrafficMeter._dispersion": lambda _: None}),
}


@dataclass(frozen=True)
class Case:
    """A load that shows what a part is for: ``speed`` is the engines' over the profile's.

    ``known_from_s`` is when it begins to count: the first minutes are those in which nothing is backtested.
    """

    part: str
    hour: SimulateOptions
    speed: float = 1.0
    known_from_s: float = standing.KNOWN_FROM_S


def _first_minutes(trace: str, startup_s: float) -> Callable[[str], Case]:
    hour = replace(HOUR, trace=f"{trace},duration=900", startup_time_s=startup_s)
    return lambda part: Case(part, hour, known_from_s=0.0)


GROWTH = replace(HOUR, trace="step:low=2,high=8,at=1500,duration=3600")
BURSTS, WAVE = hour_of(FIRST_CASE, "bursts", 11), hour_of(FIRST_CASE, "wave", 11)
UNCORRECTED = replace(BURSTS, planner={"no-correction": True})
CASES = (
    Case("the forecast adds", GROWTH),
    Case("backlog", GROWTH),
    _first_minutes("step:low=2,high=8,at=300", 240.0)("looking ahead"),
    _first_minutes("ramp:low=2,high=12", 60.0)("the Kalman filter"),
    _first_minutes("batches:every=95.7,size=81.5,seed=322", 60.0)("dispersion by scale"),
    _first_minutes("batches:every=95.7,size=81.5,seed=322", 60.0)("dispersion"),
    Case("held to the record", UNCORRECTED, speed=0.7),
    Case("refitted step times", BURSTS, speed=0.7),
    Case("refitted step times", WAVE, speed=0.7),
    Case("refitted step times", WAVE, speed=1.3),
)


def rows(_: int) -> Iterator[Row]:
    for startup_s in STARTUPS_S:
        for trace in TRACES:
            hour = replace(hour_of(FIRST_CASE, trace, SEED), startup_time_s=startup_s)
            for part in PARTS:
                yield fared_row(f"{trace}, {startup_s:g} s, without {part}", without(part, Case(part, hour)))
    for case in CASES:
        for part in (EVERY, case.part):
            name = f"{case.hour.trace}, {case.speed:g} of the speed, without {part}"
            yield fared_row(name, without(part, case))


def without(part: str, case: Case) -> Fared:
    """Simulate the load of a case with that part switched off."""
    off = PARTS[part]
    with ExitStack() as stack:
        stack.enter_context(patch.object(standing, "KNOWN_FROM_S", case.known_from_s))
        stack.enter_context(engines_at(case.speed))
        for name, value in off.replaced.items():
            stack.enter_context(patch(f"dynaplan.{name}", value))
        return fared(replace(case.hour, planner={**case.hour.planner, **off.planner}), "sla")
