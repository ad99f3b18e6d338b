"""The simulated engine's API: it checks every field itself, and continues an answer as vLLM does."""

from __future__ import annotations

from dynaplan.engines.api_rules import EngineApi

API = EngineApi(continuation={"continue_final_message": True, "add_generation_prompt": False})
