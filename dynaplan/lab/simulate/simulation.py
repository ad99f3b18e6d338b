"""Puts a simulation together: a trace, a deployment timed by a profile, and the policies to compare on it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from dynaplan.config.deadline import DEADLINE, PrefillDeadline, prefill_deadline
from dynaplan.config.planner import settings_of
from dynaplan.config.service_config import kebab_keys
from dynaplan.config.settings.forecasting import OUTSIDE_PREDICTORS, Forecast
from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.config.settings.routing import ROUTERS
from dynaplan.config.settings.worker import SimOptions, WorkerSettings
from dynaplan.engines import registry
from dynaplan.engines.timing_model.settings import EngineSettings
from dynaplan.engines.timing_model.timing import StepTiming
from dynaplan.fleet.counts import Targets
from dynaplan.fleet.desired_counts import SCALED_ROLES
from dynaplan.gateway.traced_requests import TracedRequest
from dynaplan.graph.lifecycle import Role
from dynaplan.lab.simulate.closed_loop import ClosedLoop
from dynaplan.lab.simulate.options import SimulateOptions
from dynaplan.lab.simulate.oracle.oracle import DEFAULT_EFFORT, OracleOptions, find_oracle
from dynaplan.lab.simulate.policies import PlannerPolicy
from dynaplan.lab.simulate.recommending import PolicyRecommendation, recommendation, standing_beside
from dynaplan.lab.simulate.rivals import HpaPolicy, KpaPolicy
from dynaplan.lab.simulate.run import Policy, Result, StaticPolicy, simulate
from dynaplan.planner import factory
from dynaplan.planner.forecasting.warm_start import IntervalLoad, interval_history
from dynaplan.simulation.service import ServiceSettings
from dynaplan.util.errors import ConfigError, nearest

ORACLE = "oracle"
"""The policy that is no policy: the cheapest schedule for the trace, found beforehand."""
POLICIES = ("load", "sla", "both", "formula", "static", "hpa", "kpa", ORACLE)
"""The names of the policies; ``formula`` is the SLA planner with Dynamo's formulas alone."""

HPA_TARGETS = {Role.DECODE: 0.7, Role.PREFILL: 0.35}
"""The HPA's targets, mean KV usage and queue per prefill worker: between the load planner's default
thresholds."""

KPA_UTILIZATION = 0.7
"""The part of a worker's concurrency that the KPA aims at: Knative's
``container-concurrency-target-percentage``."""

KPA_PREFILLS = 2.0
"""The prompts that a prefill worker bears: one that it computes and one that waits."""

KPA_CONTEXT_TOKENS = 2000
"""The context, in tokens, for which the batch of a decode worker is chosen."""


Watch = Callable[[str, int, float, float], None]
"""Is told the progress: the policy, the number of its pass over the trace (the oracle makes several), the
simulated seconds, and those of the whole trace."""

WATCHED_EVERY = 64
"""Requests between two of those calls."""


def run_load(options: SimulateOptions, load: Trace | ClosedLoop) -> Iterator[Result]:
    """Return the result of each policy under that load in place of the options' trace, in their order.

    Raises ConfigError at once. Under clients the oracle, which must know all requests beforehand, is not
    among the policies.
    """
    settings = service_settings(options)
    runs = [_run(name, load, options, settings) for name in options.policies]
    return (run() for run in runs)


def run_simulations(options: SimulateOptions, watch: Watch | None = None) -> Iterator[Result]:
    """Return the result of each policy on the same trace, in their order; raises ConfigError at once.

    With ``watch`` the trace is read once more beforehand, for its length.
    """
    settings = service_settings(options)
    trace = _trace(options)
    length_s = max((request.arrival_s for request in trace()), default=0.0) if watch else 0.0
    traces = [_watched(trace, name, length_s, watch) if watch else trace for name in options.policies]
    runs = [_run(name, own, options, settings) for name, own in zip(options.policies, traces, strict=True)]
    next(trace(), None)
    return (run() for run in runs)


def run_recommended(options: SimulateOptions, watch: Watch | None = None) -> PolicyRecommendation:
    """Return what the options' policies and splits that stand still recommend, with the result of each.

    The first policy is that of the deployment as it is. Each is simulated as it would be served, which is not
    how ``run_simulations`` compares them: only one that plans for targets dispatches by their deadline.
    Raises ConfigError.
    """
    results = [_served(name, options, watch) for name in options.policies]
    standing = standing_beside(results[0], service_settings(options).gpus_per_worker, options.gpus)
    results += [_served(name, options, watch) for name in standing if name not in options.policies]
    promised = settings_of(options.planner).targets()
    return recommendation(results, promised)


def _served(name: str, options: SimulateOptions, watch: Watch | None) -> Result:
    """Return the result of a policy that is the deployment's own."""
    policy = PLANNED.get(name, {}).get("policy", "load")
    own = replace(options, policies=(name,), planner={**options.planner, "policy": policy})
    return next(run_simulations(own, watch))


def _watched(trace: Trace, name: str, length_s: float, watch: Watch) -> Trace:
    """Return the same trace, whose reader's progress is told."""
    passes = itertools.count(1)

    def requests() -> Iterator[TracedRequest]:
        number = next(passes)
        for index, request in enumerate(trace()):
            if index % WATCHED_EVERY == 0:
                watch(name, number, request.arrival_s, length_s)
            yield request

    return requests


def _run(
    name: str, load: Trace | ClosedLoop, options: SimulateOptions, settings: ServiceSettings
) -> Callable[[], Result]:
    kind, _, effort = name.partition(":")
    _check_fits(name, Targets(int(options.is_disaggregated), 1), settings)
    if kind == ORACLE and not isinstance(load, ClosedLoop):
        if effort and not (effort.isdecimal() and int(effort)):
            raise ConfigError(f"policy {name!r}", hint=f"Expected {ORACLE}:EFFORT, a whole number from 1 on.")
        oracle = OracleOptions(effort=int(effort or DEFAULT_EFFORT))
        return lambda: find_oracle(load, settings, oracle).result
    policy, first = _policy(name, options, settings), _first(name, options)
    _check_fits(name, first, settings)

    def run() -> Result:
        try:
            if isinstance(load, ClosedLoop):
                return load.run(settings, first, policy)
            return simulate(load(), settings, first, policy)
        finally:
            if isinstance(policy, PlannerPolicy):
                policy.close()

    return run


def _check_fits(name: str, workers: Targets, settings: ServiceSettings) -> None:
    """Raise ConfigError when the GPUs cannot hold what a policy begins with, or the least that answers."""
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
    kinds = (PLANNED.get(name, {}).get("policy", "load") for name in options.policies)
    plans = [kind for kind in (own.get("policy", "load"), *kinds) if kind != "load"]
    return prefill_deadline(said, {**own, "policy": plans[0]} if plans else own)


def warnings(options: SimulateOptions) -> list[str]:
    """Return sentences about what the simulation cannot tell: GPUs that its profile does not time."""
    found = {}
    for role in SCALED_ROLES if options.is_disaggregated else (Role.DECODE,):
        checked = SimOptions.from_options(options.engine_of(role))
        size = checked.tensor_parallel_size
        measured = registry.measured_gpus(checked)
        if size != measured:
            name = registry.engine_profile(checked)
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
    timing, kv_tokens = registry.engine_timing(checked)
    if not checked.speedup_ratio:
        raise ConfigError("speedup-ratio is 0", hint="Expected more: without delays there is nothing to see.")
    return EngineSettings.of(checked, kv_tokens), timing.sped_up(checked.speedup_ratio)


def _trace(options: SimulateOptions) -> Trace:
    def requests() -> Iterator[TracedRequest]:
        return factory.read_requests(options.trace, options.rate_scale, options.seed)

    return requests if options.last_s is None else _end_of(requests, options.last_s)


def _end_of(trace: Trace, last_s: float) -> Trace:
    """Return the arrivals of a trace's last seconds, counted from where these begin."""

    @cache
    def begin_s() -> float:
        return max(0.0, max((request.arrival_s for request in trace()), default=0.0) - last_s)

    def requests() -> Iterator[TracedRequest]:
        for request in trace():
            if request.arrival_s >= begin_s():
                yield replace(request, arrival_s=request.arrival_s - begin_s())

    return requests


def _first(name: str, options: SimulateOptions) -> Targets:
    kind, _, workers = name.partition(":")
    if kind == "static":
        return _static_targets(name, workers, options)
    return options.first or Targets(int(options.is_disaggregated), 1)


def _policy(name: str, options: SimulateOptions, settings: ServiceSettings) -> Policy:
    kind, _, rest = name.partition(":")
    if kind not in POLICIES:
        raise ConfigError(f"policy {name!r} is unknown", hint=nearest(kind, POLICIES))
    if kind == "static":
        return StaticPolicy(name)
    if rest:
        raise ConfigError(f"policy {name!r}", hint=f"Expected {kind} alone.")
    if kind in PLANNED:
        planner = _planner_settings({**options.planner, **PLANNED[kind]}, options, settings)
        model = None
        if planner.is_by_targets:
            prefill = options.engine_of(Role.PREFILL)
            mode = options.routing.mode
            model = factory.sla_model(planner, options.engine, mode, prefill_engine=prefill)
        return PlannerPolicy(name, planner, model, before=_warm_up(planner), method=_outside_method(planner))
    roles = settings.gpus_per_worker
    if kind == "hpa":
        return HpaPolicy({role: HPA_TARGETS[role] for role in roles})
    _, timing = settings.engines[Role.DECODE]
    bearable = {Role.PREFILL: KPA_PREFILLS, Role.DECODE: bearable_batch(timing, options.slo.itl_ms)}
    return KpaPolicy({role: max(1.0, KPA_UTILIZATION * bearable[role]) for role in roles})


def bearable_batch(timing: StepTiming, itl_ms: float, context_tokens: int = KPA_CONTEXT_TOKENS) -> int:
    """Return the largest batch of sequences of that context whose step meets the ITL target; at least 1."""
    batch = 1
    while batch < 4096 and timing.decode_ms(batch + 1, (batch + 1) * context_tokens) <= itl_ms:
        batch += 1
    return batch


def _warm_up(planner: PlannerSettings) -> list[IntervalLoad]:
    trace = planner.load_predictor_warmup_trace
    if not planner.is_by_targets or not trace:
        return []
    return interval_history(factory.read_requests(trace, 1.0, 1), planner.adjustment_interval_s)


def _outside_method(planner: PlannerSettings) -> OutsideMethod | None:
    if not planner.is_by_targets or planner.load_predictor not in OUTSIDE_PREDICTORS:
        return None
    return OutsideMethod(planner)


class OutsideMethod:
    """Forecasts that a library computes in another process; virtual time stands still meanwhile."""

    def __init__(self, planner: PlannerSettings) -> None:
        patient = replace(planner, load_predictor_deadline_s=PATIENCE_S)
        self._forecaster = factory.make_forecaster(patient, planner.adjustment_interval_s)
        self._runner = asyncio.Runner()

    def __call__(self, history: Sequence[float | None], steps: int, *, is_count: bool) -> Forecast:
        """Forecast as ``dynaplan.planner.ports.Forecaster``."""
        return self._runner.run(self._forecaster.forecast(history, steps, is_count=is_count))

    def close(self) -> None:
        """End the forecasting process, and the event loop that talks to it."""
        self._runner.run(self._forecaster.close())
        self._runner.close()


PATIENCE_S = 600.0
"""Seconds that a forecast may take here: virtual time does not pass, so none is ever too late."""


PLANNED: Mapping[str, Mapping[str, Any]] = {
    "load": {"policy": "load"},
    "sla": {"policy": "sla"},
    "both": {"policy": "both"},
    "formula": {"policy": "sla", "sizing": "formula"},
}
"""The policies of the planner itself: the options that make each of them."""


def _planner_settings(
    given: Mapping[str, Any], options: SimulateOptions, settings: ServiceSettings
) -> PlannerSettings:
    gpus = {f"{role.value}-engine-num-gpu": count for role, count in settings.gpus_per_worker.items()}
    slo = {"ttft": options.slo.ttft_ms, "itl": options.slo.itl_ms}
    profile = {"profile-results-dir": registry.engine_profile(SimOptions.from_options(options.engine))}
    deadline = {DEADLINE: settings.disaggregation.prefill_deadline_ms}
    known = kebab_keys(given)
    return settings_of({"max-gpu-budget": options.gpus, **profile, **known, **gpus, **slo, **deadline})


def _static_targets(name: str, workers: str, options: SimulateOptions) -> Targets:
    numbers = workers.split(",")
    expected = "static:P,D" if options.is_disaggregated else "static:N"
    if len(numbers) != 1 + options.is_disaggregated or not all(map(str.isdecimal, numbers)):
        raise ConfigError(f"policy {name!r}", hint=f"Expected {expected}, numbers of workers.")
    *prefill, decode = map(int, numbers)
    if not decode:
        raise ConfigError(f"policy {name!r}", hint="Expected a decode worker: nobody else answers.")
    return Targets(prefill[0] if prefill else 0, decode)
