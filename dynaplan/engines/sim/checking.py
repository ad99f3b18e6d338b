"""The check of the simulated engine's options, apart from the engine: ``serve`` makes it without any HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynaplan.config.settings.worker import SimOptions
from dynaplan.engines.sim.profiles import timing_for
from dynaplan.engines.timing_model.settings import EngineSettings


def check(options: Mapping[str, Any], gpus: float) -> None:
    """Raise the ConfigError that making this engine would; any number of GPUs will do."""
    known = SimOptions.from_options(options)
    _, profile_kv_tokens = timing_for(known)
    EngineSettings.of(known, profile_kv_tokens)
