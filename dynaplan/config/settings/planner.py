"""The planner's options: the names and defaults of the load planner's documentation, and a few of our own.

The planner's section has three parts: what is promised and how workers are counted for it (``SlaSettings``),
how the load is forecast (``ForecastSettings``), and all else (``PlannerSettings``, which has them all).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

from dynaplan.config.settings.fields import NO_EFFECT, OFF, READ, WRITTEN, Settings, kebab, option
from dynaplan.config.settings.frontend import ROUTERS, ComponentSettings
from dynaplan.config.settings.servers import MessagingSettings
from dynaplan.util.errors import ConfigError

SIZINGS = ("queueing", "formula")
"""Ways of sizing: the queueing model, or the formulas of Dynamo's planner."""

AUTO = "auto"
"""The choice of an option whose value the planner computes."""


@dataclass(frozen=True)
class SlaSettings(Settings):
    """Every option of sizing for targets, by Dynamo's names and defaults, and a few of our own."""

    SECTION: ClassVar[str] = "Planner"

    ttft_ms: float = option(500.0, "Time to the first token that is promised, ms", above=0)
    itl_ms: float = option(50.0, "Time between tokens that is promised, ms", above=0)
    ttft_percentile: float = option(95.0, "Per cent of the requests that get the TTFT", above=0, below=100)
    itl_percentile: float = option(95.0, "Per cent of the requests that get the ITL", above=0, below=100)
    slo_window_s: float = option(
        3600.0, "Seconds over which the percentiles are promised, and backtests look back", minimum=0
    )
    isl_tokens: int = option(3000, "Length of prompts until one has been seen", minimum=1)
    osl_tokens: int = option(500, "Length of answers until one has been seen", minimum=1)
    profile_results_dir: str = option(
        "profiling_results",
        "Directory of the engine's profile, the name of a shipped one, or `learnt` for none",
        default_text="of the simulated engine in a graph its own, else `profiling_results`, or none",
        path=READ,
    )
    no_correction: bool = option(False, "Trust the profile: fit no factor of its times to what is measured")
    sizing: str = option("queueing", "How workers are counted", choices=SIZINGS)
    max_running_requests: str | int = option(
        OFF,
        "Requests that run at once on a worker; others wait in the frontend where the TTFT has room",
        choices=(OFF, AUTO),
        or_count=True,
    )
    max_local_prefill_length: str = option(
        OFF,
        "Let the planner set the frontend's option of that name by the load, with `conditional-disagg`",
        choices=(OFF, AUTO),
    )
    adjust_knobs: bool = option(
        False,
        "Change the engines' `max-num-batched-tokens` and `max-num-seqs` where a backtest is sure to gain",
    )

    @property
    def tuned(self) -> dict[str, str | int]:
        """The options of running workers that the planner is to change, with their values."""
        asked = {
            "max-running-requests": self.max_running_requests,
            "max-local-prefill-length": self.max_local_prefill_length,
        }
        return {name: value for name, value in asked.items() if value != OFF}

    def targets(self) -> SlaTargets:
        return SlaTargets(self.ttft_ms, self.itl_ms, self.ttft_percentile, self.itl_percentile)


@dataclass(frozen=True)
class SlaTargets:
    """The promise: TTFT and ITL in ms, and the per cent of the requests that get each.

    The ITL of a request is the mean over its tokens after the first.
    """

    ttft_ms: float = 500.0
    itl_ms: float = 50.0
    ttft_percentile: float = 95.0
    itl_percentile: float = 95.0

    @property
    def ttft_rest(self) -> float:
        """Part of the requests, 0 to 1, whose TTFT may exceed the target."""
        return 1 - self.ttft_percentile / 100

    @property
    def itl_rest(self) -> float:
        """Part of the requests, 0 to 1, whose ITL may exceed the target."""
        return 1 - self.itl_percentile / 100


PREDICTORS = ("constant", "arima", "kalman", "prophet")
"""The values of ``load-predictor``; the original's."""

OUTSIDE_PREDICTORS = ("arima", "prophet")
"""The predictors that a library computes in a process of its own; the core computes the others."""

HISTORY_INTERVALS = 500
"""The number of newest intervals of a history that are used; older ones need not be kept."""


@dataclass(frozen=True)
class Forecast:
    """The expected value of one curve; never negative, never NaN.

    ``method`` is what computed it: the last value's (``constant``) where another one failed or is warming up;
    ``why`` says so. Not ``is_known`` means that nothing was ever measured: the value is 0 then and says
    nothing."""

    value: float
    method: str
    why: str
    is_known: bool = True


@dataclass(frozen=True)
class ForecastSettings(Settings):
    """Every option of forecasting, by Dynamo's names.

    The variances of the Kalman filter are per interval, in the square of the curve's unit (of its logarithm
    with ``load_predictor_log1p``).
    """

    SECTION: ClassVar[str] = "Planner"

    load_predictor: str = option("kalman", "How the load is forecast", choices=PREDICTORS)
    load_predictor_log1p: bool = option(False, "Forecast the logarithm of the load: for load that multiplies")
    load_predictor_warmup_trace: str | None = option(
        None, "A trace file that the history begins with", path=READ
    )
    load_predictor_deadline_s: float = option(
        10.0, "Seconds that arima and prophet may take; then the last value stands in", above=0
    )
    prophet_window_size: int = option(50, "Intervals that prophet looks back", minimum=2)
    kalman_q_level: float = option(1.0, "Variance by which the load's level moves in an interval", minimum=0)
    kalman_q_trend: float = option(0.1, "Variance by which the load's trend moves in an interval", minimum=0)
    kalman_r: float = option(10.0, "Variance of one measurement", above=0)
    kalman_min_points: int = option(5, "Measurements before which the last one is the forecast", minimum=1)


NEW_DECODE_WORKER_GRACE_PERIOD = 3
"""Intervals without removal after one that added a decode worker: it has to fill its KV cache first."""

NEW_PREFILL_WORKER_QUEUE_BUFFER_PERIOD = 3
"""Intervals that the trend of the prefill queue is followed ahead before a prefill worker is added."""

KV_USAGE_PER_WAITING_REQUEST = 0.02
"""The part of the KV cache (0 to 1) that one waiting request adds to a worker\'s usage.

Source: Dynamo 0.2 to 0.3, components/planner.py.
"""

LOCAL, VIRTUAL, KUBERNETES = "local", "virtual", "kubernetes"
ENVIRONMENTS = (LOCAL, VIRTUAL, KUBERNETES)
"""The first two write the desired counts as the virtual connector's keys: a fleet plugin carries them out, or
with ``virtual`` a program of the user's. ``kubernetes`` scales workloads of a cluster."""


AS_THE_GRAPH = "as the graph says"

MINIMUMS = {"min-gpu-budget", "min-endpoint"}
"""Options that state the same minimum: one given replaces the other's value."""

POLICIES = ("load", "sla", "both")
"""Workers are counted by thresholds, by targets, or by thresholds with the targets' number as a floor."""


def _of_workers(about: str, role: str, same_as: str, shown: str = AS_THE_GRAPH) -> Any:
    """Declare a planner's option for a size that workers of the role have as their option ``same_as``."""
    return option(None, about, minimum=1, default_text=shown, same_as=(role, same_as))


@dataclass(frozen=True)
class PlannerSettings(ForecastSettings, SlaSettings, ComponentSettings, MessagingSettings):
    """Every option of the planner. Intervals are in seconds.

    The thresholds are per worker: requests in the prefill queue for each prefill worker, and the mean KV
    usage (0 to 1) of the decode workers.
    """

    namespace: str = option(
        "dynamo", "Namespace that the planner looks at; in a graph's file that of the graph"
    )
    policy: str = option("load", "What workers are counted by", choices=POLICIES, or_function=True)
    environment: str = option(
        LOCAL,
        "local: `serve` carries decisions out; virtual: a program of yours, see `orchestrate`; kubernetes: "
        "the planner scales a cluster",
    )
    backend: str | None = option(None, NO_EFFECT)
    served_model_name: str | None = option(
        None, "The model whose traffic counts", default_text="that of all models"
    )
    no_operation: bool = option(False, "Observe, decide and record, but change nothing")
    log_dir: str | None = option(
        None, "Directory for decisions.jsonl and the TensorBoard events", path=WRITTEN
    )
    adjustment_interval_s: float = option(
        30.0, "Seconds between scaling decisions; Dynamo's SLA planner has 180", above=0
    )
    metric_pulling_interval_s: float = option(1.0, "Seconds between metric pulls", above=0)
    max_gpu_budget: int = option(8, "GPUs that prefill and decode workers never exceed together", minimum=1)
    min_gpu_budget: int = option(1, "GPUs of either kind of worker below which none is removed", minimum=1)
    min_endpoint: int | None = option(None, "The same minimum, as a number of workers", minimum=1)
    decode_kv_scale_up_threshold: float = option(
        0.9, "Mean KV usage above which to add a decode worker", minimum=0
    )
    decode_kv_scale_down_threshold: float = option(
        0.5, "Mean KV usage below which to remove a decode worker", minimum=0
    )
    prefill_queue_scale_up_threshold: float = option(
        0.5, "Queue per prefill worker above which to add one", minimum=0
    )
    prefill_queue_scale_down_threshold: float = option(
        0.2, "Queue per prefill worker below which to remove one", minimum=0
    )
    decode_engine_num_gpu: int = option(1, "GPUs of one decode worker", minimum=1)
    prefill_engine_num_gpu: int = option(1, "GPUs of one prefill worker", minimum=1)
    router: str | None = option(
        None, "How Frontends choose a decode worker", choices=ROUTERS, default_text=AS_THE_GRAPH
    )
    prefill_deadline_ms: float | None = option(
        None,
        "How Frontends dispatch queued prompts: by this deadline, ms; 0: in the order of arrival",
        minimum=0,
        default_text=AS_THE_GRAPH,
    )
    max_model_len: int | None = _of_workers("Context in tokens", "decode", "max-model-len")
    decode_max_num_seqs: int | None = _of_workers(
        "Requests that a decode worker computes at once", "decode", "max-num-seqs"
    )
    decode_step_limit_tokens: int | None = _of_workers(
        "Tokens of one step of a decode worker", "decode", "max-num-batched-tokens"
    )
    decode_kv_total_tokens: int | None = _of_workers(
        "KV cache of a decode worker", "decode", "kv-total-tokens", "as the graph says, else the profile"
    )
    prefill_step_limit_tokens: int | None = _of_workers(
        "Tokens of one step of a prefill worker", "prefill", "max-num-batched-tokens"
    )
    max_concurrent_prefills: int | None = _of_workers(
        "Requests that a prefill worker holds at once", "prefill", "max-concurrent-prefills"
    )
    consolidation_guard: bool = option(
        True, "Remove no worker when the rest would then be over the scale-up threshold"
    )
    scaling_timeout_s: float = option(
        1800.0, "Seconds after which an unacknowledged decision blocks no longer", above=0
    )
    startup_time_s: float | None = option(
        None, "Seconds from a worker's start to ready; as it was before where not given", minimum=0
    )
    prometheus_endpoint: str | None = option(
        None, "Prometheus server to ask about traffic; without one the frontends are asked"
    )
    metric_reporting_prometheus_port: int = option(
        0, "Port of the planner's own /metrics and /health when it runs on its own; 0 for none", minimum=0
    )
    metric_reporting_prometheus_host: str = option("127.0.0.1", "Address of that port")

    @property
    def is_by_targets(self) -> bool:
        """True for the policies that plan for targets, ``sla`` and ``both``."""
        return self.policy in ("sla", "both")

    @property
    def has_step_times(self) -> bool:
        """True when a model tells how long a step takes, without which nothing of running workers is set."""
        return self.is_by_targets and self.sizing != "formula"

    @property
    def has_thresholds(self) -> bool:
        """True for the policies that add and remove workers by thresholds, ``load`` and ``both``."""
        return self.policy in ("load", "both")

    @property
    def has_own_policy(self) -> bool:
        """True when a function of the user's decides (``planner/own_policy.py``)."""
        return self.policy not in POLICIES

    @property
    def sees_traffic(self) -> bool:
        """True when requests, their lengths and latencies are measured and forecast."""
        return self.is_by_targets or self.has_own_policy

    @property
    def is_carried_out_elsewhere(self) -> bool:
        """True when a program of the user's carries decisions out: it is to finish one before the next."""
        return self.environment == VIRTUAL

    @property
    def waits_with_targets(self) -> bool:
        """True when planning for targets waits, too, until the last decision is carried out."""
        return self.is_by_targets and self.is_carried_out_elsewhere

    def overridden(self, options: Mapping[str, Any]) -> Self:
        """Return the settings with these options in place of their own; raises ConfigError."""
        given = {kebab(key): value for key, value in options.items()}
        kept = self.to_options()
        if MINIMUMS & given.keys():
            kept = {name: value for name, value in kept.items() if name not in MINIMUMS}
        return type(self).from_options({**kept, **given})

    def to_options(self) -> dict[str, Any]:
        options = super().to_options()
        if self.min_endpoint is not None:
            del options["min-gpu-budget"]
        return options

    def check(self, given: frozenset[str] = frozenset()) -> None:
        expected = f"Expected one of {', '.join(ENVIRONMENTS)}."
        if self.environment not in ENVIRONMENTS:
            raise ConfigError(f"Invalid environment: {self.environment}", hint=expected)
        if {"min-gpu-budget", "min-endpoint"} <= given:
            raise ConfigError(
                f"min-gpu-budget is {self.min_gpu_budget} and min-endpoint {self.min_endpoint}",
                hint="Expected one of the two: they state the same minimum, in GPUs and in workers.",
            )
        for name, value_ms, least_ms in (("ttft", self.ttft_ms, 1.0), ("itl", self.itl_ms, 0.2)):
            if value_ms < least_ms:
                raise ConfigError(
                    f"{name} is {value_ms:g}: {value_ms:g} ms is no target that anybody means",
                    hint=f"Write {name}: {value_ms * 1000:g}, if it is in seconds, as old examples have it.",
                )
        if self.tuned and not self.has_step_times:
            name, value = next(iter(self.tuned.items()))
            raise ConfigError(
                f"{name} is {value}, and no model tells how long a step takes",
                hint="Expected policy: sla or both, with sizing: queueing. Or leave it out.",
            )
        if self.adjust_knobs and not (self.has_step_times and self.environment == LOCAL):
            raise ConfigError(
                "adjust-knobs is true, and nobody can try options of engines, or set them",
                hint="Expected policy: sla or both, sizing: queueing, environment: local. Or leave it out.",
            )
        self._require_order("decode-kv-scale-down-threshold", "decode-kv-scale-up-threshold")
        self._require_order("prefill-queue-scale-down-threshold", "prefill-queue-scale-up-threshold")
        if self.min_endpoint is None:
            self._require_order("min-gpu-budget", "max-gpu-budget", or_equal=True)
        self._require_order("metric-pulling-interval", "adjustment-interval", or_equal=True)

    def _require_order(self, lower: str, upper: str, or_equal: bool = False) -> None:
        options = self.to_options()
        if options[lower] < options[upper] or (or_equal and options[lower] == options[upper]):
            return
        relation = "no more than" if or_equal else "less than"
        raise ConfigError(
            f"{lower} is {options[lower]}, {upper} is {options[upper]}",
            hint=f"Expected {lower} to be {relation} {upper}.",
        )


def worker_sizes(role: str) -> Mapping[str, str]:
    """Map options of a role's workers (``decode``, ``prefill``) to the planner's fields for the same."""
    same = ((each.metadata["option"].same_as, each.name) for each in fields(PlannerSettings))
    return {other[1]: name for other, name in same if other and other[0] == role}
