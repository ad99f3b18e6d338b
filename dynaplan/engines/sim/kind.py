"""The simulated engine, as the rest of dynaplan knows it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dynaplan.config.settings.worker import SIMULATED, SimOptions
from dynaplan.engines.api_rules import EngineApi
from dynaplan.engines.kind import EngineKind
from dynaplan.engines.port import Engine, EngineContext
from dynaplan.engines.sim.profiles import check_times_known, timing_for
from dynaplan.engines.timing_model.engine_model import EngineSettings


class SimKind(EngineKind):
    name = SIMULATED
    # It checks every field itself, and continues an answer as vLLM does.
    api = EngineApi(continuation={"continue_final_message": True, "add_generation_prompt": False})
    takes_given_memory = True

    @property
    def can_sleep(self) -> bool:
        return True

    def check(self, options: Mapping[str, Any], gpus: float) -> None:
        known = SimOptions.from_options(options)
        check_times_known(known)
        _, profile_kv_tokens = timing_for(known)
        EngineSettings.of(known, profile_kv_tokens)

    def make(self, options: Mapping[str, Any], context: EngineContext) -> Engine:
        from dynaplan.engines.sim.engine import SimEngine  # it serves HTTP, which no check needs

        return SimEngine(options, context)


KIND = SimKind()
