"""Checks of ``serve`` before anything starts: a child process would refuse the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynaplan.config.service_config import section_options, served_model_name
from dynaplan.config.settings.fields import WRITTEN
from dynaplan.config.settings.worker import SIMULATED, engine_of
from dynaplan.config.stock import matching_options
from dynaplan.graph.lifecycle import Role
from dynaplan.util.errors import ConfigError

if TYPE_CHECKING:
    from dynaplan.config.overrides import Sections
    from dynaplan.graph.loading import Graph
    from dynaplan.graph.model import GraphSpec, ServiceSpec

Options = Mapping[str, Any]


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
            found = check(section_options(config, each.name), each, spec)
        except ConfigError as error:
            raise ConfigError(f"{each.name}: {error.args[0]}", hint=error.hint) from error
        warnings += (f"{each.name}: {warning}" for warning in found)
    return list(dict.fromkeys(warnings))


def locate_models(graph: Graph, config: Sections, directory: Path) -> Sections:
    """The configuration with what the workers of real engines need to agree on their model.

    Whatever is a path in ``directory`` becomes absolute, for workers may run elsewhere, and every worker
    has the name that clients use: its own ``served-model-name``, the Frontend's, or the path's last part.
    """
    from dynaplan.config.overrides import merge_sections
    from dynaplan.engines import registry
    from dynaplan.graph.config import real_engine

    located: Sections = {}
    for service in graph.services():
        options = section_options(config, service.name)
        paths = {key: each.path for key, each in (service.options or {}).items() if each.path}
        given = (key for key in options if key in paths)
        found = {key: _found(options[key], directory, paths[key] == WRITTEN) for key in given}
        engine = real_engine(service, options)
        if engine and options.get("model"):
            model, usual = registry.model_location(engine, options["model"], directory)
            found["model"] = model
            found["served-model-name"] = (
                options.get("served-model-name") or served_model_name(config) or usual
            )
        located[service.name] = {key: value for key, value in found.items() if value}
    return merge_sections(config, {name: section for name, section in located.items() if section})


def _found(value: object, directory: Path, is_new: bool) -> str:
    """The absolute path of what may be a path in that directory; empty when there is nothing, nor will be."""
    path = directory / Path(str(value)).expanduser()
    return str(path.absolute()) if value and (is_new or path.exists()) else ""


def _check_both_sides(spec: GraphSpec, config: Sections) -> None:
    decode, prefill = spec.of_role(Role.DECODE), spec.of_role(Role.PREFILL)
    if decode is None or prefill is None:
        return
    from dynaplan.engines import registry

    both = [section_options(config, each.name) for each in (decode, prefill)]
    engines = {engine_of(options) for options in both}
    real = sorted(engines - {SIMULATED})
    if not real or not engines <= set(registry.ENGINES):
        return
    for key in matching_options(real[0]):
        values = [engine_of(options) if key == "engine" else options.get(key) for options in both]
        if values[0] != values[1]:
            raise ConfigError(
                f"{decode.name}.{key} is {values[0]!r}, but {prefill.name}.{key} is {values[1]!r}",
                hint=f"Expected the same. --Common.{key}=... is for all services that list {key} in their "
                "common-configs.",
            )


def _check_engine(options: Options, service: ServiceSpec, _graph: GraphSpec) -> list[str]:
    from dynaplan.engines import registry

    return registry.check_engine(engine_of(options), options, service.gpus)


def _check_planner(options: Options, _service: ServiceSpec, graph: GraphSpec) -> list[str]:
    from dynaplan.config.planner import in_namespace, settings_of
    from dynaplan.planner.inputs import check_sources

    check_sources(settings_of(in_namespace(options, graph.namespace)))
    if options.get("environment") != "kubernetes":
        return []
    return ["environment = kubernetes means local here: it scales this box"]


def _check_frontend(options: Options, _service: ServiceSpec, _graph: GraphSpec) -> list[str]:
    recording = options.get("record-traffic")
    if recording and (Path(recording).is_dir() or not Path(recording).parent.is_dir()):
        raise ConfigError(
            f"record-traffic is {recording!r}",
            hint="Expected a file in a directory that is there: a new one, or a recording to go on with.",
        )
    return []


CHECKS: Mapping[Role, Callable[[Options, ServiceSpec, GraphSpec], list[str]]] = {
    Role.DECODE: _check_engine,
    Role.PREFILL: _check_engine,
    Role.PLANNER: _check_planner,
    Role.FRONTEND: _check_frontend,
}
