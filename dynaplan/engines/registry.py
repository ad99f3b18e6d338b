"""Engines by name: found, made and checked; and the models that they load."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynaplan.config.command_words import COMMAND
from dynaplan.util.entry_points import find_entry_point
from dynaplan.util.errors import ConfigError, nearest

if TYPE_CHECKING:
    from dynaplan.engines.kind import EngineKind
    from dynaplan.engines.port import Engine, EngineContext

ENGINES: Mapping[str, str] = {
    "sim": "sim.kind",
    "llamacpp": "llamacpp.launch_line",
    "vllm": "vllm",
    "sglang": "sglang",
    "trtllm": "trtllm",
    "command": "command",
}
"""The values of ``engine:`` that dynaplan brings, and the module of ``dynaplan.engines`` with each one's
``KIND``. Another package adds one by an entry point of the group ``dynaplan.engines``."""


def find_engine(name: str) -> EngineKind | None:
    """Return the engine of that name; None for an unknown one."""
    # Ours first: a package cannot take the place of an engine whose name configurations rely on.
    if name in ENGINES:
        return _kind(import_module(f"dynaplan.engines.{ENGINES[name]}").KIND)
    found = find_entry_point("dynaplan.engines", name)
    return _kind(found.load()) if found else None


def _kind(found: Any) -> EngineKind:
    kind: EngineKind = found
    return kind


def engine_kind(name: str) -> EngineKind:
    """Return the engine of that name; ConfigError for an unknown one."""
    kind = find_engine(name)
    if kind is None:
        known, suggestion = f"expected one of: {', '.join(ENGINES)}", nearest(name, ENGINES)
        hint = f"{suggestion} ({known})" if suggestion.startswith("Did") else known
        raise ConfigError(f"engine is {name!r}, which is unknown", hint=hint)
    return kind


def make_engine(name: str, options: Mapping[str, Any], context: EngineContext) -> Engine:
    """The inference engine of that name, not started; ConfigError for an unknown one or a wrong option.

    The keys of ``options`` are in kebab-case.
    """
    return engine_kind(name).make(options, context)


def check_engine(name: str, options: Mapping[str, Any], gpus: float) -> list[str]:
    """Raise the ConfigError that making and starting this engine would; return warnings. Nothing is made.

    ``gpus`` is the ``resources.gpu`` of one worker. Also checks the model's files, and whether the engine is
    installed, unless its owner's command starts it: that may find others.
    """
    kind = engine_kind(name)
    from dynaplan.engines.model_files import check_model

    if options.get(COMMAND):
        kind.check_ahead(options, gpus)
        return []
    warnings = check_model(name, options.get("model"))
    kind.check_ahead(options, gpus)
    if kind.requirement:
        kind.requirement.check(name, options)
    return warnings


def model_location(name: str, model: Any, directory: Path) -> tuple[Any, str]:
    """The model as workers of this engine must name it, and the name that clients may use.

    A path in ``directory`` becomes absolute; the public name is empty when the model has one already. For
    llama.cpp a name of a file on this machine (``local_models``) becomes its path, and stays the name for
    clients. ConfigError for a name of several files, and for a small model that was never pulled.
    """
    from dynaplan.engines.local_models import find_model
    from dynaplan.engines.model_files import GGUF_FILE, absolute_path, model_kind, public_name
    from dynaplan.engines.pulled_models import check_pulled

    if model_kind(name) == GGUF_FILE and isinstance(model, str) and model:
        if found := find_model(model, directory, os.environ):
            return str(found.path), model
        check_pulled(model, directory)
    location = absolute_path(name, model, directory)
    return location, public_name(name, location)
