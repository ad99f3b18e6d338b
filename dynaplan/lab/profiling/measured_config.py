"""The configuration that is measured: the user's, with one aggregated worker and an idle planner."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from enum import Enum
from typing import Any

from dynaplan.config.overrides import Sections, merge_sections
from dynaplan.config.parallelism import DATA, PIPELINE, TENSOR
from dynaplan.config.service_config import section_options
from dynaplan.config.settings.fields import kebab
from dynaplan.config.settings.frontend import DECODE_COMPONENT, PREFILL_COMPONENT
from dynaplan.config.settings.worker import engine_of
from dynaplan.engines.registry import engine_kind
from dynaplan.util.errors import ConfigError

WORKER, PREFILL_WORKER = DECODE_COMPONENT, PREFILL_COMPONENT
"""The names of the worker services of the stock graphs."""

LEFT_OUT = ("Router", PREFILL_WORKER)
"""Services that the aggregated graph does not have."""

USERS_OWN = ("port", "host", "api-key", "max-waiting-requests", "max-body-bytes")
"""Options of the Frontend that protect a deployment from its clients: this one has the profiler alone."""

MAX_WAITING_REQUESTS = 4096
"""Requests that may wait in the measured deployment: more than any load has."""


class Phase(Enum):
    """The phase of requests that a deployment measures; the value begins its directory's name."""

    PREFILL = "prefill"
    DECODE = "decode"


def engine_name(config: Mapping[str, Mapping[str, Any]]) -> str:
    return engine_of(section_options(config, WORKER))


def worker_gpus(config: Mapping[str, Mapping[str, Any]]) -> float | None:
    """Return the GPUs of one configured decode worker; None when the configuration does not say.

    Raises ConfigError when it is not a number.
    """
    arguments = config.get(WORKER, {}).get("ServiceArgs") or {}
    gpus = (arguments.get("resources") or {}).get("gpu")
    try:
        return None if gpus is None else float(gpus)
    except (TypeError, ValueError):
        raise ConfigError(
            f"{WORKER}.ServiceArgs.resources.gpu is {gpus!r}", hint="Expected a number of GPUs."
        ) from None


def splits_layers(config: Mapping[str, Mapping[str, Any]]) -> bool:
    """Tell whether the profiler may choose the tensor parallel size: the engine has one, on whole GPUs."""
    gpus = worker_gpus(config)
    return not engine_kind(engine_name(config)).divides_by_layers and (gpus is None or gpus >= 1)


def measured_config(
    config: Mapping[str, Mapping[str, Any]], phase: Phase, tensor_parallel_size: int
) -> Sections:
    """Return the configuration of ``graphs.agg:Frontend`` for one measured deployment.

    It has one worker, no remote prefill and an idle planner; the prefix cache is off to measure prefill and
    on to measure decoding. Prefill is measured with the settings of the PrefillWorker if there is one. For
    engines that have a tensor parallel size it is set, with as many GPUs. ``config`` stays as it is.
    """
    sections: Sections = deepcopy({name: dict(section) for name, section in config.items()})
    if phase is Phase.PREFILL and PREFILL_WORKER in sections:
        sections[WORKER] = sections[PREFILL_WORKER]
    for name in LEFT_OUT:
        sections.pop(name, None)
    sections["Planner"] = {"no-operation": True}
    sections["Frontend"] = without_options(sections.get("Frontend", {}), USERS_OWN)
    worker = sections.get(WORKER, {})
    settings: dict[str, Any] = {
        "remote-prefill": False,
        "conditional-disagg": False,
        "enable-prefix-caching": phase is Phase.DECODE,
        "ServiceArgs": {"workers": 1},
    }
    if splits_layers(config):
        worker = without_options(worker, (*TENSOR, *PIPELINE, *DATA))
        settings["tensor-parallel-size"] = tensor_parallel_size
        settings["ServiceArgs"]["resources"] = {"gpu": tensor_parallel_size}
        sections["Common"] = without_options(sections.get("Common", {}), (*TENSOR, *PIPELINE, *DATA))
    sections[WORKER] = worker
    changes: Sections = {
        "Frontend": {"max-waiting-requests": MAX_WAITING_REQUESTS},
        "Processor": {"router": "round-robin"},
        WORKER: settings,
    }
    return merge_sections(sections, changes)


def without_options(section: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """Return the section without these options, in either spelling."""
    unwanted = frozenset(keys)
    return {key: value for key, value in section.items() if kebab(key) not in unwanted}
