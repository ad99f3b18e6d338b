"""The planner's options: the names and defaults of the load planner's documentation, and a few of our own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from dynaplan.config.settings.fields import NO_EFFECT, WRITTEN, kebab, option
from dynaplan.config.settings.forecasting import ForecastSettings
from dynaplan.config.settings.routing import ROUTERS, ComponentSettings
from dynaplan.config.settings.servers import MessagingSettings
from dynaplan.config.settings.sla import SlaSettings
from dynaplan.util.errors import ConfigError

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
    """Declare a size of a role's workers, which an option of theirs says, too."""
    return option(None, about, least=1, shown=shown, same_as=(role, same_as))


@dataclass(frozen=True)
class PlannerSettings(ForecastSettings, SlaSettings, ComponentSettings, MessagingSettings):
    """Every option of the planner. Intervals are in seconds.

    The thresholds are per worker: requests in the prefill queue for each prefill worker, and the mean KV
    usage (0 to 1) of the decode workers.
    """

    namespace: str = option(
        "dynamo", "Namespace that the planner looks at; in a graph's file that of the graph"
    )
    policy: str = option("load", "What workers are counted by", choices=POLICIES)
    environment: str = option(
        LOCAL,
        "local: `serve` carries decisions out; virtual: a program of yours, see `orchestrate`; kubernetes: "
        "the planner scales a cluster",
    )
    backend: str | None = option(None, NO_EFFECT)
    served_model_name: str | None = option(None, "The model whose traffic counts", shown="that of all models")
    no_operation: bool = option(False, "Observe, decide and record, but change nothing")
    log_dir: str | None = option(
        None, "Directory for decisions.jsonl and the TensorBoard events", path=WRITTEN
    )
    adjustment_interval_s: float = option(30.0, "Seconds between scaling decisions", above=0)
    metric_pulling_interval_s: float = option(1.0, "Seconds between metric pulls", above=0)
    max_gpu_budget: int = option(8, "GPUs that prefill and decode workers never exceed together", least=1)
    min_gpu_budget: int = option(1, "GPUs of either kind of worker below which none is removed", least=1)
    min_endpoint: int | None = option(None, "The same minimum, as a number of workers", least=1)
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
    router: str | None = option(
        None, "How Frontends choose a decode worker", choices=ROUTERS, shown=AS_THE_GRAPH
    )
    prefill_deadline_ms: float | None = option(
        None,
        "How Frontends dispatch queued prompts: by this deadline, ms; 0: in the order of arrival",
        least=0,
        shown=AS_THE_GRAPH,
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
        None, "Seconds from a worker's start to ready; as it was before where not given", least=0
    )
    prometheus_endpoint: str | None = option(
        None, "Prometheus server to ask about traffic; without one the frontends are asked"
    )
    metric_reporting_prometheus_port: int = option(
        0, "Port of the planner's own /metrics and /health when it runs on its own; 0 for none", least=0
    )
    metric_reporting_prometheus_host: str = option("127.0.0.1", "Address of that port")

    @property
    def is_by_targets(self) -> bool:
        """True for the policies that plan for targets, ``sla`` and ``both``."""
        return self.policy != "load"

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
        """Map every option that is set to its value, as ``from_options`` reads it."""
        options = super().to_options()
        if self.min_endpoint is not None:
            del options["min-gpu-budget"]
        return options

    def check(self, given: frozenset[str] = frozenset()) -> None:
        """Raise ConfigError for options that contradict each other."""
        expected = f"Expected one of {', '.join(ENVIRONMENTS)}."
        if self.environment not in ENVIRONMENTS:
            raise ConfigError(f"Invalid environment: {self.environment}", hint=expected)
        if {"min-gpu-budget", "min-endpoint"} <= given:
            raise ConfigError(
                f"min-gpu-budget is {self.min_gpu_budget} and min-endpoint {self.min_endpoint}",
                hint="Expected one of the two: they state the same minimum, in GPUs and in workers.",
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
    """Options of a role's workers (``decode``, ``prefill``) -> the planner's fields that say the same."""
    same = ((each.metadata["option"].same_as, each.name) for each in fields(PlannerSettings))
    return {other[1]: name for other, name in same if other and other[0] == role}
