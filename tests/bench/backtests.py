"""Does a backtest answer as it would with all that came, and with every split tried to its end?

A planner keeps arrivals by metric pull and histograms of lengths, of which a backtest draws its requests
(``planner/backtesting/drawn_requests.py``); its search climbs from the last answer, and ends a run as soon as
too many have missed. Here the last question of the first twenty minutes of twenty random hours is answered
three times: as the planner does, by the same search on the requests that came, and on those by trying every
split.

``python -m tests.bench backtests``: in how many of the twenty windows the number of workers differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.counts import PoolSizes
from dynaplan.lab.simulate import planner_policy
from dynaplan.lab.simulate.options import SimulateOptions
from dynaplan.planner.backtesting.backtest import simulated_service
from dynaplan.planner.backtesting.drawn_requests import DrawnInterval, draw_window
from dynaplan.planner.backtesting.schedule import BacktestSchedule, Question
from dynaplan.planner.backtesting.search import Search, find_cheapest, run
from dynaplan.planner.rules.sla_policy import PerformanceModel, apply_corrections
from dynaplan.simulation.traces.reading import read_requests
from tests.bench.autoscalers import run_policy
from tests.bench.decisions import random_hour
from tests.bench.table import Row
from tests.unit.planner.backtesting.windows import given_window

SEEDS = range(300, 320)
DURATION_S = 1200


def rows(_: int) -> Iterator[Row]:
    """Yield how many answers have another number of workers than if every split had been tried."""
    answers = [answers_of(_begin_of(random_hour(seed))) for seed in SEEDS]
    for number, name in enumerate(("as the planner does", "by the search on the requests that came")):
        apart = [abs(_workers(each[number]) - _workers(each[-1])) for each in answers]
        note = f"of {len(answers)}, by {max(apart)} workers at most"
        yield Row(f"windows answered otherwise {name}", "", [sum(map(bool, apart))], 1, note=note)


def answers_of(hour: SimulateOptions) -> tuple[PoolSizes, PoolSizes, PoolSizes]:
    """Return the three answers to the last question that the policy asks in that hour."""
    asked_s, (model, settings, question) = last_question(hour)
    service = apply_corrections(model, question.corrections, question.present)
    begin_s = asked_s - sum(each.length_s for each in question.intervals)
    came = [
        replace(each, arrival_s=each.arrival_s - begin_s)
        for each in read_requests(hour.trace, hour.rate_scale, hour.seed)
        if begin_s <= each.arrival_s < asked_s
    ]

    def search(window: Sequence[DrawnInterval]) -> Search:
        simulated = simulated_service(service, settings, question.limits)
        return Search(simulated, window, question.may_miss, question.present, question.limits)

    drawn = draw_window(question.intervals, service.decode.settings)
    given = given_window(came, settings.adjustment_interval_s)
    as_planned, as_came = (find_cheapest(search(each), question.begin)[0].workers for each in (drawn, given))
    return as_planned, as_came, try_every_split(search(given))


Asked = tuple[PerformanceModel, PlannerSettings, Question]


def last_question(hour: SimulateOptions) -> tuple[float, Asked]:
    """Return when the last backtest of the hour is asked for, in seconds, and what it is given."""
    moments: list[float] = []
    asked: list[Asked] = []
    ask, compute = BacktestSchedule.question, planner_policy.backtest

    def noting_moment(schedule: BacktestSchedule, *arguments: Any) -> Question | None:
        if question := ask(schedule, *arguments):
            moments.append(arguments[0].at_s)
        return question

    def noting_question(*given: Any) -> Any:
        asked.append(given[:3])
        return compute(*given)

    with (
        patch.object(BacktestSchedule, "question", noting_moment),
        patch.object(planner_policy, "backtest", noting_question),
    ):
        run_policy(hour, "sla")
    return moments[-1], asked[-1]


def try_every_split(search: Search) -> PoolSizes:
    """Return the cheapest split that keeps the promise, or else the one of all GPUs with most in time."""
    most, limits = search.limits.max_gpus, search.limits
    splits = [PoolSizes(prefill, gpus - prefill) for gpus in range(2, most + 1) for prefill in range(1, gpus)]
    assert (limits.prefill_gpus, limits.decode_gpus) == (1, 1)
    for workers in splits:
        if run(search, workers).is_kept:
            return workers
    whole = (run(search, each, is_whole=True) for each in splits if limits.gpus(each) == most)
    return max(whole, key=lambda each: each.in_time).workers


def _begin_of(hour: SimulateOptions) -> SimulateOptions:
    return replace(hour, trace=hour.trace.replace("duration=3600", f"duration={DURATION_S}"))


def _workers(split: PoolSizes) -> int:
    return split.prefill + split.decode
