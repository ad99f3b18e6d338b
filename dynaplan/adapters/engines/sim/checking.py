"""The check of the simulated engine's options, apart from the engine: ``serve`` makes it without any HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynaplan.adapters.engines.sim.profiles import timing_for
from dynaplan.core.engine.settings import EngineSettings
from dynaplan.domain.settings.worker import SimOptions


def check(options: Mapping[str, Any], gpus: float) -> None:
    """Raise the ConfigError that making this engine would; any number of GPUs will do."""
    known = SimOptions.from_options(options)
    _, profile_kv_tokens = timing_for(known)
    EngineSettings.of(known, profile_kv_tokens)
