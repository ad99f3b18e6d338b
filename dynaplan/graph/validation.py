"""Check a configuration against a graph: sections, option names, types, and the ``ServiceArgs``."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from types import NoneType
from typing import Any

from dynaplan.config.overrides import parse_overrides
from dynaplan.config.service_config import (
    COMMON,
    COMMON_CONFIGS,
    SERVICE_ARGS,
    common_values,
    kebab_keys,
    names_of_common,
)
from dynaplan.config.settings.fields import Options, kebab, options_of
from dynaplan.config.settings.service_args import Resources, ServiceArgs
from dynaplan.config.settings.worker import SIMULATED, engine_of
from dynaplan.graph.errors import nearest
from dynaplan.graph.graph import Graph
from dynaplan.graph.service import Service
from dynaplan.util.errors import ConfigError

STOCK_SERVICES = frozenset(
    {
        "Frontend", "Processor", "Router", "VllmWorker", "PrefillWorker", "Planner",
        "DecodeWorker", "EncodeWorker", "KvRouter", "MockPrefillWorker", "MockVllmWorker", "Prometheus",
        "SGLangDecodeWorker", "SGLangWorker", "SimpleLoadBalancer", "TensorRTLLMPrefillWorker",
        "TensorRTLLMWorker", "VllmBaseWorker", "VllmDecodeWorker", "VllmPrefillWorker",
    }
)  # fmt: skip
"""Names of our stock services and of Dynamo's. A YAML may have a section for one that the graph lacks."""

FLAG = re.compile(r"[A-Za-z][\w.-]*", re.ASCII)
NEARLY_THE_SAME = 0.85
"""The similarity (difflib's ratio) from which an unknown option counts as a slip of a known one.

It is high because an engine's new flags often resemble its old ones.
"""


def validate_config(graph: Graph, config: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Raise ConfigError for the first unknown section, unknown key or wrong type; return the warnings.

    A section named after a stock service that this graph lacks is a warning, so that one YAML serves
    several graphs; any other unknown section is an error. Services without an option table take any key. So
    do services with a real engine: an unknown option becomes a flag of that engine (docs/decisions/0016).
    """
    services = {service.name: service for service in graph.services()}
    warnings: list[str] = []
    for name, section in config.items():
        if not isinstance(section, Mapping):
            raise ConfigError(f"{name} = {section!r}: expected a mapping of options")
        if name == COMMON:
            continue
        if name in services:
            warnings += _check_section(services[name], section, config)
        else:
            warnings.append(_absent(name, services))
    return warnings


def unused_common(config: Mapping[str, Mapping[str, Any]], overrides: Sequence[str]) -> list[str]:
    """Return a warning for each override ``--Common.key=value`` that no section takes."""
    listed = {kebab(key) for section in config.values() for key in names_of_common(section)}
    taken = listed | {"served-model-name"}  # every service of the model takes it from Common unasked
    return [
        f"{COMMON}.{key} has no effect: no service lists it in its {COMMON_CONFIGS}"
        for key in parse_overrides(overrides).get(COMMON, {})
        if kebab(key) not in taken
    ]


def _absent(name: str, services: Mapping[str, Any]) -> str:
    """Return the warning for a section of a stock service that the graph lacks; raise for any other name."""
    if name in STOCK_SERVICES:
        return f"{name}: this graph has no such service; its section has no effect"
    raise ConfigError(f"{name}: no such service in this graph", hint=nearest(name, [*services, COMMON]))


def _check_section(
    service: Service[Any], section: Mapping[str, Any], config: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    name = service.name
    common = common_values(config, section)
    values = common | dict(section)
    engine = real_engine(service, values)
    for key, value in values.items():
        if kebab(key) == SERVICE_ARGS:
            yield from _check_service_args(service, value)
        elif kebab(key) == COMMON_CONFIGS:
            yield from _check_common(name, section, config.get(COMMON, {}))
        elif service.options is not None:
            where = f"{name}.{key} (from {COMMON})" if key in common else f"{name}.{key}"
            option = service.options.get(kebab(key))
            if option is None and engine:
                yield from _passed_on(where, key, engine, service.options)
            elif option is not None and option.engine not in ("", engine):
                effect = f"{engine} gets it as it is" if engine else "it has no effect"
                yield f"{where} is an option of {option.engine}; {effect}"
            else:
                _check_option(where, key, value, service.options)


def real_engine(service: Service[Any], values: Mapping[str, Any]) -> str:
    """Return the real engine that these options choose; empty for the simulated one and for no engine."""
    if service.options is None or "engine" not in service.options:
        return ""
    engine = engine_of(kebab_keys(values))
    return "" if engine == SIMULATED else engine


def _passed_on(where: str, key: str, engine: str, options: Options) -> Iterator[str]:
    """Yield a warning when an option that is passed on to the engine looks like a slip of a known one."""
    if not FLAG.fullmatch(key):
        raise ConfigError(f"{where}: not a name that an option of {engine} can have")
    near = get_close_matches(kebab(key).lower(), options, 1, cutoff=NEARLY_THE_SAME)
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
    where = f"{service.name}.{SERVICE_ARGS}"
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
        raise ConfigError(f"{where} = {envs!r}: expected a mapping of variables")
    for key, value in (envs or {}).items():
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise ConfigError(f"{where}.{key} = {value!r}: expected text", hint="Put the value in quotes.")
        if not key or "=" in key or "\0" in f"{key}{value}":
            raise ConfigError(f"{where}.{key}: not a name and value that an environment can hold")
