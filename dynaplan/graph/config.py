"""The configuration of a graph: defaults < decorator < YAML < ``--Service.key=value``.

``read_config`` parses and merges; ``validate_config`` checks sections, names and types; ``resolve_graph``
turns graph and configuration into the services that ``serve`` starts. After these every value is valid,
and no other code checks it again.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any

from dynaplan.config.frontend import AUTO
from dynaplan.config.model_entries import OPTIONS_OF_ENTRIES, models_together, served_models
from dynaplan.config.overrides import (
    MODEL_SETS,
    MODELS,
    Sections,
    deep_merge,
    merge_sections,
    parse_overrides,
)
from dynaplan.config.parallelism import gpus_needed, tensor_parallel_size
from dynaplan.config.schema import SECTIONS
from dynaplan.config.service_config import (
    COMMON,
    COMMON_CONFIGS,
    CONFIG_VARIABLE,
    SERVICE_ARGS,
    common_values,
    kebab_keys,
    names_of_common,
    section_options,
)
from dynaplan.config.settings.fields import Options, kebab, options_of
from dynaplan.config.settings.planner import PlannerSettings
from dynaplan.config.settings.worker import SIMULATED, Resources, ServiceArgs, engine_of
from dynaplan.graph.lifecycle import Role
from dynaplan.graph.loading import Graph
from dynaplan.graph.model import GraphSpec, ServiceSpec, section_name
from dynaplan.graph.service import Service
from dynaplan.util.errors import ConfigError, Faults, GraphError, all_faults, nearest
from dynaplan.util.masking import mask_config

DEPLOYMENT_CONFIG_VARIABLE = "DYN_DEPLOYMENT_CONFIG"
"""The environment variable with YAML or JSON text that replaces the file."""


SAME_FILE = 0.8
"""The similarity from which a file's name counts as a slip of another's: all end with the same letters."""


MOST_FILES = 6
"""The most files that are named where none is near."""


def find_config_file(
    name: str, working_dir: Path, graph: Graph | None = None, *, beside: Sequence[Path] = ()
) -> Path:
    """Return the file of ``-f NAME``: in the working directory, in ``beside``, or beside the graph's module.

    Raises ConfigError, with the nearest name, when it is in none of them.
    """
    folders = [working_dir.resolve(), *beside]
    if graph is not None and graph.module_file is not None:
        folders.append(graph.module_file.parent)
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    known = [file.name for folder in folders for file in folder.glob("*.y*ml")]
    looked = " and ".join(dict.fromkeys(map(str, folders)))
    hint = nearest(name, known, cutoff=SAME_FILE, most=MOST_FILES)
    raise ConfigError(f"-f {name}: no such file in {looked}", hint=hint)


def read_config(file: Path | None, overrides: Sequence[str] = ()) -> Sections:
    """Read the YAML and merge the overrides into it, deeply.

    ``DYN_DEPLOYMENT_CONFIG``, when set, replaces the file; the overrides still apply. Raises ConfigError
    for text that is not YAML or an override. Names and types are checked by ``validate_config``.
    """
    from dynaplan.config.yaml_file import read_sections, read_sections_file

    text = os.environ.get(DEPLOYMENT_CONFIG_VARIABLE, "")
    if text:
        sections = read_sections(text, DEPLOYMENT_CONFIG_VARIABLE)
    else:
        sections = read_sections_file(file) if file is not None else {}
    return merge_sections(sections, parse_overrides(overrides))


def dry_run_text(config: Mapping[str, Any]) -> str:
    """Return the text of ``--dry-run`` about the configuration, in the words of NVIDIA's ``dynamo serve``.

    Secrets in it are masked.
    """
    return f"Service Configuration:\n{json.dumps(mask_config(config), indent=2, ensure_ascii=False)}"


def environment_text(config: Mapping[str, Any]) -> str:
    """Return the text of ``--show-env``: the variable with the whole configuration, secrets masked."""
    value = json.dumps(mask_config(config), ensure_ascii=False)
    return f"Environment Variable that would be set:\n{CONFIG_VARIABLE}={value}"


STOCK_SERVICES = frozenset(
    {
        "Frontend", "Processor", "Router", "VllmWorker", "PrefillWorker", "Planner",
        "DecodeWorker", "EncodeWorker", "KvRouter", "MockPrefillWorker", "MockVllmWorker", "Prometheus",
        "SGLangDecodeWorker", "SGLangWorker", "SimpleLoadBalancer", "TensorRTLLMPrefillWorker",
        "TensorRTLLMWorker", "VllmBaseWorker", "VllmDecodeWorker", "VllmPrefillWorker",
    }
)  # fmt: skip
"""Names of our stock services and of Dynamo's. A YAML may have a section for one that the graph lacks."""

ENGINES_BY_SERVICE = {"SGLang": "sglang", "TensorRTLLM": "trtllm", "TRTLLM": "trtllm"}
"""The engine of the original's services, by the beginnings of their names."""

FLAG = re.compile(r"[A-Za-z][\w.-]*", re.ASCII)
ARGUMENTS = {
    **{name: f"{SERVICE_ARGS}.{name}" for name in ("workers", "resources", "envs")},
    **dict.fromkeys(("gpu", "gpus"), f"{SERVICE_ARGS}.resources.gpu"),
}
"""Keys that belong below ``ServiceArgs``, and the place of each there."""

TYPO_SIMILARITY = 0.85
"""The similarity (difflib's ratio) from which an unknown option counts as a slip of a known one.

It is high because an engine's new flags often resemble its old ones.
"""


def validate_config(graph: Graph, config: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Raise ConfigError for all unknown sections, unknown keys and wrong types; return the warnings."""
    with all_faults() as faults:
        return check_sections(graph, config, faults)


def check_sections(graph: Graph, config: Mapping[str, Mapping[str, Any]], faults: Faults) -> list[str]:
    """Gather unknown sections, unknown keys and wrong types by section; return the warnings.

    A section named after a stock service that this graph lacks is a warning, so that one YAML serves
    several graphs; any other unknown section is an error. Services without an option table take any key. So
    do services with a real engine: an unknown option becomes a flag of that engine (docs/decisions/0016).
    """
    services = {service.name: service for service in graph.services()}
    warnings: list[str] = []
    for name, section in config.items():
        with faults.gathering(section_name(services[name]) if name in services else name):
            if not isinstance(section, Mapping):
                raise ConfigError(f"{name} = {section!r}: expected a mapping of options")
            if name in (COMMON, MODELS, MODEL_SETS):
                continue
            if name in services:
                warnings += _check_section(services[name], section, config, faults)
            else:
                warnings.append(_check_unused_section(name, section, services, config))
    return warnings + unused_common_values(config)


def unused_common_values(config: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return a warning for each value of ``Common`` that reaches neither a model nor another section."""
    if not config.get(MODELS):
        return []
    sections = [section for name, section in config.items() if name not in (COMMON, MODELS)]
    taken = {kebab(key) for section in sections for key in (*section, *names_of_common(section))}
    return [
        f"{COMMON}.{key} has no effect: no engine of these models has such an option"
        for key in config.get(COMMON) or {}
        if kebab(key) not in taken | OPTIONS_OF_ENTRIES
    ]


def unused_common_overrides(config: Mapping[str, Mapping[str, Any]], overrides: Sequence[str]) -> list[str]:
    """Return a warning for each override ``--Common.key=value`` that no section takes.

    With models ``unused_common_values`` tells of these too.
    """
    if config.get(MODELS):
        return []
    listed = {kebab(key) for section in config.values() for key in names_of_common(section)}
    taken = listed | {"served-model-name"}  # every service of the model takes it from Common unasked
    return [
        f"{COMMON}.{key} has no effect: no service lists it in its {COMMON_CONFIGS}"
        for key in parse_overrides(overrides).get(COMMON, {})
        if kebab(key) not in taken
    ]


def _check_unused_section(
    name: str,
    section: Mapping[str, Any],
    services: Mapping[str, Service[Any]],
    config: Mapping[str, Mapping[str, Any]],
) -> str:
    """Return the warning for a section of a stock service that the graph lacks; raise for any other name.

    Values of options that are known are checked all the same. The warning says where this graph has them.
    """
    if name not in STOCK_SERVICES:
        raise ConfigError(
            f"{name}: no such service in this graph", hint=nearest(name, [*services, COMMON, MODELS])
        )
    _, options, _ = SECTIONS.get(name, ("", {}, False))
    warning = f"{name}: this graph has no such service; its section has no effect"
    if engine := next((each for prefix, each in ENGINES_BY_SERVICE.items() if name.startswith(prefix)), ""):
        warning += f"; here `engine` is an option of VllmWorker and PrefillWorker, as in -f {engine}.yaml"
    for key in section:
        if kebab(key) not in options or kebab(key) == COMMON_CONFIGS:
            continue
        _check_option(f"{name}.{key}", key, section[key], options)
        having = [each.name for each in services.values() if kebab(key) in (each.options or {})]
        having.sort(key=lambda other: kebab(key) not in kebab_keys(config.get(other) or {}))
        if having and name != having[0]:
            warning += f"; here write --{having[0]}.{kebab(key)}={section[key]}"
    return warning


def _check_section(
    service: Service[Any],
    section: Mapping[str, Any],
    config: Mapping[str, Mapping[str, Any]],
    faults: Faults,
) -> Iterator[str]:
    name = section_name(service)
    common = common_values(config, section)
    values = common | dict(section)
    engine = real_engine(service, values)
    for key, value in values.items():
        with faults.gathering(name):
            if kebab(key) == SERVICE_ARGS:
                yield from _check_service_args(service, value)
            elif kebab(key) == COMMON_CONFIGS:
                yield from _check_common(name, section, config.get(COMMON, {}))
            elif service.options is not None:
                where = f"{name}.{key} (from {COMMON})" if key in common else f"{name}.{key}"
                yield from _check_value(where, key, value, engine, service.options)


def _check_value(where: str, key: str, value: Any, engine: str, options: Options) -> Iterator[str]:
    option = options.get(kebab(key))
    if option is None and kebab(key) in ARGUMENTS:
        place = f"{where.rpartition('.')[0]}.{ARGUMENTS[kebab(key)]}"
        is_nested = kebab(key) in ("resources", "envs")
        hint = f"Its place is {place}." if is_nested else f"Write --{place}={value}."
        raise ConfigError(f"{where}: unknown option", hint=hint)
    if option is None and engine:
        yield from _pass_to_engine(where, key, engine, options)
    elif option is not None and option.engine not in ("", engine):
        effect = f"{engine} gets it as it is" if engine else "it has no effect"
        yield f"{where} is an option of {option.engine}; {effect}"
    else:
        _check_option(where, key, value, options)


def real_engine(service: Service[Any], values: Mapping[str, Any]) -> str:
    """Return the real engine that these options choose; empty for the simulated one and for no engine."""
    if service.options is None or "engine" not in service.options:
        return ""
    engine = engine_of(kebab_keys(values))
    return "" if engine == SIMULATED else engine


def _pass_to_engine(where: str, key: str, engine: str, options: Options) -> Iterator[str]:
    """Yield a warning when an option that is passed on to the engine looks like a mistyped known one."""
    if not FLAG.fullmatch(key):
        raise ConfigError(f"{where}: not a name that an option of {engine} can have")
    near = get_close_matches(kebab(key).lower(), options, 1, cutoff=TYPO_SIMILARITY)
    if near:
        yield f"{where} is passed on to {engine} as it is; did you mean {near[0]}?"


def _check_option(where: str, key: str, value: Any, options: Options) -> None:
    option = options.get(kebab(key))
    if option is None:
        raise ConfigError(f"{where}: unknown option", hint=_near_option(key, options))
    if not option.accepts(value):
        raise ConfigError(f"{where} = {value!r}: expected {option.expected}", hint=option.about)


def _near_option(key: str, options: Options) -> str:
    near = get_close_matches(kebab(key).lower(), options, 1, cutoff=0.5)
    return f"Did you mean {near[0]!r}?" if near else "No option of this service has a name like that."


def _check_common(name: str, section: Mapping[str, Any], common: Mapping[str, Any]) -> Iterator[str]:
    wanted = names_of_common(section)
    if not isinstance(wanted, list) or not all(isinstance(each, str) for each in wanted):
        raise ConfigError(f"{name}.{COMMON_CONFIGS} = {wanted!r}: expected a list of keys of {COMMON}")
    known = {kebab(key) for key in common}
    for each in wanted:
        if kebab(each) not in known:
            yield f"{name}.{COMMON_CONFIGS}: {COMMON} has no {each!r}. {nearest(each, common)}".rstrip()


def _check_service_args(service: Service[Any], value: Any) -> Iterator[str]:
    where = f"{section_name(service)}.{SERVICE_ARGS}"
    _check_keys(where, value, options_of(ServiceArgs))
    arguments = value or {}
    _check_keys(f"{where}.resources", arguments.get("resources"), options_of(Resources))
    _check_envs(f"{where}.envs", arguments.get("envs"))
    if "dynamo" in arguments:
        yield f"{where}.dynamo has no effect; use --namespace"
    if service.in_process_of and arguments:
        yield f"{where} has no effect: {service.name} runs in {service.in_process_of}'s process"


def _check_keys(where: str, value: Any, known: Options) -> None:
    if not isinstance(value, Mapping | NoneType):
        raise ConfigError(f"{where} = {value!r}: expected a mapping", hint=f"Keys: {', '.join(known)}.")
    for key in value or ():
        if key not in known:
            raise ConfigError(f"{where}.{key}: unknown key", hint=nearest(str(key), known))


def _check_envs(where: str, envs: Any) -> None:
    if not isinstance(envs, Mapping | NoneType):
        raise ConfigError(
            f"{where} = {envs!r}: expected a mapping of variables", hint="Write envs: {NAME: 'value'}."
        )
    for key, value in (envs or {}).items():
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ConfigError(f"{where}.{key} = {value!r}: expected text", hint="Put the value in quotes.")
        if not key or "=" in key or "\0" in f"{key}{value}":
            raise ConfigError(f"{where}.{key}: not a name and value that an environment can hold")


DEFAULT_NAMESPACE = PlannerSettings.namespace
NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")
"""The form of a namespace, which becomes part of file names, queue names and keys."""


def with_frontend_count(graph: Graph, config: Sections, count: Callable[[], int]) -> Sections:
    """Return the configuration with a number in the place of each Frontend's ``workers: auto``.

    ``count`` is called for that number, and only if it is needed.
    """
    frontends = [service.name for service in graph.services() if service.role is Role.FRONTEND]
    asking = [
        name
        for name in frontends
        if _drop_nulls(config.get(name, {}).get(SERVICE_ARGS)).get("workers") == AUTO
    ]
    counted = {name: {SERVICE_ARGS: {"workers": count()}} for name in asking}
    return merge_sections(config, counted) if counted else config


def resolve_graph(
    graph: Graph, config: Mapping[str, Mapping[str, Any]], namespace: str | None = None
) -> GraphSpec:
    """Return the services to run, the entry first, with workers, GPUs and environment.

    The namespace is the given one, else the one that the services' decorators agree on, else ``dynamo``.
    Raises ConfigError or GraphError when the graph cannot be started like this.
    """
    services = graph.services()
    names = {service.name for service in services}
    for service in services:
        if service.in_process_of and service.in_process_of not in names:
            raise GraphError(
                f"{service.name} runs in the process of {service.in_process_of}, which this graph lacks",
                hint=f"Link {service.in_process_of} into {graph.identifier}.",
            )
    planners = [service.name for service in services if service.role is Role.PLANNER]
    if len(planners) > 1:
        raise GraphError(
            f"More than one planner found in the pipeline: {', '.join(planners)}", hint="Link one."
        )
    models_together(config)
    sharing = {model.name for model in served_models(config) if model.settings.share}
    return GraphSpec(
        identifier=graph.identifier,
        working_dir=str(graph.working_dir),
        namespace=_namespace(services, namespace),
        services=tuple(_spec(service, config, sharing) for service in services),
    )


def _namespace(services: list[Service[Any]], chosen: str | None) -> str:
    declared = sorted({service.config.namespace for service in services} - {""})
    if not chosen and len(declared) > 1:
        raise GraphError(
            f"All components must have the same namespace, got {set(declared)}",
            hint="Give them one namespace in @service(dynamo=...), or use --namespace.",
        )
    namespace = chosen or next(iter(declared), DEFAULT_NAMESPACE)
    if not NAMESPACE.fullmatch(namespace):
        raise ConfigError(
            f"namespace {namespace!r}: not a usable name",
            hint="Expected letters, digits, '-' and '_', beginning with a letter or digit, 63 at most.",
        )
    return namespace


def _spec(
    service: Service[Any], config: Mapping[str, Mapping[str, Any]], sharing: Collection[str]
) -> ServiceSpec:
    if service.in_process_of:
        return ServiceSpec(service.name, service.role, in_process_of=service.in_process_of)
    written = _drop_nulls(config.get(service.name, {}).get(SERVICE_ARGS))
    arguments = deep_merge(
        {
            "workers": service.config.workers,
            "resources": service.config.resources,
            "envs": service.config.envs,
        },
        written,
    )
    where = f"{service.name}.{SERVICE_ARGS}"
    return ServiceSpec(
        name=service.name,
        role=service.role,
        workers=_workers(f"{where}.workers", arguments["workers"], service.role),
        gpus=_gpus_of(service, config, arguments["resources"], "gpu" in written.get("resources", {})),
        envs={name: str(value) for name, value in arguments["envs"].items()},
        public_endpoints=tuple(each.name for each in service.endpoints.values() if each.is_public),
        model=service.model,
        shares_memory=service.model in sharing,
    )


def _drop_nulls(mapping: Mapping[str, Any] | None) -> dict[str, Any]:
    """Drop the keys that are written without a value: they mean the same as keys that are not written."""
    return {
        key: _drop_nulls(value) if isinstance(value, Mapping) else value
        for key, value in (mapping or {}).items()
        if value is not None
    }


def _workers(where: str, value: Any, role: Role) -> int:
    read = options_of(ServiceArgs)["workers"].read(value, is_text=isinstance(value, str))
    if read is None:
        or_auto = f", or {AUTO}" if role is Role.FRONTEND else ""
        raise ConfigError(f"{where} = {value!r}: expected a whole number of at least 1{or_auto}")
    return int(read)


def _gpus_of(
    service: Service[Any],
    config: Mapping[str, Mapping[str, Any]],
    resources: Mapping[str, Any],
    is_written: bool,
) -> float:
    """Return the number of GPUs of one worker: as written, else enough for the engine's parallel ranks.

    Raises ConfigError when a written number does not fit those ranks; 0 (no GPU) fits any engine.
    """
    gpus = _gpus(f"{service.name}.{SERVICE_ARGS}.resources.gpu", resources.get("gpu"))
    options = _engine_options(service, config)
    if options is None:
        return gpus
    try:
        if not is_written:
            return gpus_needed(options, gpus)
        tensor_parallel_size(options, gpus)
    except ConfigError as error:
        raise ConfigError(f"{service.name}: {error.args[0]}", hint=error.hint) from error
    return gpus


def _gpus(where: str, value: Any) -> float:
    gpus = options_of(Resources)["gpu"].read(Resources.gpu if value is None else value, is_text=True)
    if gpus is None:
        raise ConfigError(f"{where} = {value!r}: expected a number of GPUs, 0 or more")
    if gpus > 1 and gpus != int(gpus):
        raise ConfigError(
            f"{where} = {value!r}: Float GPUs larger than 1 is not supported",
            hint="Expected a whole number, or a fraction below 1 for workers that share a GPU.",
        )
    return int(gpus) if gpus == int(gpus) else gpus


def _engine_options(
    service: Service[Any], config: Mapping[str, Mapping[str, Any]]
) -> Mapping[str, Any] | None:
    """Return the options of a service that is an engine's worker; None for any other service."""
    if service.options is None or "tensor-parallel-size" not in service.options:
        return None
    return section_options(config, service.name)
