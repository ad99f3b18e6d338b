"""Puts a simulation together: a trace, a deployment timed by a profile, and the policies to compare on it.

**Recommendation** of a recording: the deployment as it is, beside other policies, the best static split, and
other settings of the engine and of the planner (``settings_tried.py``).
The promise is a condition and GPU-hours are the price: of all that kept the promise the cheapest is
recommended, and where nothing kept it, the one with most of its requests in time. A simulation is a model, so
the deployment stays as it is unless the difference is above a tolerance.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

from dynaplan.config.frontend import DEADLINE, PrefillDeadline, prefill_deadline
from dynaplan.config.planner import settings_of
from dynaplan.config.service_config import kebab_keys
from dynaplan.config.settings.fields import FUNCTION, OFF
from dynaplan.config.settings.frontend import ROUTERS
from dynaplan.config.settings.planner import OUTSIDE_PREDICTORS, Forecast, PlannerSettings, SlaTargets
from dynaplan.config.settings.worker import SimOptions, WorkerSettings
from dynaplan.contract.counts import PoolSizes
from dynaplan.contract.store_keys import SCALED_ROLES
from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.engines.sim.profiles import profile_tp_size, timing_for
from dynaplan.engines.timing_model.engine_model import EngineSettings
from dynaplan.engines.timing_model.step_timing import StepTiming
from dynaplan.graph.lifecycle import Role
from dynaplan.lab.simulate.options import SimulateOptions
from dynaplan.lab.simulate.planner_policy import PlannerPolicy
from dynaplan.lab.simulate.settings_tried import MARK, settings_beside
from dynaplan.planner.forecasting.library_forecaster import make_forecaster
from dynaplan.planner.forecasting.traffic_history import IntervalLoad, interval_history
from dynaplan.planner.own_policy import load_own_policy
from dynaplan.planner.rules.sla_policy import PerformanceModel
from dynaplan.planner.sla_model import build_sla_model, has_profile
from dynaplan.planner.step_learning import StepLearning, simulated_learning
from dynaplan.simulation.best_static import BEST_STATIC, BestStatic, find_best_static
from dynaplan.simulation.run import ClosedLoop, Policy, Result, StaticPolicy, simulate
from dynaplan.simulation.simulated_service import ServiceSettings
from dynaplan.simulation.traces.reading import read_requests
from dynaplan.util.errors import ConfigError, nearest

ATTAINMENT_TOLERANCE = 0.01
"""The part of the requests below which a difference in time is none."""
GPU_HOURS_TOLERANCE = 0.05
"""The part of the GPU-hours below which a difference is none; likewise."""

CANDIDATES = ("load", "sla", BEST_STATIC)
"""The policies that are tried beside the one that a deployment has."""


@dataclass(frozen=True)
class PolicyRecommendation:
    """The policy that a recording recommends, or the deployment's own where none is better; why, in words."""

    policy: str
    words: str
    results: Sequence[Result]


def candidates_beside(own: str) -> tuple[str, ...]:
    """Return the deployment's own policy and the others that are tried."""
    return own, *(each for each in CANDIDATES if each != own)


def compare_results(results: Sequence[Result], promised: SlaTargets) -> PolicyRecommendation:
    """Return what the results recommend; the first is that of the deployment as it is."""
    own, kept = results[0], [each for each in results if each.outcome.keeps(promised)]
    if kept:
        best = min(kept, key=lambda each: each.gpu_hours)
        is_better = not own.outcome.keeps(promised) or best.gpu_hours < own.gpu_hours * (
            1 - GPU_HOURS_TOLERANCE
        )
        told = "keeps the promise"
    else:
        best = max(results, key=_in_time)
        is_better = _in_time(best) > _in_time(own) + ATTAINMENT_TOLERANCE
        told = "keeps the promise least badly; nothing that was tried keeps it"
    if not is_better:
        words = f"stay with {own.policy}: {_figures(own)}. Nothing else is better"
        return PolicyRecommendation(own.policy, words, results)
    words = (
        f"{describe_change(best.policy)}: {_figures(best)}, where {own.policy} had {_figures(own)}. It {told}"
    )
    return PolicyRecommendation(best.policy, words, results)


def describe_change(policy: str) -> str:
    """Say what a user sets to have that policy."""
    _, mark, setting = policy.partition(MARK)
    if mark:
        return f"set --{setting}"
    kind, _, workers = policy.partition(":")
    if kind != BEST_STATIC:
        return f"set --Planner.policy={kind}"
    *prefill, decode = workers.split(",")
    split = f"{prefill[0]} prefill and {decode} decode" if prefill else decode
    return f"stop scaling and keep {split} workers"


def _figures(result: Result) -> str:
    return f"{_in_time(result):.1%} in time with {_mean_gpus(result):.1f} GPUs"


def _in_time(result: Result) -> float:
    return result.outcome.attainment(result.outcome.both_met)


def _mean_gpus(result: Result) -> float:
    return result.gpu_hours * 3600 / result.trace_s if result.trace_s else 0.0


POLICIES = ("load", "sla", "both", "formula", "static", BEST_STATIC)
"""The names of the policies; ``formula`` is the SLA planner with Dynamo's formulas alone."""

ProgressCallback = Callable[[str, int, float, float], None]
"""Gets the progress: the policy, the number of its pass over the trace (best-static makes several), the
simulated seconds, and those of the whole trace."""

PROGRESS_EVERY = 64
"""Requests between two of those calls."""


def run_load(options: SimulateOptions, load: Trace | ClosedLoop) -> Iterator[Result]:
    """Yield the result of each policy under that load in place of the options' trace, in their order.

    Raises ConfigError at once, not with the first result.
    """
    settings = service_settings(options)
    runs = [_run(name, load, options, settings) for name in options.policies]
    return (run() for run in runs)


def run_simulations(options: SimulateOptions, watch: ProgressCallback | None = None) -> Iterator[Result]:
    """Yield the result of each policy on the same trace, in their order.

    Raises ConfigError at once, not with the first result. With ``watch`` the trace is read once more
    beforehand, for its length.
    """
    settings = service_settings(options)
    trace = _ReadAhead(_trace(options))
    length_s = max((request.arrival_s for request in trace()), default=0.0) if watch else 0.0
    traces = [_report_progress(trace, name, length_s, watch) if watch else trace for name in options.policies]
    runs = [_run(name, own, options, settings) for name, own in zip(options.policies, traces, strict=True)]
    trace.begin()
    return (run() for run in runs)


def recommend_policy(options: SimulateOptions, watch: ProgressCallback | None = None) -> PolicyRecommendation:
    """Return what the results of the options' policies, and of other settings of the first, recommend.

    The first policy is that of the deployment as it is. Each is simulated as it would be served, which is not
    how ``run_simulations`` compares them: only one that plans for targets dispatches by their deadline.
    Raises ConfigError.
    """
    results = [_simulate_served(name, options, watch) for name in options.policies]
    own = options.policies[0]
    for tried in settings_beside(_served(own, options)):
        result = _simulate_served(own, tried.options, watch)
        results.append(replace(result, policy=tried.name_beside(own)))
    return compare_results(results, _promise(options, service_settings(options)))


def _simulate_served(name: str, options: SimulateOptions, watch: ProgressCallback | None) -> Result:
    """Return the result of a policy as if it were the deployment's own, which decides on the dispatch."""
    return next(run_simulations(_served(name, options), watch))


def _served(name: str, options: SimulateOptions) -> SimulateOptions:
    """Return the simulation of one policy as the deployment's own; a static one plans for no targets."""
    untuned = _untuned(name, options.policies[:1])
    planner = {**options.planner, "policy": "load", **_planned(name), **untuned}
    return replace(options, policies=(name,), planner=planner)


def _report_progress(trace: Trace, name: str, length_s: float, watch: ProgressCallback) -> Trace:
    """Return the same trace, which reports how far it has been read."""
    passes = itertools.count(1)

    def requests() -> Iterator[TracedRequest]:
        number = next(passes)
        for index, request in enumerate(trace()):
            if index % PROGRESS_EVERY == 0:
                watch(name, number, request.arrival_s, length_s)
            yield request

    return requests


def _run(
    name: str, load: Trace | ClosedLoop, options: SimulateOptions, settings: ServiceSettings
) -> Callable[[], Result]:
    _check_gpus(name, PoolSizes(int(options.is_disaggregated), 1), settings)
    if name == BEST_STATIC:
        promise = _promise(options, settings)
        run_split = partial(_simulate, load, settings, StaticPolicy())
        return lambda: find_best_static(run_split, settings, promise).summarize(promise, settings.gpus)
    policy, first = _policy(name, options, settings), _first(name, options)
    _check_gpus(name, first, settings)

    def run() -> Result:
        try:
            return _simulate(load, settings, policy, first)
        finally:
            if isinstance(policy, PlannerPolicy):
                policy.close()

    return run


def best_static(options: SimulateOptions) -> BestStatic:
    """Return the best static split for the options' trace and promise. Raises ConfigError."""
    settings = service_settings(options)
    run_split = partial(_simulate, _trace(options), settings, StaticPolicy())
    return find_best_static(run_split, settings, _promise(options, settings))


def _simulate(
    load: Trace | ClosedLoop, settings: ServiceSettings, policy: Policy, first: PoolSizes
) -> Result:
    if isinstance(load, ClosedLoop):
        return load.run(settings, first, policy)
    return simulate(load(), settings, first, policy)


def _promise(options: SimulateOptions, settings: ServiceSettings) -> SlaTargets:
    """Return what the options' planner promises, whatever it sets of workers; raises ConfigError."""
    return _planner_settings({**options.planner, **UNTUNED}, options, settings).targets()


def _check_gpus(name: str, workers: PoolSizes, settings: ServiceSettings) -> None:
    """Raise ConfigError when the GPUs cannot hold these workers, which the policy of that name needs."""
    needed = sum(workers.of(role) * gpus for role, gpus in settings.gpus_per_worker.items())
    if needed > settings.gpus:
        raise ConfigError(
            f"policy {name!r}: {workers} need {needed} GPUs, but --gpus is {settings.gpus}",
            hint="Expected more GPUs, or fewer workers to begin with.",
        )


Trace = Callable[[], Iterator[TracedRequest]]
"""Gives the same requests whenever it is called."""


def service_settings(options: SimulateOptions) -> ServiceSettings:
    """Return the deployment: every worker of a role one engine of that role's options. Raises ConfigError."""
    if options.routing.mode not in ROUTERS:
        hint = f"Expected one of: {', '.join(ROUTERS)}."
        raise ConfigError(f"router: {options.routing.mode!r}", hint=hint)
    roles = SCALED_ROLES if options.is_disaggregated else (Role.DECODE,)
    checked = {role: SimOptions.from_options(options.engine_of(role)) for role in roles}
    prefills = WorkerSettings.from_options(options.engine_of(Role.PREFILL))
    return ServiceSettings(
        engines={role: _engine(own) for role, own in checked.items()},
        gpus=options.gpus,
        gpus_per_worker={role: own.tensor_parallel_size for role, own in checked.items()},
        startup_s=dict.fromkeys(roles, options.startup_time_s),
        routing=options.routing,
        disaggregation=replace(
            options.disaggregation,
            is_on=options.is_disaggregated,
            prefill_deadline_ms=deadline_of(options).ms,
        ),
        concurrent_prefills=prefills.max_concurrent_prefills,
        max_waiting_requests=options.max_waiting_requests,
        prefill_wait_s=options.prefill_wait_s,
        slo=options.slo,
        seed=options.seed,
    )


def deadline_of(options: SimulateOptions) -> PrefillDeadline:
    """Return the deadline that queued prompts are dispatched by, as in ``dynaplan serve``.

    Where any of the policies plans for targets it holds for all of them: they are compared under the same
    dispatch.
    """
    said = replace(options.disaggregation, is_on=options.is_disaggregated)
    own = {**kebab_keys(options.planner), "ttft": options.slo.ttft_ms}
    kinds = (_planned(name).get("policy", "load") for name in options.policies)
    plans = [kind for kind in (own.get("policy", "load"), *kinds) if kind != "load"]
    return prefill_deadline(said, {**own, "policy": plans[0]} if plans else own)


def warnings(options: SimulateOptions) -> list[str]:
    """Return a sentence for each number of GPUs of a worker that its profile has no times of."""
    found = {}
    for role in SCALED_ROLES if options.is_disaggregated else (Role.DECODE,):
        checked = SimOptions.from_options(options.engine_of(role))
        size = checked.tensor_parallel_size
        measured = profile_tp_size(checked)
        if size != measured:
            name = checked.profile_name
            found[name, size] = (
                f"the profile {name} was measured with tensor-parallel-size {measured}: a worker of "
                f"{size} GPUs is timed as one of {measured}"
            )
    return list(found.values())


def _engine(checked: SimOptions) -> tuple[EngineSettings, StepTiming]:
    if checked.startup_time_s:
        raise ConfigError(
            f"startup-time of the engine is {checked.startup_time_s:g}",
            hint="Expected it as --startup-time here: the whole time until a worker is ready.",
        )
    timing, kv_tokens = timing_for(checked)
    if not checked.speedup_ratio:
        raise ConfigError("speedup-ratio is 0", hint="Expected more: without delays there is nothing to see.")
    return EngineSettings.of(checked, kv_tokens), timing.with_speedup(checked.speedup_ratio)


class _ReadAhead:
    """A trace whose beginning is read before anybody asks for it; the first pass over it goes on from there.

    To put the first request in order, 65,536 are read.
    """

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._begun: Iterator[TracedRequest] | None = None

    def begin(self) -> None:
        """Read until the first request; raises ConfigError for what is no trace."""
        requests = self._trace()
        first = list(itertools.islice(requests, 1))
        self._begun = itertools.chain(first, requests)

    def __call__(self) -> Iterator[TracedRequest]:
        begun, self._begun = self._begun, None
        return begun or self._trace()


def _trace(options: SimulateOptions) -> Trace:
    def requests() -> Iterator[TracedRequest]:
        return read_requests(options.trace, options.rate_scale, options.seed)

    return requests if options.last_s is None else _end_of(requests, options.last_s)


def _end_of(trace: Trace, last_s: float) -> Trace:
    """Return the arrivals of a trace's last seconds, counted from where these begin."""

    @cache
    def begin_s() -> float:
        return max(0.0, max((request.arrival_s for request in trace()), default=0.0) - last_s)

    def requests() -> Iterator[TracedRequest]:
        for request in trace():
            if request.arrival_s >= begin_s():
                yield request._replace(arrival_s=request.arrival_s - begin_s())

    return requests


def _first(name: str, options: SimulateOptions) -> PoolSizes:
    kind, _, workers = name.partition(":")
    if kind == "static":
        return _static_targets(name, workers, options)
    return options.first or PoolSizes(int(options.is_disaggregated), 1)


def _policy(name: str, options: SimulateOptions, settings: ServiceSettings) -> Policy:
    kind, _, rest = name.partition(":")
    if kind not in POLICIES and not _is_function(name):
        raise ConfigError(f"policy {name!r} is unknown", hint=nearest(kind, POLICIES))
    if kind == "static":
        return StaticPolicy(name)
    if rest and kind in POLICIES:
        raise ConfigError(f"policy {name!r}", hint=f"Expected {kind} alone.")
    given = {**options.planner, **_planned(name), **_untuned(name, options.policies)}
    planner = _planner_settings(given, options, settings)
    model = None
    if planner.is_by_targets:
        prefill = options.engine_of(Role.PREFILL)
        model = build_sla_model(planner, options.engine, options.routing.mode, prefill_engine=prefill)
    return PlannerPolicy(
        name,
        planner,
        model,
        before=_warm_up(planner),
        method=_library_forecasts(planner),
        own_policy=load_own_policy(planner),
        learning=_learning(planner, model, options) if model else None,
    )


def _learning(
    planner: PlannerSettings, model: PerformanceModel, options: SimulateOptions
) -> StepLearning | None:
    """Return what learns the engines' steps.

    None where the planner's profile is the simulated engines' own.
    """
    if planner.profile_results_dir == SimOptions.from_options(options.engine).profile_name:
        return None
    return simulated_learning(model.service, is_needed=not has_profile(planner))


def _warm_up(planner: PlannerSettings) -> list[IntervalLoad]:
    trace = planner.load_predictor_warmup_trace
    if not planner.sees_traffic or not trace:
        return []
    return interval_history(read_requests(trace, 1.0, 1), planner.adjustment_interval_s)


def _library_forecasts(planner: PlannerSettings) -> LibraryForecasts | None:
    if not planner.sees_traffic or planner.load_predictor not in OUTSIDE_PREDICTORS:
        return None
    return LibraryForecasts(planner)


class LibraryForecasts:
    """Forecasts that a library computes in another process; virtual time does not pass meanwhile."""

    def __init__(self, planner: PlannerSettings) -> None:
        patient = replace(planner, load_predictor_deadline_s=PATIENCE_S)
        self._forecaster = make_forecaster(patient, planner.adjustment_interval_s)
        self._runner = asyncio.Runner()

    def __call__(self, history: Sequence[float | None], steps: int) -> Forecast:
        """Forecast as ``dynaplan.planner.ports.Forecaster``."""
        return self._runner.run(self._forecaster.forecast(history, steps))

    def close(self) -> None:
        """End the forecasting process, and the event loop that talks to it."""
        self._runner.run(self._forecaster.close())
        self._runner.close()


PATIENCE_S = 600.0
"""Seconds that a forecast may take here: virtual time does not pass, so none is ever too late."""


TUNING = frozenset({"sla", "both"})
"""The policies that can set something of running workers."""

UNTUNED = {"max-running-requests": OFF, "max-local-prefill-length": OFF, "adjust-knobs": False}


def _untuned(name: str, policies: Sequence[str]) -> Mapping[str, object]:
    """Return options that take back what a policy cannot set, where it is meant for another of them.

    Where it is meant for none of them it is refused, as in ``dynaplan serve``.
    """
    return UNTUNED if name not in TUNING and TUNING & set(policies) else {}


PLANNED: Mapping[str, Mapping[str, Any]] = {
    "load": {"policy": "load"},
    "sla": {"policy": "sla"},
    "both": {"policy": "both"},
    "formula": {"policy": "sla", "sizing": "formula"},
}
"""The policies of the planner itself: the options that make each of them."""


def _planned(name: str) -> Mapping[str, Any]:
    """Return the options of the planner that make a policy; none where no planner decides."""
    return {"policy": name} if _is_function(name) else PLANNED.get(name, {})


def _is_function(name: str) -> bool:
    """Tell whether a policy is a function of the user's; ``static:1,2`` has a colon, too."""
    return name.partition(":")[0] not in POLICIES and FUNCTION.fullmatch(name) is not None


def _planner_settings(
    given: Mapping[str, Any], options: SimulateOptions, settings: ServiceSettings
) -> PlannerSettings:
    gpus = {f"{role.value}-engine-num-gpu": count for role, count in settings.gpus_per_worker.items()}
    slo = {"ttft": options.slo.ttft_ms, "itl": options.slo.itl_ms}
    profile = {"profile-results-dir": SimOptions.from_options(options.engine).profile_name}
    deadline = {DEADLINE: settings.disaggregation.prefill_deadline_ms}
    known = kebab_keys(given)
    return settings_of({"max-gpu-budget": options.gpus, **profile, **known, **gpus, **slo, **deadline})


def _static_targets(name: str, workers: str, options: SimulateOptions) -> PoolSizes:
    numbers = workers.split(",")
    expected = "static:P,D" if options.is_disaggregated else "static:N"
    if len(numbers) != 1 + options.is_disaggregated or not all(map(str.isdecimal, numbers)):
        raise ConfigError(f"policy {name!r}", hint=f"Expected {expected}, numbers of workers.")
    *prefill, decode = map(int, numbers)
    if not decode:
        raise ConfigError(f"policy {name!r}", hint="Expected a decode worker: nobody else answers.")
    return PoolSizes(prefill[0] if prefill else 0, decode)
