"""What a child process would refuse, refused by ``serve`` before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynaplan.domain.errors import ConfigError
from dynaplan.domain.lifecycle import Role

if TYPE_CHECKING:
    from dynaplan.domain.graph import GraphSpec, ServiceSpec
    from dynaplan.options.overrides import Sections
    from dynaplan.sdk.graph import Graph

Options = Mapping[str, Any]

SAME_ON_BOTH_SIDES = ("engine", "model", "served-model-name")
"""What a decode worker and the prefill worker whose KV entries it takes over have in common."""

PATHS = {"profile", "profile-results-dir", "load-predictor-warmup-trace"}
"""Options that name a file or directory, or else something that is shipped."""

WRITTEN = {"record-traffic", "log-dir"}
"""Options that name a file or directory that will be written."""

SAME_WITH: Mapping[str, tuple[str, ...]] = {
    "llamacpp": ("max-num-seqs", "parallel", "cache-type-k", "cache-type-v"),
}
"""What they also have in common with that engine: llama.cpp restores only what a server like it has saved."""


def check_settings(graph: Graph, spec: GraphSpec, config: Sections) -> list[str]:
    """Read the stock services' options as their processes will; the warnings.

    Raises ConfigError, naming service, key and value.
    """
    _check_both_sides(spec, config)
    warnings: list[str] = []
    for each in spec.services:
        check = CHECKS.get(each.role)
        if check is None or not graph.service(each.name).options:
            continue
        try:
            found = check(_options(config, each.name), each, spec)
        except ConfigError as error:
            raise ConfigError(f"{each.name}: {error.args[0]}", hint=error.hint) from error
        warnings += (f"{each.name}: {warning}" for warning in found)
    return list(dict.fromkeys(warnings))


def locate_models(graph: Graph, config: Sections, directory: Path) -> Sections:
    """The configuration with what the workers of real engines need to agree on their model.

    Whatever is a path in ``directory`` becomes absolute, for workers may run elsewhere, and every worker
    has the name that clients use: its own ``served-model-name``, the Frontend's, or the path's last part.
    """
    from dynaplan import wiring
    from dynaplan.sdk.validation import real_engine

    located = dict(config)
    for service in graph.services():
        options = _options(config, service.name)
        for key in (PATHS | WRITTEN) & options.keys():
            if found := _found(options[key], directory, key in WRITTEN):
                located[service.name] = {
                    **located.get(service.name, {}),
                    _spelling(key, config.get(service.name, {})): found,
                }
        engine = real_engine(service, options)
        if not engine or not options.get("model"):
            continue
        model, name = wiring.model_location(engine, options["model"], directory)
        name = options.get("served-model-name") or _frontend_name(config) or name
        added = {"model": model} | ({"served-model-name": name} if name else {})
        written = {_spelling(key, config.get(service.name, {})): value for key, value in added.items()}
        located[service.name] = {**located.get(service.name, {}), **written}
    return located


def _found(value: object, directory: Path, is_new: bool) -> str:
    """The absolute path of what may be a path in that directory; empty when there is nothing, nor will be."""
    path = directory / Path(str(value)).expanduser()
    return str(path.absolute()) if value and (is_new or path.exists()) else ""


def _options(config: Sections, service: str) -> dict[str, Any]:
    """The service's options as its process will see them."""
    from dynaplan.options.service_config import ServiceConfig, kebab_keys

    return kebab_keys(ServiceConfig(config).get_parsed_config(service))


def _frontend_name(config: Sections) -> str:
    """What the Frontend calls the model when its workers do not say; it reads this of Common unasked."""
    from dynaplan.options.service_config import COMMON

    sections = (_options(config, name) for name in ("Frontend", COMMON))
    return next((str(each["served-model-name"]) for each in sections if each.get("served-model-name")), "")


def _spelling(key: str, section: Options) -> str:
    """The key as the section writes it, that no option is there twice."""
    from dynaplan.options.tables import kebab

    return next((each for each in section if kebab(each) == key), key)


def _check_both_sides(spec: GraphSpec, config: Sections) -> None:
    decode, prefill = spec.of_role(Role.DECODE), spec.of_role(Role.PREFILL)
    if decode is None or prefill is None:
        return
    from dynaplan import wiring

    both = [_options(config, each.name) for each in (decode, prefill)]
    engines = {_engine(options) for options in both}
    if engines == {"sim"} or not engines <= set(wiring.ENGINES):
        return
    for key in (*SAME_ON_BOTH_SIDES, *SAME_WITH.get(min(engines), ())):
        values = [_engine(options) if key == "engine" else options.get(key) for options in both]
        if values[0] != values[1]:
            raise ConfigError(
                f"{decode.name}.{key} is {values[0]!r}, but {prefill.name}.{key} is {values[1]!r}",
                hint=f"Expected the same. --Common.{key}=... is for all services that list {key} in their "
                "common-configs.",
            )


def _engine(options: Options) -> str:
    return str(options.get("engine") or "sim")


def _check_engine(options: Options, service: ServiceSpec, _graph: GraphSpec) -> list[str]:
    from dynaplan import wiring

    return wiring.check_engine(_engine(options), options, service.gpus)


def _check_planner(options: Options, _service: ServiceSpec, graph: GraphSpec) -> list[str]:
    from dynaplan.planner.assembly import check_sources, settings_of

    check_sources(settings_of({**options, "namespace": graph.namespace}))
    if options.get("environment") != "kubernetes":
        return []
    return ["environment = kubernetes means local here: it scales this box"]


def _check_frontend(options: Options, _service: ServiceSpec, _graph: GraphSpec) -> list[str]:
    recording = options.get("record-traffic")
    if recording and (Path(recording).is_dir() or not Path(recording).parent.is_dir()):
        raise ConfigError(
            f"record-traffic is {recording!r}",
            hint="expected a file in a directory that is there: a new one, or a recording to go on with",
        )
    return []


CHECKS: Mapping[Role, Callable[[Options, ServiceSpec, GraphSpec], list[str]]] = {
    Role.DECODE: _check_engine,
    Role.PREFILL: _check_engine,
    Role.PLANNER: _check_planner,
    Role.FRONTEND: _check_frontend,
}
