"""The section ``Models:``: several models behind one address, each loaded on request.

An entry is a name and the options of the model's workers, with those of ``OnDemandSettings``. Each model has
a service of its own, its *component*, whose section is made here of the entry: from then on it is configured,
checked and started as any other service of workers. What ``Common`` says holds for every model.

An entry with a key ``prefill`` is disaggregated: its prefill workers are a second service, whose section has
the options of the entry and, over them, those below ``prefill``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from types import NoneType
from typing import Any

from dynaplan.config.command_words import COMMAND, read_command, recognise
from dynaplan.config.overrides import MODEL_SETS, MODELS, PLANNER, PREFILL, Sections, merge_sections
from dynaplan.config.service_config import COMMON, COMMON_CONFIGS, SERVICE_ARGS, kebab_keys
from dynaplan.config.settings.fields import kebab, options_of
from dynaplan.config.settings.frontend import DisaggregationSettings
from dynaplan.config.settings.models import (
    PREFILL_POOL_OPTIONS,
    OnDemandSettings,
    ServedModel,
    WorkerPool,
    prefill_pool_name,
)
from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.config.settings.worker import SIMULATED, Resources
from dynaplan.config.stock import OWN_OPTIONS, WORKER
from dynaplan.util.errors import ConfigError, all_faults

RESOURCES = "resources"
"""A short form of ``ServiceArgs.resources`` in an entry."""

_RESERVED = frozenset(
    {"frontend", "processor", "router", "planner", "fleet", "etcd", "nats", "common", "models"}
)
"""Names that services, servers or sections of a deployment have."""


def served_models(config: Mapping[str, Mapping[str, Any]]) -> tuple[ServedModel, ...]:
    """Return the models of the section, in its order; none where a deployment has no such section.

    Raises ConfigError, naming model, key and value.
    """
    entries = config.get(MODELS) or {}
    common = kebab_keys(config.get(COMMON) or {})
    planned, prefill = planned_models(config), prefill_components_of(entries)
    models = []
    with all_faults() as faults:
        for name, component in components_of(entries).items():
            with faults.gathering():
                settings = _on_demand(name, entries[name], common, planned.get(name))
                pool = None
                if name in prefill:
                    own = _prefill_settings(name, entries[name], settings, planned)
                    pool = WorkerPool(prefill_pool_name(name), prefill[name], name, own, is_prefill=True)
                models.append(ServedModel(name, component, settings, pool))
    _check_names(models)
    return tuple(models)


def planned_models(config: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the options of each planner of a model, by the model's name.

    Only models with a planner are in it; options of the section ``Planner`` hold for all. Raises ConfigError.
    """
    common = kebab_keys(config.get(PLANNER) or {})
    entries = config.get(MODELS) or {}
    for name, entry in entries.items():
        _check_entry(name, entry)
    return {
        name: {**common, **kebab_keys(entry[PLANNER])}
        for name, entry in entries.items()
        if entry.get(PLANNER) is not None
    }


def models_together(config: Mapping[str, Mapping[str, Any]]) -> tuple[frozenset[str], ...]:
    """Return the sets of models that may be loaded at once; empty where memory alone decides.

    Raises ConfigError for a set with an unknown name.
    """
    sets = (config.get(MODEL_SETS) or {}).get("together") or []
    known = config.get(MODELS) or {}
    for each in sets if isinstance(sets, list) else [sets]:
        if not isinstance(each, list) or not all(name in known for name in each):
            raise ConfigError(
                f"{MODEL_SETS}.together: {each!r}",
                hint=f"Expected lists of names of {MODELS}: {', '.join(map(str, known))}.",
            )
    return tuple(frozenset(each) for each in sets)


def components_of(names: Mapping[str, Any]) -> dict[str, str]:
    """Return the component of each model: its name with nothing that a key or a file name cannot have."""
    taken = set(_RESERVED)
    return {
        name: _free_component(re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-") or "model", taken)
        for name in names
    }


def prefill_components_of(entries: Mapping[str, Any]) -> dict[str, str]:
    """Return the component of the prefill workers of each disaggregated model, by the model's name."""
    components = components_of(entries)
    taken = {*_RESERVED, *(each.lower() for each in components.values())}
    return {
        name: _free_component(f"{components[name]}-{PREFILL}", taken)
        for name, entry in entries.items()
        if isinstance(entry, Mapping) and entry.get(PREFILL) is not None
    }


def _free_component(base: str, taken: set[str]) -> str:
    """Return ``base``, with a number if it is taken, and add it in lower case to ``taken``."""
    component, number = base, 2
    while component.lower() in taken:
        component, number = f"{base}-{number}", number + 1
    taken.add(component.lower())
    return component


def with_worker_sections(config: Sections) -> Sections:
    """Return the configuration with a section for each service of a model; ``Models`` stays as it is.

    A section that is there already, of a model's component, comes before the entry.
    """
    entries = config.get(MODELS) or {}
    common = kebab_keys(config.get(COMMON) or {})
    if entries:
        _check_resources(COMMON, common)
    prefill = prefill_components_of(entries)
    made, of_prefill = {}, {}
    with all_faults() as faults:
        for name, component in components_of(entries).items():
            with faults.gathering():
                section = made[component] = _worker_section(name, entries[name], common)
                if name in prefill:
                    of_prefill[prefill[name]] = _with_worker_options(section, entries[name][PREFILL])
    return merge_sections({**made, **of_prefill}, config)


def _worker_section(name: str, entry: Any, common: Mapping[str, Any]) -> dict[str, Any]:
    _check_entry(name, entry)
    own = kebab_keys(entry)
    started = _started_by(own[COMMAND], f"{MODELS}.{name}.{COMMAND}") if COMMAND in own else {}
    engine = own.get("engine") or started.get("engine") or common.get("engine")
    engine = engine or engine_for(own.get("model") or common.get("model"))
    reaching = {
        key: value for key, value in common.items() if _reaches(key, COMMAND if started else str(engine))
    }
    section = _with_worker_options({}, {**reaching, **started, **own, "engine": engine})
    section.setdefault("model", name)
    section["served-model-name"] = name
    if own.get(PREFILL) is not None:
        engine = COMMAND if COMMAND in own else str(section["engine"])
        if why := NO_PREFILL_WORKERS.get(engine):
            raise ConfigError(f"{MODELS}.{name}.{PREFILL}: engine is {section['engine']!r}", hint=why)
        section["remote-prefill"] = True
    section.pop(COMMON_CONFIGS, None)
    return section


def _reaches(key: str, engine: str) -> bool:
    """Tell whether an option of ``Common`` is one that a model with that engine, or a command, has."""
    option = WORKER.get(key)
    if engine == COMMAND:
        return key in OWN_OPTIONS and key not in ("model", "engine")
    if option is None:
        return engine != SIMULATED or key in _NOT_WORKER_OPTIONS
    return option.engine in ("", engine)


def _started_by(command: Any, where: str) -> dict[str, str]:
    """Return the ``engine`` and ``model`` that a command starts; engine ``command`` if not recognised."""
    found = recognise(read_command(command, where).words)
    return {"engine": found.engine, "model": found.model} if found else {"engine": COMMAND}


def _with_worker_options(section: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section with those of the given options that are a worker's."""
    own = kebab_keys(given)
    options = {
        key: value for key, value in own.items() if key not in _ON_DEMAND and key not in _NOT_WORKER_OPTIONS
    }
    if own.get(RESOURCES) is not None:
        arguments = options.get(SERVICE_ARGS) or section.get(SERVICE_ARGS) or {}
        options[SERVICE_ARGS] = {**arguments, RESOURCES: own[RESOURCES]}
    return {**section, **options}


def engine_for(model: Any) -> str:
    """Return ``llamacpp`` for a GGUF file, ``vllm`` for any other model, ``simulated`` without one."""
    if not model:
        return SIMULATED
    return "llamacpp" if str(model).lower().endswith(".gguf") else "vllm"


def _check_entry(name: str, entry: Any) -> None:
    if not name.isprintable() or not name.strip() or name.startswith("-"):
        raise ConfigError(
            f"{MODELS}: {name!r} is no name",
            hint="Expected printable characters, the first of them no dash.",
        )
    if not isinstance(entry, Mapping):
        raise ConfigError(
            f"{MODELS}.{name} = {entry!r}: expected a mapping of options",
            hint=f"For example {MODELS}: {{{name}: {{model: /path/to/model.gguf}}}}.",
        )
    _check_slips(name, entry)
    if not isinstance(entry.get(PLANNER, {}), Mapping | NoneType):
        raise ConfigError(
            f"{MODELS}.{name}.{PLANNER} = {entry[PLANNER]!r}: expected a mapping of options",
            hint=f"For example {PLANNER}: {{policy: sla, ttft: 500}}; {{}} for all defaults.",
        )
    _check_resources(f"{MODELS}.{name}", entry)
    if entry.get(PREFILL) is not None:
        _check_prefill(name, entry[PREFILL])


def _check_resources(where: str, entry: Mapping[str, Any]) -> None:
    resources = entry.get(RESOURCES)
    if resources is not None and not (
        isinstance(resources, Mapping) and resources.keys() <= options_of(Resources).keys()
    ):
        raise ConfigError(
            f"{where}.{RESOURCES} = {resources!r}: expected a mapping",
            hint=f"Keys: {', '.join(options_of(Resources))}.",
        )


def _check_prefill(name: str, given: Any) -> None:
    """Raise ConfigError unless ``given`` maps options that prefill workers may have apart from the model."""
    where = f"{MODELS}.{name}.{PREFILL}"
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"{where} = {given!r}: expected a mapping of the options in which prefill workers differ",
            hint=f"For example {PREFILL}: {{memory: 20GB}}; {{}} where they have those of the model.",
        )
    for key in given:
        known = kebab(str(key))
        if known in _MODEL_ONLY:
            raise ConfigError(
                f"{where}.{key}: it is one for all workers of a model", hint=f"Write {MODELS}.{name}.{key}."
            )
    _check_slips(f"{name}.{PREFILL}", given)
    _check_resources(where, given)


def _check_slips(name: str, entry: Mapping[str, Any]) -> None:
    """Raise ConfigError for a key much like one of ours: a misspelt one would reach the engine as a flag."""
    ours = {*_ON_DEMAND, *_NOT_WORKER_OPTIONS}
    for key in entry:
        known = kebab(str(key))
        if known not in ours and known not in WORKER:
            near = get_close_matches(known, sorted(ours), 1, cutoff=SLIP)
            if near:
                raise ConfigError(f"{MODELS}.{name}.{key}: unknown option", hint=f"Did you mean {near[0]!r}?")


NO_PREFILL_WORKERS: Mapping[str, str] = {
    "command": "Leave it out: nothing is known of how such a server hands KV entries over.",
    "sglang": "Leave it out, or serve a graph (sglang_disagg.yaml): decode workers of SGLang compute no "
    "prompt, and a model is ready before its prefill workers are.",
}
"""Engines whose models have no prefill workers, and what to do."""

SLIP = 0.75
"""The similarity (difflib's ratio) from which a key counts as a slip of an option."""

_ON_DEMAND = frozenset(options_of(OnDemandSettings))

_NOT_WORKER_OPTIONS = frozenset({RESOURCES, PLANNER, PREFILL})
"""Keys of an entry that are no options of a worker's section."""

OPTIONS_OF_ENTRIES = _ON_DEMAND | _NOT_WORKER_OPTIONS
"""Options of an entry that its workers' section does not have."""

_MODEL_ONLY = (_ON_DEMAND - set(PREFILL_POOL_OPTIONS)) | {
    *(PLANNER, PREFILL, "model", "engine", "served-model-name", COMMAND),
    *options_of(DisaggregationSettings),
}
"""Keys that prefill workers cannot have of their own."""


def _on_demand(
    name: str, entry: Any, common: Mapping[str, Any], planner: Mapping[str, Any] | None
) -> OnDemandSettings:
    """Return the settings; the GPU budget of its planner bounds its workers where nothing else does."""
    _check_entry(name, entry)
    own = kebab_keys(entry)
    given = {key: value for key, value in {**common, **own}.items() if key in _ON_DEMAND}
    places = {key: f"{MODELS}.{name}.{key}" if key in own else f"{COMMON}.{key}" for key in given}
    settings = OnDemandSettings.from_options(given, places)
    if planner is not None and given.get("max-workers") is None:
        budget = planner.get("max-gpu-budget")
        usual = PlannerSettings.max_gpu_budget
        settings = replace(settings, max_workers=budget if type(budget) is int and budget > 0 else usual)
    return settings


def _prefill_settings(
    name: str, entry: Mapping[str, Any], model: OnDemandSettings, planned: Mapping[str, Any]
) -> OnDemandSettings:
    """Return the settings of a model's prefill workers: the model's, where they have none of their own."""
    given = {key: value for key, value in kebab_keys(entry[PREFILL]).items() if key in PREFILL_POOL_OPTIONS}
    own = OnDemandSettings.from_options(given, {key: f"{MODELS}.{name}.{PREFILL}.{key}" for key in given})
    return replace(
        model,
        memory_bytes=own.memory_bytes or model.memory_bytes,
        max_workers=model.max_workers if name in planned and "max-workers" not in given else own.max_workers,
        requests_per_worker=own.requests_per_worker
        if "requests-per-worker" in given
        else model.requests_per_worker,
    )


def _check_names(models: Sequence[ServedModel]) -> None:
    """Raise ConfigError when two models go by the same name, or ``not-beside`` has a name of none."""
    owners: dict[str, str] = {}
    for model in models:
        for name in model.names:
            if owners.setdefault(name, model.name) != model.name:
                raise ConfigError(
                    f"{MODELS}: {name!r} is a name of {owners[name]} and of {model.name}",
                    hint="Give each name and alias to one model.",
                )
    known = [model.name for model in models]
    for model in models:
        for name in model.settings.not_beside or ():
            if name not in known:
                raise ConfigError(
                    f"{MODELS}.{model.name}.not-beside: {name!r} is no model",
                    hint=f"Expected names of {MODELS}: {', '.join(known)}.",
                )
