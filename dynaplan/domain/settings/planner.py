"""The planner's options: the names and defaults of the load planner's documentation, and a few of our own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from dynaplan.domain.errors import ConfigError
from dynaplan.domain.settings.fields import given_values, option, option_name
from dynaplan.domain.settings.forecasting import ForecastSettings
from dynaplan.domain.settings.sla import SlaSettings

NEW_DECODE_WORKER_GRACE_PERIOD = 3
"""Intervals without removal after one that added a decode worker: it has to fill its KV cache first."""

NEW_PREFILL_WORKER_QUEUE_BUFFER_PERIOD = 3
"""Intervals that the trend of the prefill queue is followed ahead before a prefill worker is added."""

KV_USAGE_PER_WAITING_REQUEST = 0.02
"""What one waiting request adds to a worker's KV usage. Source: Dynamo 0.2 to 0.3, components/planner.py."""

ENVIRONMENTS = ("local", "virtual")
"""Both write the desired counts as the virtual connector's keys; they differ in who carries them out."""


POLICIES = ("load", "sla", "both")
"""By thresholds, by targets, or with the targets' number of workers as a floor that thresholds add to."""


DECODE_SIZES: Mapping[str, str] = {
    "max-num-seqs": "decode_max_num_seqs",
    "max-num-batched-tokens": "decode_step_limit_tokens",
    "kv-total-tokens": "decode_kv_total_tokens",
    "max-model-len": "max_model_len",
}
PREFILL_SIZES: Mapping[str, str] = {
    "max-num-batched-tokens": "prefill_step_limit_tokens",
    "max-concurrent-prefills": "max_concurrent_prefills",
}
"""Options of the workers, by the simulated engine's names, and the planner's settings that say the same."""


@dataclass(frozen=True)
class PlannerSettings(ForecastSettings, SlaSettings):
    """Every option of the planner; ``option_name`` gives their names outside. Intervals are in seconds.

    The thresholds are per worker: requests in the prefill queue for each prefill worker, and the mean KV
    usage (0 to 1) of the decode workers.
    """

    namespace: str = option("dynamo", "Namespace the planner looks at")
    policy: str = option("load", f"What workers are counted by: {', '.join(POLICIES)}")
    environment: str = option("local", "Who carries decisions out: local or virtual")
    served_model_name: str = option("vllm", "Model name that is being served")
    no_operation: bool = option(False, "Observe, decide and record, but change nothing")
    log_dir: str | None = option(None, "Directory for decisions.jsonl and the TensorBoard events")
    adjustment_interval_s: float = option(30.0, "Seconds between scaling decisions", above=0)
    metric_pulling_interval_s: float = option(1.0, "Seconds between metric pulls", above=0)
    max_gpu_budget: int = option(8, "GPUs that prefill and decode workers never exceed together", least=1)
    min_gpu_budget: int = option(1, "GPUs of either kind of worker below which none is removed", least=1)
    min_endpoint: int | None = option(None, "The same minimum, as a number of workers", least=1, kind=int)
    decode_kv_scale_up_threshold: float = option(
        0.9, "Mean KV usage above which to add a decode worker", least=0
    )
    decode_kv_scale_down_threshold: float = option(
        0.5, "Mean KV usage below which to remove a decode worker", least=0
    )
    prefill_queue_scale_up_threshold: float = option(
        0.5, "Queue per prefill worker above which to add one", least=0
    )
    prefill_queue_scale_down_threshold: float = option(
        0.2, "Queue per prefill worker below which to remove one", least=0
    )
    decode_engine_num_gpu: int = option(1, "GPUs of one decode worker", least=1)
    prefill_engine_num_gpu: int = option(1, "GPUs of one prefill worker", least=1)
    router: str | None = option(None, "How Frontends choose a decode worker; as the graph says")
    max_model_len: int | None = option(None, "Context in tokens; as the graph says", least=1, kind=int)
    decode_max_num_seqs: int | None = option(
        None, "Requests that a decode worker computes at once; as the graph says", least=1, kind=int
    )
    decode_step_limit_tokens: int | None = option(
        None, "Tokens of one step of a decode worker; as the graph says", least=1, kind=int
    )
    decode_kv_total_tokens: int | None = option(
        None, "KV cache of a decode worker; as the graph says, else the profile", least=1, kind=int
    )
    prefill_step_limit_tokens: int | None = option(
        None, "Tokens of one step of a prefill worker; as the graph says", least=1, kind=int
    )
    max_concurrent_prefills: int | None = option(
        None, "Requests that a prefill worker holds at once; as the graph says", least=1, kind=int
    )
    consolidation_guard: bool = option(
        True, "Remove no worker when the rest would then be over the scale-up threshold"
    )
    scaling_timeout_s: float = option(
        1800.0, "Seconds after which an unacknowledged decision blocks no longer", above=0
    )
    startup_time_s: float | None = option(
        None, "Seconds from a worker's start to ready; as it was before where not given", least=0, kind=float
    )
    prometheus_endpoint: str | None = option(
        None, "Prometheus server to ask about traffic; without one the frontends are asked"
    )
    metric_reporting_prometheus_port: int = option(
        0, "Port of the planner's own /metrics when it runs on its own; 0 for none", least=0
    )
    decode_component: str = option("VllmWorker", "The service whose workers decode")
    prefill_component: str = option("PrefillWorker", "The service whose workers prefill")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> PlannerSettings:
        """Check options as the user wrote them, keys in kebab or snake case.

        Text is read as the option's type. None means "not set". Raises ConfigError naming the key, its
        value and what was expected; for an unknown key, the nearest known one.
        """
        values = given_values(cls, options)
        settings = cls(**values)
        settings.check_sizing()
        settings.check_forecasting()
        settings._check_options(values)
        return settings

    @property
    def is_by_targets(self) -> bool:
        """Whether targets have a say: the policies ``sla`` and ``both``."""
        return self.policy != "load"

    def to_options(self) -> dict[str, Any]:
        """Option -> value, as ``from_options`` reads it; without those that are not set."""
        settings = {option_name(each): getattr(self, each.name) for each in fields(self)}
        if self.min_endpoint is not None:
            del settings["min-gpu-budget"]
        return {name: value for name, value in settings.items() if value is not None}

    def _check_options(self, given: Mapping[str, Any]) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(
                f"Planner.policy: {self.policy!r}", hint=f"expected one of {', '.join(POLICIES)}"
            )
        expected = f"expected one of {', '.join(ENVIRONMENTS)}"
        if self.environment == "kubernetes":
            raise ConfigError("environment: 'kubernetes' is not there yet", hint=expected)
        if self.environment not in ENVIRONMENTS:
            raise ConfigError(f"Invalid environment: {self.environment}", hint=expected)
        if "min_gpu_budget" in given and "min_endpoint" in given:
            raise ConfigError(
                f"min-gpu-budget is {self.min_gpu_budget} and min-endpoint {self.min_endpoint}",
                hint="expected one of the two: they state the same minimum, in GPUs and in workers",
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
            hint=f"expected {lower} to be {relation} {upper}",
        )
