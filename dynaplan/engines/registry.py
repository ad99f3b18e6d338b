"""Engines by name: made, checked, and described; and the models that they load."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynaplan.config.command_words import COMMAND
from dynaplan.util.errors import ConfigError, nearest

if TYPE_CHECKING:
    from dynaplan.engines.api_rules import EngineApi
    from dynaplan.engines.port import Engine, EngineContext

ENGINES: Mapping[str, str] = {
    "sim": "sim.engine",
    "llamacpp": "llamacpp.engine",
    "vllm": "vllm",
    "sglang": "sglang",
    "trtllm": "trtllm",
    "command": "command",
}
"""The values of ``engine:``, and the module of ``dynaplan.engines`` that makes each."""

CHECKS: Mapping[str, str] = {**ENGINES, "sim": "sim.profiles"}
"""The same with the module that checks each: the simulated engine serves HTTP, which no check needs."""


def make_engine(name: str, options: Mapping[str, Any], context: EngineContext) -> Engine:
    """The inference engine of that name, not started; ConfigError for an unknown one or a wrong option.

    The keys of ``options`` are in kebab-case.
    """
    engine: Engine = _engine_module(name).make(options, context)
    return engine


def engine_api(name: str) -> EngineApi:
    """The part of that engine's API that frontends must know; one without bounds for an unknown engine."""
    from dynaplan.engines.api_rules import EngineApi
    from dynaplan.engines.engine_apis import ENGINE_APIS

    return ENGINE_APIS.get(name) or EngineApi()


def check_engine(name: str, options: Mapping[str, Any], gpus: float) -> list[str]:
    """Raise the ConfigError that making and starting this engine would; nothing is made. The warnings.

    ``gpus`` is the ``resources.gpu`` of one worker. Also checks the model's files, and whether the engine
    is installed, but where its owner's command starts it: what that finds is its own.
    """
    module = _engine_module(name, CHECKS)
    from dynaplan.engines.model_files import check_model
    from dynaplan.engines.requirements import check_installed

    if options.get(COMMAND):
        module.check(options, gpus)
        return []
    warnings = check_model(name, options.get("model"))
    module.check(options, gpus)
    check_installed(name, options)
    return warnings


def model_location(name: str, model: Any, directory: Path) -> tuple[Any, str]:
    """The model as workers of this engine must name it, and the name that clients may use.

    A path in ``directory`` becomes absolute; the public name is empty when the model has one already. For
    llama.cpp a name of a file on this machine (``local_models``) becomes its path, and stays the name for
    clients. ConfigError for a name of several files, and for a small model that was never pulled.
    """
    from dynaplan.engines.local_models import find_model
    from dynaplan.engines.model_files import absolute_path, public_name
    from dynaplan.engines.pulled_models import check_pulled

    if name == "llamacpp" and isinstance(model, str) and model:
        if found := find_model(model, directory, os.environ):
            return str(found.path), model
        check_pulled(model, directory)
    location = absolute_path(name, model, directory)
    return location, public_name(name, location)


def _engine_module(name: str, modules: Mapping[str, str] = ENGINES) -> Any:
    if name not in ENGINES:
        known, suggestion = f"expected one of: {', '.join(ENGINES)}", nearest(name, ENGINES)
        hint = f"{suggestion} ({known})" if suggestion.startswith("Did") else known
        raise ConfigError(f"engine is {name!r}, which is unknown", hint=hint)
    return import_module(f"dynaplan.engines.{modules[name]}")
