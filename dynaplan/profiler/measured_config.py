"""The configuration that is measured: the user's, with one aggregated worker and nothing that disturbs it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from enum import Enum
from typing import Any

from dynaplan.domain.errors import ConfigError
from dynaplan.domain.parallelism import DATA, PIPELINE, TENSOR
from dynaplan.domain.settings.fields import kebab
from dynaplan.domain.settings.routing import DECODE_COMPONENT, PREFILL_COMPONENT
from dynaplan.domain.settings.worker import engine_of
from dynaplan.options.overrides import Sections, merge_sections
from dynaplan.options.service_config import section_options

WORKER, PREFILL_WORKER = DECODE_COMPONENT, PREFILL_COMPONENT
LEFT_OUT = ("Router", PREFILL_WORKER)
"""Services that the aggregated graph does not have."""

WITHOUT_TENSOR_PARALLEL = frozenset({"llamacpp"})
"""Engines that do not split a layer over GPUs: they are measured as they are configured."""

USERS_OWN = ("port", "host", "api-key", "max-waiting-requests", "max-body-bytes")
"""Options of the Frontend that are for the users of a deployment: nobody but the profiler asks this one."""

MOST_WAITING_REQUESTS = 4096


class Phase(Enum):
    """What a deployment is started to measure; the value begins the name of its directory."""

    PREFILL = "prefill"
    DECODE = "decode"


def engine_name(config: Mapping[str, Mapping[str, Any]]) -> str:
    """The engine of the configuration's decode worker."""
    return engine_of(section_options(config, WORKER))


def worker_gpus(config: Mapping[str, Mapping[str, Any]]) -> float | None:
    """The GPUs that one decode worker is configured to take; None when the configuration does not say.

    Raises ConfigError for what is no number.
    """
    arguments = config.get(WORKER, {}).get("ServiceArgs") or {}
    gpus = (arguments.get("resources") or {}).get("gpu")
    try:
        return None if gpus is None else float(gpus)
    except (TypeError, ValueError):
        raise ConfigError(
            f"{WORKER}.ServiceArgs.resources.gpu is {gpus!r}", hint="expected a number of GPUs"
        ) from None


def splits_layers(config: Mapping[str, Mapping[str, Any]]) -> bool:
    """Whether the worker's tensor parallel size is for us to choose: the engine has one, on whole GPUs."""
    gpus = worker_gpus(config)
    return engine_name(config) not in WITHOUT_TENSOR_PARALLEL and (gpus is None or gpus >= 1)


def measured_config(
    config: Mapping[str, Mapping[str, Any]], phase: Phase, tensor_parallel_size: int
) -> Sections:
    """The configuration of ``graphs.agg:Frontend`` for one measured deployment; ``config`` stays as it is.

    One worker, no remote prefill, the planner idle; the prefix cache off to measure prefill and on to
    measure decoding. Prefill is measured with the settings of the PrefillWorker where there is one. The
    tensor parallel size is set, and as many GPUs, for engines that have it.
    """
    sections: Sections = deepcopy({name: dict(section) for name, section in config.items()})
    if phase is Phase.PREFILL and PREFILL_WORKER in sections:
        sections[WORKER] = sections[PREFILL_WORKER]
    for name in LEFT_OUT:
        sections.pop(name, None)
    sections["Planner"] = {"no-operation": True}
    sections["Frontend"] = _without(sections.get("Frontend", {}), USERS_OWN)
    worker = sections.get(WORKER, {})
    settings: dict[str, Any] = {
        "remote-prefill": False,
        "conditional-disagg": False,
        "enable-prefix-caching": phase is Phase.DECODE,
        "ServiceArgs": {"workers": 1},
    }
    if splits_layers(config):
        worker = _without(worker, (*TENSOR, *PIPELINE, *DATA))
        settings["tensor-parallel-size"] = tensor_parallel_size
        settings["ServiceArgs"]["resources"] = {"gpu": tensor_parallel_size}
        sections["Common"] = _without(sections.get("Common", {}), (*TENSOR, *PIPELINE, *DATA))
    sections[WORKER] = worker
    changes: Sections = {
        "Frontend": {"max-waiting-requests": MOST_WAITING_REQUESTS},
        "Processor": {"router": "round-robin"},
        WORKER: settings,
    }
    return merge_sections(sections, changes)


def _without(section: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    """The section without these options, however they are spelt."""
    unwanted = frozenset(keys)
    return {key: value for key, value in section.items() if kebab(key) not in unwanted}
