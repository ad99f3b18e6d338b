"""Engines by name: made, checked, and described; and the models that they load."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynaplan.engines.model_catalogue import CATALOGUE
from dynaplan.util.errors import ConfigError, nearest

if TYPE_CHECKING:
    from dynaplan.config.settings.worker import SimOptions
    from dynaplan.engines.api_rules import EngineApi
    from dynaplan.engines.context import EngineContext
    from dynaplan.engines.port import Engine
    from dynaplan.engines.timing_model.kv_memory import MemoryNeed
    from dynaplan.engines.timing_model.timing import StepTiming
    from dynaplan.process.memory import BoxMemory

ENGINES: Mapping[str, str] = {
    "sim": "sim.engine",
    "llamacpp": "llamacpp.engine",
    "vllm": "vllm",
    "sglang": "sglang",
    "trtllm": "trtllm",
}
"""The values of ``engine:``, and the module of ``engines`` that makes each."""

CHECKS: Mapping[str, str] = {**ENGINES, "sim": "sim.checking"}
"""The same with the module that checks each: the simulated engine serves HTTP, which no check needs."""

ENGINE_APIS = frozenset(ENGINES)
"""The engines whose API a module of ``engines/apis`` describes."""


def make_engine(name: str, options: Mapping[str, Any], context: EngineContext) -> Engine:
    """The inference engine of that name, not started; ConfigError for an unknown one or a wrong option.

    The keys of ``options`` are in kebab-case.
    """
    engine: Engine = _engine_module(name).make(options, context)
    return engine


def engine_api(name: str) -> EngineApi:
    """The part of that engine's API that frontends must know; one without bounds for an unknown engine."""
    from dynaplan.engines.api_rules import EngineApi

    if name not in ENGINE_APIS:
        return EngineApi()
    api: EngineApi = import_module(f"dynaplan.engines.apis.{name}").API
    return api


def check_engine(name: str, options: Mapping[str, Any], gpus: float) -> list[str]:
    """Raise the ConfigError that making and starting this engine would; nothing is made. The warnings.

    ``gpus`` is the ``resources.gpu`` of one worker. Also looks at the model's files, and whether the engine
    is installed.
    """
    module = _engine_module(name, CHECKS)
    from dynaplan.engines.common.model_files import check_model
    from dynaplan.engines.common.requirements import check_installed

    warnings = check_model(name, options.get("model"))
    module.check(options, gpus)
    check_installed(name, options)
    return warnings


def memory_need(name: str, options: Mapping[str, Any], gpus: float) -> MemoryNeed | None:
    """Return the memory that one worker of this engine takes; None when its model's files do not tell it."""
    from dynaplan.engines.common import memory_needs

    return memory_needs.memory_need(name, options, gpus)


def box_memory() -> BoxMemory:
    """Return the memory of this box."""
    from dynaplan.process import memory

    return memory.box_memory()


def model_location(name: str, model: Any, directory: Path) -> tuple[Any, str]:
    """The model as workers of this engine must be told it, and what clients may call it.

    A path in ``directory`` becomes absolute; the public name is empty when the model has one already. A
    pulled model is told by its path and called by its name. ConfigError for one that was never pulled.
    """
    from dynaplan.engines.common.model_files import absolute_path, public_name
    from dynaplan.engines.pulled_models import pulled_file

    pulled = pulled_file(model, directory, os.environ) if name == "llamacpp" else None
    if pulled:
        return str(pulled), model
    location = absolute_path(name, model, directory)
    return location, public_name(name, location)


def package_of(engine: str) -> str:
    """Return what pip installs for that engine."""
    from dynaplan.engines.common.requirements import REQUIREMENTS

    return REQUIREMENTS[engine].package


def installed_program(engine: str) -> str:
    """Return the Python module or the command with which that engine can run here; empty for neither."""
    import shutil
    from importlib.util import find_spec

    from dynaplan.engines.common.requirements import REQUIREMENTS

    needed = REQUIREMENTS[engine]
    return needed.module if find_spec(needed.module) else shutil.which(needed.command) or ""


def pull_model(name: str) -> Path:
    """Fetch a model of the catalogue into the user's cache unless it is there; return its path."""
    from dynaplan.engines.pulled_models import models_dir, pull

    return pull(CATALOGUE[name], models_dir(os.environ))


def is_pulled(name: str) -> bool:
    """Tell whether the file of that model is in the user's cache."""
    from dynaplan.engines.pulled_models import models_dir

    return (models_dir(os.environ) / CATALOGUE[name].file).is_file()


def _engine_module(name: str, places: Mapping[str, str] = ENGINES) -> Any:
    if name not in ENGINES:
        known, meant = f"expected one of: {', '.join(ENGINES)}", nearest(name, ENGINES)
        hint = f"{meant} ({known})" if meant.startswith("Did") else known
        raise ConfigError(f"engine is {name!r}, which is unknown", hint=hint)
    return import_module(f"dynaplan.engines.{places[name]}")


def engine_timing(options: SimOptions) -> tuple[StepTiming, int]:
    """Return the step times of the simulated engine, and the number of KV tokens in its profile."""
    from dynaplan.engines.sim.profiles import timing_for

    return timing_for(options)


def timing_origin(options: SimOptions) -> str:
    """Return the words that go with an estimated profile; empty for a measured one. Raises ConfigError."""
    from dynaplan.engines.sim.profiles import timing_origin

    return timing_origin(options)


def engine_profile(options: SimOptions) -> str:
    """The name of the profile that times the simulated engine."""
    from dynaplan.engines.sim.profiles import profile_name

    return profile_name(options)


def measured_gpus(options: SimOptions) -> int:
    """Return the tensor parallel size that the simulated engine's profile was measured with."""
    from dynaplan.engines.sim.profiles import measured_size

    return measured_size(options)
