"""Memory of the workers' models: what each takes, and whether it fits the GPUs or the box.

Refused is only what cannot be otherwise: llama.cpp clears the memory of all its KV entries at its start, so
that a box without room for them ends in an out-of-memory kill, and vLLM itself refuses. All else is a
warning, as a model with sliding windows takes less than the formula says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dynaplan.config.service_config import section_options
from dynaplan.config.settings.worker import engine_of
from dynaplan.engines import registry
from dynaplan.engines.timing_model.kv_memory import MemoryNeed, longest_context
from dynaplan.process.memory import BoxMemory
from dynaplan.util.errors import ConfigError

if TYPE_CHECKING:
    from dynaplan.config.overrides import Sections
    from dynaplan.fleet.gpus import Gpu
    from dynaplan.graph.model import GraphSpec, ServiceSpec

GB = 2**30
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
    found = [
        memory
        for service in spec.services
        if (memory := _service_memory(service, config, () if is_simulated else gpus))
    ]
    if not found:
        return [], []
    box = registry.box_memory()
    lines = [_line(each, box) for each in found]
    warnings = [text for each in found if each.gpu_bytes and (text := _judged(each))]
    return lines, warnings + _judged_together([each for each in found if not each.gpu_bytes], box)


def _service_memory(
    service: ServiceSpec, config: Mapping[str, Any], gpus: Sequence[Gpu]
) -> ServiceMemory | None:
    options = section_options(config, service.name)
    engine = engine_of(options)
    need = registry.memory_need(engine, options, service.gpus)
    if need is None:
        return None
    smallest = min((gpu.memory_bytes for gpu in gpus if gpu.memory_bytes), default=0)
    on_cpu = not service.gpus or options.get("n-gpu-layers") == 0
    gpu_bytes = 0.0 if on_cpu else smallest * max(1, int(service.gpus))
    gpu_bytes *= need.gpu_fraction
    return ServiceMemory(service.name, engine, str(options["model"]), service.workers, need, gpu_bytes)


def _line(memory: ServiceMemory, box: BoxMemory) -> str:
    need = memory.need
    requests = f"{need.sequences} x " if need.sequences > 1 else ""
    tokens = f"{requests}{need.context_tokens} tokens of {need.token_bytes / 1024:.1f} KiB"
    parts = f"weights {_gb(need.weights_bytes)} + KV {_gb(need.kv_bytes)} ({tokens})"
    has, whose = (memory.gpu_bytes, "its GPUs") if memory.gpu_bytes else (box.total_bytes, "this box")
    each = "per worker" if memory.workers > 1 else "for its worker"
    return f"{memory.service}: {parts} = {_gb(need.total_bytes)} {each}, of {_gb(has)} of {whose}"


def _judged(memory: ServiceMemory) -> str:
    """Return a warning about one worker and its GPUs, or nothing; ConfigError where it is certain."""
    need = memory.need
    if need.total_bytes <= memory.gpu_bytes:
        return ""
    fault = f"{_asked(memory)}; its GPUs have {_gb(memory.gpu_bytes)} for it"
    # llama.cpp leaves on the CPU what its GPUs cannot hold.
    is_certain = need.is_certain and memory.engine != LLAMACPP
    fits = longest_context(memory.gpu_bytes - need.weights_bytes, need.token_bytes * need.sequences)
    return _told(memory.service, fault, fits, is_certain, memory.engine)


def _judged_together(services: Sequence[ServiceMemory], box: BoxMemory) -> list[str]:
    """Judge the workers that share the memory of the box; weights that several map count once."""
    if not services:
        return []
    weights = {each.model: each.need.weights_bytes for each in services}
    kv_bytes = sum(each.workers * each.need.kv_bytes for each in services)
    needed = sum(weights.values()) + kv_bytes
    largest = max(services, key=lambda each: each.workers * each.need.kv_bytes)
    fault = _asked(largest)
    workers = sum(each.workers for each in services)
    if workers > 1:
        fault += f"; all {workers} workers need {_gb(needed)}"
    if needed > box.total_bytes:
        is_certain = all(each.need.is_certain and each.engine == LLAMACPP for each in services)
        fits = _longest(services, box.total_bytes - sum(weights.values()))
        text = f"{fault}; this box has {_gb(box.total_bytes)}"
        return [_told(largest.service, text, fits, is_certain, largest.engine)]
    if needed > box.available_bytes:
        fits = _longest(services, box.available_bytes - sum(weights.values()))
        text = f"{fault}; {_gb(box.available_bytes)} of {_gb(box.total_bytes)} are free now"
        return [_told(largest.service, text, fits, False, largest.engine)]
    return []


def _longest(services: Sequence[ServiceMemory], kv_bytes: float) -> int:
    """Return the context in tokens with which the KV entries of all workers take that memory."""
    token_bytes = sum(each.workers * each.need.token_bytes * each.need.sequences for each in services)
    return longest_context(kv_bytes, token_bytes)


def _asked(memory: ServiceMemory) -> str:
    need = memory.need
    slots = f" for each of {need.sequences} requests (max-num-seqs)" if need.sequences > 1 else ""
    return (
        f"max-model-len is {need.context_tokens}{slots}, which needs {_gb(need.kv_bytes)} of KV entries and "
        f"{_gb(need.weights_bytes)} of weights per worker"
    )


def _told(service: str, fault: str, fits: int, is_certain: bool, engine: str) -> str:
    """Return the warning, or raise it when it is certain."""
    smaller = {LLAMACPP: "a smaller max-num-seqs, or cache-type-k and cache-type-v: q8_0"}
    hint = f"The longest context that fits is max-model-len: {fits}." if fits else "Not even the weights fit."
    hint += f" Also: {smaller.get(engine, 'a kv-cache-dtype of 8 bits, or more GPUs per worker')}."
    if is_certain:
        raise ConfigError(f"{service}: {fault}", hint=hint)
    return f"{service}: {fault}. {hint}"


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / GB:.1f} GB"
