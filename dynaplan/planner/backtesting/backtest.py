"""Answers a question: the service is simulated as the planner knows it, from its settings and its model."""

from __future__ import annotations

from dynaplan.config.settings.frontend import DisaggregationSettings
from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.contract.store_keys import SCALED_ROLES
from dynaplan.graph.lifecycle import Role
from dynaplan.planner.backtesting.drawn_requests import draw_window
from dynaplan.planner.backtesting.option_trials import try_options
from dynaplan.planner.backtesting.record import DrawnWindow, hold_to_record
from dynaplan.planner.backtesting.runs import KeptRuns
from dynaplan.planner.backtesting.schedule import Question
from dynaplan.planner.backtesting.search import Search, Trial, find_cheapest
from dynaplan.planner.model import BacktestResult, Corrections, SplitTrial, WorkerLimits
from dynaplan.planner.rules.sla_policy import PerformanceModel, apply_corrections
from dynaplan.planner.sizing.queueing.queueing_model import QueueingModel
from dynaplan.simulation.outcome import Slo
from dynaplan.simulation.router import SimulatedRouting
from dynaplan.simulation.simulated_service import UNLIMITED_QUEUE, ServiceSettings

MAX_COMPARED = 4
"""Splits that an answer keeps, its own first and then those that cost as little."""

MAX_STOOD = 2
"""Splits that stood of which an answer keeps the record, the last one first."""


def backtest(
    model: PerformanceModel, settings: PlannerSettings, question: Question, runs: KeptRuns | None = None
) -> BacktestResult:
    """Return the cheapest split for the question's traffic; takes seconds of CPU time.

    With the ``runs`` of the planner's last backtest it goes on where that stopped.
    """
    model, runs = model.with_learnt(question.learnt), runs or KeptRuns()
    intervals = question.intervals

    def build(corrections: Corrections) -> ServiceSettings:
        service = apply_corrections(model, corrections, question.present)
        return simulated_service(service, settings, question.limits)

    drawn = draw_window(intervals, model.service.decode.settings)
    fitted = () if settings.no_correction else _fitted_roles(question)
    corrections, stood = hold_to_record(
        build, DrawnWindow(drawn, intervals), question.corrections, fitted, runs
    )
    search = Search(
        build(corrections),
        drawn,
        question.may_miss,
        question.present,
        question.limits,
        runs,
        stood,
    )
    best, trials = find_cheapest(search, question.begin)
    others = sorted(
        (each for each in trials if each is not best), key=lambda each: (each.gpus, -each.in_time)
    )
    is_ended = not best.is_kept and best.progress < 1
    return BacktestResult(
        best.workers,
        f"none of the {len(trials)} splits that were tried keeps the promise" if is_ended else "",
        requests=search.requests,
        window_s=sum(each.length_s for each in question.intervals),
        tried=tuple(map(_as_tried, (best, *others[: MAX_COMPARED - 1]))),
        corrections=corrections,
        stood=stood.splits[:MAX_STOOD],
        is_held=bool(stood.ttft_shift or stood.itl_shift or stood.worse),
        best_trial=try_options(search, settings) if question.tries_options else None,
    )


def _fitted_roles(question: Question) -> list[Role]:
    """Return the roles whose step times need a factor: those of a profile; learnt ones need none."""
    there = [role for role in SCALED_ROLES if role is Role.DECODE or question.present.prefill]
    return [role for role in there if not question.learnt.counts(role)]


def simulated_service(
    service: QueueingModel, settings: PlannerSettings, limits: WorkerLimits
) -> ServiceSettings:
    """Return the service as it is simulated: prefill workers, where there are any, compute every prompt."""
    decode, prefill = service.decode, service.prefill
    engines, gpus = {Role.DECODE: (decode.settings, decode.timing)}, {Role.DECODE: limits.decode_gpus}
    if prefill:
        engines[Role.PREFILL] = prefill.settings, prefill.timing
        gpus[Role.PREFILL] = limits.prefill_gpus
    return ServiceSettings(
        engines=engines,
        gpus=limits.max_gpus,
        gpus_per_worker=gpus,
        startup_s=dict.fromkeys(gpus, 0.0),
        routing=SimulatedRouting(settings.router or SimulatedRouting.mode),
        disaggregation=DisaggregationSettings(
            is_on=prefill is not None,
            max_prefill_queue_size=UNLIMITED_QUEUE,
            prefill_deadline_ms=settings.prefill_deadline_ms,
        ),
        concurrent_prefills=prefill.concurrent_prefills if prefill else 1,
        slo=Slo(settings.ttft_ms, settings.itl_ms),
    )


def _as_tried(trial: Trial) -> SplitTrial:
    return SplitTrial(trial.workers, trial.gpus, round(trial.in_time, 4), trial.progress < 1)
