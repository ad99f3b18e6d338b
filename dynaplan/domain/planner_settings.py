"""The planner's options: the names and defaults of the load planner's documentation, and a few of our own."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

from dynaplan.domain.errors import ConfigError, nearest

NEW_DECODE_WORKER_GRACE_PERIOD = 3
"""Intervals without removal after one that added a decode worker: it has to fill its KV cache first."""

NEW_PREFILL_WORKER_QUEUE_BUFFER_PERIOD = 3
"""Intervals that the trend of the prefill queue is followed ahead before a prefill worker is added."""

KV_USAGE_PER_WAITING_REQUEST = 0.02
"""What one waiting request adds to a worker's KV usage. Source: Dynamo 0.2 to 0.3, components/planner.py."""

ENVIRONMENTS = ("local", "virtual")
"""Both write the desired counts as the virtual connector's keys; they differ in who carries them out."""


def _option(default: Any, about: str, *, least: float | None = None, above: float | None = None) -> Any:
    return field(default=default, metadata={"about": about, "least": least, "above": above})


@dataclass(frozen=True)
class PlannerSettings:
    """Every option of the load planner; ``option_names`` gives their names outside. Intervals are in seconds.

    The thresholds are per worker: requests in the prefill queue for each prefill worker, and the mean KV
    usage (0 to 1) of the decode workers.
    """

    namespace: str = _option("dynamo", "Namespace the planner looks at")
    environment: str = _option("local", "Who carries decisions out: local or virtual")
    served_model_name: str = _option("vllm", "Model name that is being served")
    no_operation: bool = _option(False, "Observe, decide and record, but change nothing")
    log_dir: str | None = _option(None, "Directory for decisions.jsonl and the TensorBoard events")
    adjustment_interval_s: float = _option(30.0, "Seconds between scaling decisions", above=0)
    metric_pulling_interval_s: float = _option(1.0, "Seconds between metric pulls", above=0)
    max_gpu_budget: int = _option(8, "GPUs that prefill and decode workers never exceed together", least=1)
    min_gpu_budget: int = _option(1, "GPUs of either kind of worker below which none is removed", least=1)
    min_endpoint: int | None = _option(None, "The same minimum, as a number of workers", least=1)
    decode_kv_scale_up_threshold: float = _option(
        0.9, "Mean KV usage above which to add a decode worker", least=0
    )
    decode_kv_scale_down_threshold: float = _option(
        0.5, "Mean KV usage below which to remove a decode worker", least=0
    )
    prefill_queue_scale_up_threshold: float = _option(
        0.5, "Queue per prefill worker above which to add one", least=0
    )
    prefill_queue_scale_down_threshold: float = _option(
        0.2, "Queue per prefill worker below which to remove one", least=0
    )
    decode_engine_num_gpu: int = _option(1, "GPUs of one decode worker", least=1)
    prefill_engine_num_gpu: int = _option(1, "GPUs of one prefill worker", least=1)
    consolidation_guard: bool = _option(
        True, "Remove no worker when the rest would then be over the scale-up threshold"
    )
    scaling_timeout_s: float = _option(
        1800.0, "Seconds after which an unacknowledged decision blocks no longer", above=0
    )
    decode_component: str = _option("VllmWorker", "The service whose workers decode")
    prefill_component: str = _option("PrefillWorker", "The service whose workers prefill")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> PlannerSettings:
        """Check options as the user wrote them, keys in kebab or snake case.

        Text is read as the option's type. None means "not set". Raises ConfigError naming the key, its
        value and what was expected; for an unknown key, the nearest known one.
        """
        known = {option_name(each): each for each in fields(cls)}
        values: dict[str, Any] = {}
        for key, value in options.items():
            name = key.replace("_", "-")
            if name not in known:
                raise ConfigError(f"Planner has no option {key!r}", hint=nearest(name, known))
            if value is not None:
                values[known[name].name] = _checked(known[name], key, value)
        settings = cls(**values)
        settings._check_together(values)
        return settings

    def to_options(self) -> dict[str, Any]:
        """Option -> value, as ``from_options`` reads it; without those that are not set."""
        settings = {option_name(each): getattr(self, each.name) for each in fields(self)}
        if self.min_endpoint is not None:
            del settings["min-gpu-budget"]
        return {name: value for name, value in settings.items() if value is not None}

    def _check_together(self, given: Mapping[str, Any]) -> None:
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


UNITS = ("_ms", "_s", "_tokens")
"""How the names of settings end; users leave it out."""


def option_name(setting: Field[Any]) -> str:
    """A setting's name outside: kebab-case, without its unit."""
    name = setting.name
    for unit in UNITS:
        name = name.removesuffix(unit)
    return name.replace("_", "-")


def option_type(setting: Field[Any]) -> type:
    """The type of a setting's value: bool, int, float or str."""
    if setting.name == "min_endpoint":
        return int
    return str if setting.default is None or setting.default is MISSING else type(setting.default)


def _checked(setting: Field[Any], key: str, value: Any) -> Any:
    kind = option_type(setting)
    read = _READERS[kind](value)
    least, above = setting.metadata["least"], setting.metadata["above"]
    bound = ""
    if least is not None:
        bound = f", {least} or more"
    if above is not None:
        bound = f", more than {above}"
    is_fitting = read is not None and (least is None or read >= least) and (above is None or read > above)
    if not is_fitting:
        raise ConfigError(f"Planner.{key}: {value!r}", hint=f"expected {_EXPECTED[kind]}{bound}")
    return read


def _read_bool(value: Any) -> bool | None:
    if isinstance(value, str):
        return {"true": True, "false": False}.get(value.strip().lower())
    return value if isinstance(value, bool) else None


def _read_float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _read_int(value: Any) -> int | None:
    number = _read_float(value)
    return int(number) if number is not None and number == int(number) else None


def _read_str(value: Any) -> str | None:
    return value if isinstance(value, str) and value.strip() else None


_READERS = {bool: _read_bool, int: _read_int, float: _read_float, str: _read_str}
_EXPECTED = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
