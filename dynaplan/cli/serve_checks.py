"""Checks of ``serve`` before anything starts: settings that a child would refuse, and models' memory.

Of memory, refused is only what cannot be otherwise: llama.cpp clears the memory of all its KV entries at its
start, so that a box without room for them ends in an out-of-memory kill, and vLLM itself refuses. All else is
a warning, as a model with sliding windows takes less than the formula says.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynaplan.config.command_words import effective_options
from dynaplan.config.frontend import NAMES, SECTIONS
from dynaplan.config.keys import read_keys_file
from dynaplan.config.overrides import merge_sections
from dynaplan.config.planner import settings_in_graph, settings_of_models
from dynaplan.config.service_config import COMMON, section_options, served_model_name
from dynaplan.config.settings.fields import WRITTEN
from dynaplan.config.settings.worker import SIMULATED, SimOptions, engine_of
from dynaplan.config.stock import matching_options
from dynaplan.engines import registry
from dynaplan.engines.model_files import OPTION
from dynaplan.engines.model_memory import MemoryNeed, longest_context, memory_need
from dynaplan.engines.server.engine_options import lora_names
from dynaplan.graph.lifecycle import Role
from dynaplan.graph.model import section_name
from dynaplan.process.memory import BoxMemory, box_memory
from dynaplan.util.amounts import gib
from dynaplan.util.errors import ConfigError, Faults

if TYPE_CHECKING:
    from dynaplan.config.overrides import Sections
    from dynaplan.config.settings.planner import PlannerSettings
    from dynaplan.contract.gpus import Gpu
    from dynaplan.graph.loading import Graph
    from dynaplan.graph.model import GraphSpec, ServiceSpec

Options = Mapping[str, Any]


def check_settings(graph: Graph, spec: GraphSpec, config: Sections, faults: Faults) -> list[str]:
    """Read the stock services' options as their processes will, and return the warnings.

    Errors are gathered in ``faults``; a service that has one already is left out.
    """
    warnings: list[str] = []
    for each in spec.services:
        check, place = CHECKS.get(each.role), section_name(each)
        if check is None or place in faults.places or not graph.service(each.name).options:
            continue
        with faults.gathering(place, prefix=f"{place}: "):
            _check_model_arrives(each, section_options(config, each.name), config)
            try:
                found = check(each, spec, config)
            except ConfigError as error:
                error.hint = error.hint.replace(OPTION, f"--{place}.model=PATH") if each.model else error.hint
                raise
            warnings += (f"{place}: {warning}" for warning in found)
    if not faults:
        with faults.gathering():
            _check_both_sides(spec, config)
            _check_planned_model(graph, spec, config)
    return list(dict.fromkeys(warnings))


def locate_models(graph: Graph, config: Sections, directory: Path) -> Sections:
    """The configuration with what the workers of real engines need to agree on their model.

    Whatever is a path in ``directory`` becomes absolute, for workers may run elsewhere, and every worker
    has the name that clients use: its own ``served-model-name``, the Frontend's, or the path's last part.
    """
    from dynaplan.graph.config import real_engine

    located: Sections = {}
    for service in graph.services():
        options = section_options(config, service.name)
        paths = {key: each.path for key, each in (service.options or {}).items() if each.path}
        given = (key for key in options if key in paths)
        found = {key: _absolute_path(options[key], directory, paths[key] == WRITTEN) for key in given}
        engine = real_engine(service, options)
        if engine and options.get("model"):
            model, usual = registry.model_location(engine, options["model"], directory)
            found["model"] = model
            found["served-model-name"] = (
                options.get("served-model-name") or served_model_name(config) or usual
            )
        located[service.name] = {key: value for key, value in found.items() if value}
    return merge_sections(config, {name: section for name, section in located.items() if section})


def _absolute_path(value: object, directory: Path, is_new: bool) -> str:
    """The absolute path of what may be a path in that directory; empty when there is nothing, nor will be."""
    path = directory / Path(os.path.expanduser(str(value)))
    return str(path.absolute()) if value and (is_new or path.exists()) else ""


def _check_both_sides(spec: GraphSpec, config: Sections) -> None:
    """Raise ConfigError where prefill workers could not hand over to the decode workers of their model."""
    for prefill in (each for each in spec.services if each.role is Role.PREFILL):
        same = (each for each in spec.services if each.role is Role.DECODE and each.model == prefill.model)
        for decode in same:
            _check_pair(decode, prefill, config)


def _check_pair(decode: ServiceSpec, prefill: ServiceSpec, config: Sections) -> None:
    both = [section_options(config, each.name) for each in (decode, prefill)]
    engines = {engine_of(options) for options in both}
    real = sorted(engines - {SIMULATED})
    if not real or not all(map(registry.find_engine, engines)):
        return
    for key in matching_options(real[0]):
        values = [engine_of(options) if key == "engine" else options.get(key) for options in both]
        if values[0] != values[1]:
            raise ConfigError(
                f"{decode.name}.{key} is {values[0]!r}, but {prefill.name}.{key} is {values[1]!r}",
                hint=f"Expected the same. Write it in Models.{decode.model}, and not below prefill."
                if decode.model
                else f"Expected the same. --Common.{key}=... is for all services that list {key} in their "
                "common-configs.",
            )


def _check_planned_model(graph: Graph, spec: GraphSpec, config: Sections) -> None:
    """Raise ConfigError for a planner that would count the traffic of a model that no frontend serves.

    Nothing is checked for the policy ``load``, without a Frontend, and for workers of unknown options.
    """
    planner, decode = spec.of_role(Role.PLANNER), spec.of_role(Role.DECODE)
    if not (planner and decode and spec.of_role(Role.FRONTEND) and graph.service(decode.name).options):
        return
    options = section_options(config, planner.name)
    name = options.get(NAMES[0])
    if not name or options.get("policy", "load") == "load":
        return
    served = _served_names(config, section_options(config, decode.name))
    if str(name).lower() not in {each.lower() for each in served}:
        raise ConfigError(
            f"{planner.name}.{NAMES[0]} is {name!r}, and no frontend serves that: no traffic would count",
            hint=f"Leave it out, or write one of: {', '.join(served)}.",
        )


def _served_names(config: Sections, decode: Options) -> list[str]:
    """Return every name that clients may call the model of these decode workers, or an adapter of it."""
    sections = (*(section_options(config, name) for name in (*SECTIONS, COMMON)), decode)
    given = (section.get(key) for section in sections for key in NAMES)
    names = [
        str(each) for value in given if value for each in (value if isinstance(value, list) else [value])
    ]
    if engine_of(decode) == SIMULATED and not decode.get("model"):
        names.append(SimOptions.model)
    return list(dict.fromkeys([*names, *lora_names(decode.get("lora-modules"))]))


def _check_model_arrives(service: ServiceSpec, options: Options, config: Sections) -> None:
    """Raise ConfigError when ``Common`` names a model that the service's section does not take from there."""
    is_real = service.role in (Role.DECODE, Role.PREFILL) and engine_of(options) != SIMULATED
    model = (config.get(COMMON) or {}).get("model")
    if is_real and model and not options.get("model"):
        raise ConfigError(
            f"it has no model: {COMMON}.model reaches only a section that lists model in its common-configs",
            hint=f"Write --{service.name}.model={model}, or take a file that has the lists: "
            f"-f {engine_of(options)}.yaml.",
        )


def _check_engine(service: ServiceSpec, _graph: GraphSpec, config: Sections) -> list[str]:
    options = section_options(config, service.name)
    return registry.check_engine(engine_of(options), options, service.gpus)


def _check_planner(service: ServiceSpec, graph: GraphSpec, config: Sections) -> list[str]:
    if graph.on_demand:
        for name, settings in settings_of_models(config, graph.namespace).items():
            try:
                _check_sources(settings)
            except ConfigError as error:
                raise ConfigError(f"Models.{name}: {error.args[0]}", hint=error.hint) from error
        return []
    options = section_options(config, service.name)
    _check_sources(settings_in_graph(options, graph.namespace, config))
    if options.get("environment") != "kubernetes":
        return []
    return ["environment = kubernetes means local here: it scales this box"]


def _check_sources(settings: PlannerSettings) -> None:
    if settings.sees_traffic:
        from dynaplan.planner.inputs import check_sources  # half of a planner: 25 ms

        check_sources(settings)


def _check_frontend(service: ServiceSpec, _graph: GraphSpec, config: Sections) -> list[str]:
    recording = section_options(config, service.name).get("record-traffic")
    if recording and (Path(recording).is_dir() or not Path(recording).parent.is_dir()):
        raise ConfigError(
            f"record-traffic is {recording!r}",
            hint="Expected a file in a directory that is there: a new one, or a recording to go on with.",
        )
    if keys := section_options(config, service.name).get("api-keys"):
        read_keys_file(Path(keys))
    return []


CHECKS: Mapping[Role, Callable[[ServiceSpec, GraphSpec, Sections], list[str]]] = {
    Role.DECODE: _check_engine,
    Role.PREFILL: _check_engine,
    Role.PLANNER: _check_planner,
    Role.FRONTEND: _check_frontend,
}


LLAMACPP = "llamacpp"


@dataclass(frozen=True)
class ServiceMemory:
    """The memory of a service's workers: each takes ``need``, of ``gpu_bytes`` or, if 0, of the box."""

    service: str
    engine: str
    model: str
    workers: int
    need: MemoryNeed
    gpu_bytes: float = 0.0


def check_memory(
    spec: GraphSpec, config: Sections, gpus: Sequence[Gpu], is_simulated: bool
) -> tuple[list[str], list[str]]:
    """Return a line for each service about its memory, and warnings.

    Raises ConfigError, with the longest context that fits, when a worker can certainly not start.
    """
    gpus = () if is_simulated else gpus
    found = [memory for service in spec.services if (memory := _service_memory(service, config, gpus))]
    if not found:
        return [], []
    box = box_memory()
    lines = [_memory_line(each, box) for each in found]
    warnings = [text for each in found if each.gpu_bytes and (text := _memory_fault(each))]
    on_demand = {service.name for service in spec.on_demand}
    in_box = [each for each in found if not each.gpu_bytes]
    # Models that are loaded on request need not be there together.
    alone = [[each] for each in in_box if each.service in on_demand]
    for together in ([each for each in in_box if each.service not in on_demand], *alone):
        warnings += _box_memory_faults(together, box)
    return lines, warnings


def _service_memory(
    service: ServiceSpec, config: Mapping[str, Any], gpus: Sequence[Gpu]
) -> ServiceMemory | None:
    options = effective_options(section_options(config, service.name))
    engine = engine_of(options)
    need = memory_need(engine, options, service.gpus)
    if need is None:
        return None
    smallest = min((gpu.memory_bytes for gpu in gpus if gpu.memory_bytes), default=0)
    on_cpu = not service.gpus or options.get("n-gpu-layers") == 0
    number = max(1, int(service.gpus))
    if service.model and engine == LLAMACPP and need.total_bytes > smallest:
        number = len(gpus)  # it gets as many as it needs
    gpu_bytes = 0.0 if on_cpu else smallest * number
    gpu_bytes *= need.gpu_fraction
    return ServiceMemory(service.name, engine, str(options["model"]), service.workers, need, gpu_bytes)


def _memory_line(memory: ServiceMemory, box: BoxMemory) -> str:
    need = memory.need
    requests = f"{need.sequences} x " if need.sequences > 1 else ""
    tokens = f"{requests}{need.context_tokens} tokens of {need.token_bytes / 1024:.1f} KiB"
    parts = f"weights {gib(need.weights_bytes)} + KV {gib(need.kv_bytes)} ({tokens})"
    has, whose = (memory.gpu_bytes, "its GPUs") if memory.gpu_bytes else (box.total_bytes, "this box")
    each = "per worker" if memory.workers > 1 else "for its worker"
    return f"{memory.service}: {parts} = {gib(need.total_bytes)} {each}, of {gib(has)} of {whose}"


def _memory_fault(memory: ServiceMemory) -> str:
    """Return a warning when a worker may not fit its GPUs, else ""; ConfigError if it certainly does not."""
    need = memory.need
    if need.total_bytes <= memory.gpu_bytes:
        return ""
    fault = f"{_memory_request(memory)}; its GPUs have {gib(memory.gpu_bytes)} for it"
    # llama.cpp leaves on the CPU what its GPUs cannot hold.
    is_certain = need.is_certain and memory.engine != LLAMACPP
    fits = longest_context(memory.gpu_bytes - need.weights_bytes, need.token_bytes * need.sequences)
    return _report_fault(memory, fault, fits, is_certain)


def _box_memory_faults(services: Sequence[ServiceMemory], box: BoxMemory) -> list[str]:
    """Return a warning when workers need more memory than the box has; shared weights count once.

    Raises ConfigError when they certainly need more than there is in all.
    """
    if not services:
        return []
    weights = {each.model: each.need.weights_bytes for each in services}
    kv_bytes = sum(each.workers * each.need.kv_bytes for each in services)
    needed = sum(weights.values()) + kv_bytes
    largest = max(services, key=lambda each: each.workers * each.need.kv_bytes)
    fault = _memory_request(largest)
    workers = sum(each.workers for each in services)
    if workers > 1:
        fault += f"; all {workers} workers need {gib(needed)}"
    if needed > box.total_bytes:
        is_certain = all(each.need.is_certain and each.engine == LLAMACPP for each in services)
        fits = _longest_context(services, box.total_bytes - sum(weights.values()))
        text = f"{fault}; this box has {gib(box.total_bytes)}"
        return [_report_fault(largest, text, fits, is_certain)]
    if needed > box.available_bytes:
        fits = _longest_context(services, box.available_bytes - sum(weights.values()))
        text = f"{fault}; {gib(box.available_bytes)} of {gib(box.total_bytes)} are free now"
        return [_report_fault(largest, text, fits, False)]
    return []


def _longest_context(services: Sequence[ServiceMemory], kv_bytes: float) -> int:
    """Return the context in tokens with which the KV entries of all workers take that memory."""
    token_bytes = sum(each.workers * each.need.token_bytes * each.need.sequences for each in services)
    return longest_context(kv_bytes, token_bytes)


def _memory_request(memory: ServiceMemory) -> str:
    need = memory.need
    slots = f" for each of {need.sequences} requests (max-num-seqs)" if need.sequences > 1 else ""
    return (
        f"{need.context_option} is {need.context_tokens}{slots}, which needs {gib(need.kv_bytes)} "
        f"of KV entries and {gib(need.weights_bytes)} of weights per worker"
    )


def _report_fault(memory: ServiceMemory, fault: str, fits: int, is_certain: bool) -> str:
    """Return the warning; ConfigError when ``is_certain``. ``fits`` is the longest context, 0 for none."""
    service, engine, option = memory.service, memory.engine, memory.need.context_option
    smaller = {LLAMACPP: "a smaller max-num-seqs, or cache-type-k and cache-type-v: q8_0"}
    hint = f"The longest context that fits is {option}: {fits}." if fits else "Not even the weights fit."
    hint += f" Also: {smaller.get(engine, 'a kv-cache-dtype of 8 bits, or more GPUs per worker')}."
    if is_certain:
        raise ConfigError(f"{service}: {fault}", hint=hint)
    return f"{service}: {fault}. {hint}"
