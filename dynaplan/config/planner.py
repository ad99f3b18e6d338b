"""The planner's settings: of its section, and of what the graph's configuration says of the workers."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from typing import Any

from dynaplan.config.frontend import (
    DEADLINE,
    SECTIONS,
    configured_deadline,
    configured_disaggregation,
    disaggregation_settings_of,
)
from dynaplan.config.model_entries import planned_models, served_models
from dynaplan.config.overrides import MODELS
from dynaplan.config.parallelism import gpus_needed
from dynaplan.config.service_config import SERVICE_ARGS, kebab_keys, section_options
from dynaplan.config.settings.fields import OFF, key_of, options_of
from dynaplan.config.settings.models import ServedModel
from dynaplan.config.settings.planner import PlannerSettings, worker_sizes
from dynaplan.config.settings.worker import (
    SIMULATED,
    SLOT_OPTION,
    STEP_OPTION,
    Resources,
    SimOptions,
    engine_of,
)
from dynaplan.config.stock import WORKER
from dynaplan.util.errors import ConfigError

log = logging.getLogger(__name__)


Options = Mapping[str, Any]

KV_OPTION, CONTEXT_OPTION = "kv-total-tokens", "max-model-len"
BLOCKS_OPTION, BLOCK_OPTION = "num-gpu-blocks-override", "block-size"


def engine_sizes(options: Options) -> dict[str, int]:
    """The request slots, and the tokens of a step, of the context and of the KV cache, where options tell.

    What is no whole number above 0 (vLLM takes ``32k``) is left out: to check options is the engine's task.
    """
    engine = engine_of(options)
    found = {
        key: _first(options, (*WORKER[key].names.get(engine, ()), *(() if key == KV_OPTION else (key,))))
        for key in (SLOT_OPTION, STEP_OPTION, CONTEXT_OPTION, KV_OPTION)
    }
    block_tokens = _first(options, (BLOCK_OPTION,)) or SimOptions.block_tokens
    found[KV_OPTION] = found[KV_OPTION] or _first(options, (BLOCKS_OPTION,)) * block_tokens
    for key in (SLOT_OPTION, STEP_OPTION):
        found[key] = found[key] or _default_of(engine, key)
    slots = found[SLOT_OPTION]
    if slots > (found[STEP_OPTION] or SimOptions.batched_tokens):
        found[STEP_OPTION] = slots  # each request that decodes takes one token of a step
    if found[KV_OPTION]:
        found[CONTEXT_OPTION] = min(found[CONTEXT_OPTION], found[KV_OPTION])
    return {name: size for name, size in found.items() if size}


def _default_of(engine: str, key: str) -> int:
    """The size that an engine has where no option says it; 0 where its own default is not known."""
    declared = WORKER[key]
    return int(declared.engine_defaults.get(engine, declared.default if engine == SIMULATED else 0))


def written_name(options: Options, key: str) -> str:
    """Return the name by which a worker's options have that one: an engine's own where it stands there."""
    own = WORKER[key].names.get(engine_of(options), ())
    return next((name for name in own if name in options), key)


def _first(options: Options, names: Iterable[str]) -> int:
    """The first of these options that is a size; 0 when none is."""
    values = (options.get(name) for name in names)
    return next((size for size in values if type(size) is int and size > 0), 0)


ROUTER, PROFILE = "router", "profile-results-dir"

CONCURRENT_PREFILLS = "max-concurrent-prefills"


def settings_of(options: Mapping[str, Any]) -> PlannerSettings:
    """The settings of a Planner section; raises ConfigError for a wrong one.

    ``environment: kubernetes`` is read as ``local``, so that ``serve`` plans for this box.
    """
    known = dict(options)
    if known.get("environment") == "kubernetes":
        log.info("environment: kubernetes means local here: this planner scales this box")
        known["environment"] = "local"
    return PlannerSettings.from_options(known)


def settings_in_graph(
    options: Mapping[str, Any], namespace: str, config: Mapping[str, Mapping[str, Any]]
) -> PlannerSettings:
    """The settings of the Planner section of a graph, what it has to know of the others filled in."""
    settings = settings_of(in_namespace(with_worker_sizes(options, config), namespace))
    _check_local_prefill(settings, config)
    return settings


def _check_local_prefill(settings: PlannerSettings, config: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise ConfigError where the planner is to set a length that no frontend of the configuration reads."""
    if settings.max_local_prefill_length == OFF or configured_disaggregation(config).is_conditional:
        return
    raise ConfigError(
        f"Planner.max-local-prefill-length is {settings.max_local_prefill_length}, and no prompt is local",
        hint="Expected conditional-disagg: true, which lets a decode worker compute short prompts.",
    )


OF_THE_MODEL = (
    "served-model-name",
    "decode-component",
    "prefill-component",
    "namespace",
    "environment",
    "max-local-prefill-length",
    "adjust-knobs",
)
"""Options that the planner of a model takes from its model, or that are about all models."""


def settings_of_models(config: Mapping[str, Mapping[str, Any]], namespace: str) -> dict[str, PlannerSettings]:
    """Return the settings of the planners of models that are loaded on request, by the model's name.

    Raises ConfigError, naming model, key and value.
    """
    models = {each.name: each for each in served_models(config)}
    found = {}
    for name, given in planned_models(config).items():
        component = models[name].component
        try:
            if said := [key for key in OF_THE_MODEL if given.get(key) is not None]:
                raise ConfigError(
                    f"Planner.{said[0]} is {given[said[0]]!r}", hint=f"Leave it out: {_ITS_OWN}"
                )
            own: dict[str, Any] = {
                "namespace": namespace,
                "served-model-name": name,
                "decode-component": component,
            }
            if pool := models[name].prefill:
                own |= {"prefill-component": pool.component}
                own |= {DEADLINE: disaggregation_settings_of(models[name], config, given).prefill_deadline_ms}
            settings = PlannerSettings.from_options(with_worker_sizes({**given, **own}, config))
            settings = _with_gpus(settings, models[name], config)
            settings.check()
        except ConfigError as error:
            raise ConfigError(f"{MODELS}.{name}: {error.args[0]}", hint=error.hint) from error
        log_dir = f"{settings.log_dir}/{component}" if settings.log_dir else None
        found[name] = replace(settings, log_dir=log_dir)
    return found


def _with_gpus(
    settings: PlannerSettings, model: ServedModel, config: Mapping[str, Mapping[str, Any]]
) -> PlannerSettings:
    """Return the settings with the GPUs of a worker, and no more of them in all than its workers may have."""
    gpus = gpus_of_worker(config, model.component)
    least, most = gpus, model.settings.max_workers * gpus
    settings = replace(settings, decode_engine_num_gpu=gpus)
    if pool := model.prefill:
        gpus = gpus_of_worker(config, pool.component)
        least, most = least + gpus, most + pool.settings.max_workers * gpus
        settings = replace(settings, prefill_engine_num_gpu=gpus)
    return replace(settings, max_gpu_budget=max(least, min(settings.max_gpu_budget, most)))


_ITS_OWN = "the planner of a model is about that model, on this box."


def gpus_of_worker(config: Mapping[str, Mapping[str, Any]], component: str) -> int:
    """Return the GPUs of one worker of the service; 1 if it has none, so that the GPU budget counts
    workers."""
    resources = ((config.get(component) or {}).get(SERVICE_ARGS) or {}).get("resources") or {}
    written = resources.get("gpu")
    if written is None:
        return math.ceil(gpus_needed(section_options(config, component), 1))
    read = options_of(Resources)["gpu"].read(written, is_text=True)
    return max(1, math.ceil(read or 0))


def in_namespace(options: Mapping[str, Any], namespace: str) -> dict[str, Any]:
    """The options of a planner of this graph; ConfigError when they name another namespace.

    Statefile, queue and keys of the graph are in its namespace: a planner that read another one would scale
    another deployment, or none.
    """
    given = options.get("namespace") or namespace
    if given != namespace:
        raise ConfigError(
            f"Planner.namespace is {given!r}, but the graph runs in {namespace!r}",
            hint=f"Leave it out, or start the graph with --namespace {given}.",
        )
    return {**options, "namespace": namespace}


def with_worker_sizes(given: Mapping[str, Any], config: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """The planner's options, and where they do not say it, what the options of the other services say.

    Nothing is known of a service that the configuration does not have. The profile of a simulated engine is
    its own.
    """
    options = {key: value for key, value in kebab_keys(given).items() if value is not None}
    found_options: dict[str, Any] = {}
    for role in ("decode", "prefill"):
        component = options.get(f"{role}-component") or getattr(PlannerSettings, f"{role}_component")
        section = section_options(config, component)
        found_options |= _worker_options(section, role)
        if role == "decode" and engine_of(section) == SIMULATED:
            named: Options = {key: section[key] for key in ("profile", "model") if key in section}
            found_options[PROFILE] = SimOptions.from_options(named).profile_name
    given_to = (section_options(config, each).get(ROUTER) for each in SECTIONS)
    if router := next(filter(None, given_to), None):
        found_options[ROUTER] = router
    deadline = configured_deadline(config, options)
    if deadline.origin:
        found_options[DEADLINE] = deadline.ms
    return {**found_options, **options}


def _worker_options(section: Mapping[str, Any], role: str) -> dict[str, Any]:
    """The sizes in a worker's section, under the names that the planner's options have for that role."""
    if not section:
        return {}
    sizes: dict[str, Any] = engine_sizes(section)
    if section.get(CONCURRENT_PREFILLS) is not None:
        sizes[CONCURRENT_PREFILLS] = section[CONCURRENT_PREFILLS]
    same = worker_sizes(role)
    keys = {each.name: key_of(each) for each in fields(PlannerSettings)}
    return {keys[same[name]]: size for name, size in sizes.items() if name in same}
