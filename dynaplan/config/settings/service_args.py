"""Options of ``ServiceArgs``: how many processes a service has, and on what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dynaplan.config.settings.fields import NO_EFFECT, Settings, option


@dataclass(init=False, repr=False, eq=False)
class Resources(Settings):
    """The mapping ``resources``: the share of the machine that one worker gets."""

    gpu: float = option(
        0.0,
        "GPUs of one worker; a part of 1 shares a GPU, and the engine gets that part of its memory",
        least=0,
        shown="1 for the workers of engines, more where their parallel sizes need them",
    )
    cpu: Any = option(None, NO_EFFECT)
    memory: Any = option(None, NO_EFFECT)


@dataclass(init=False, repr=False, eq=False)
class ServiceArgs(Settings):
    """The section ``ServiceArgs`` of a service."""

    workers: int = option(1, "Worker processes at the start", least=1)
    resources: Mapping[str, Any] | None = option(None, "What one worker gets: gpu, cpu, memory")
    envs: Mapping[str, str] | None = option(None, "Environment variables of the workers")
    dynamo: Mapping[str, Any] | None = option(None, f"{NO_EFFECT}: use `--namespace`")
