"""How the rules of many models see a model (``ModelPolicy``): by its settings, and by what its files tell.

The fleet plugin decides by these policies, ``doctor`` and ``simulate`` foretell by the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from dynaplan.config.command_words import effective_options
from dynaplan.config.settings.models import OnDemandSettings, ServedModel
from dynaplan.config.settings.worker import SIMULATED, engine_of
from dynaplan.contract.gpus import Gpu
from dynaplan.engines.registry import engine_kind, find_engine
from dynaplan.models.gpu_words import chosen_gpus
from dynaplan.models.model import Constraints, ModelPolicy, SleepLevel

NO_VARIABLES: Mapping[str, str] = {}


def model_constraints(models: Iterable[ServedModel], together: tuple[frozenset[str], ...]) -> Constraints:
    """Return which of the models may be loaded at once by the owner's word, beside memory."""
    leaves = {each.name: frozenset(each.settings.not_beside or ()) for each in models}
    return Constraints({name: gone for name, gone in leaves.items() if gone}, together)


def model_policy(
    own: OnDemandSettings,
    options: Mapping[str, object],
    gpus: float,
    inventory: Sequence[Gpu],
    environment: Mapping[str, str] = NO_VARIABLES,
) -> ModelPolicy:
    """Return the policy of a model for the rules: what its owner says, and what its files tell.

    ``options`` are those of its workers and ``environment`` their variables, ``gpus`` the GPUs that each of
    them asks for, of the ``inventory``.
    """
    are_real = any(not gpu.is_simulated for gpu in inventory)
    is_on_gpus = gpus > 0 and bool(inventory) and (are_real or engine_of(options) == SIMULATED)
    chosen = chosen_gpus(options, environment, inventory)
    options = effective_options(options)
    devices = max(1, math.ceil(gpus)) if is_on_gpus else 0
    claim_bytes = own.memory_bytes or 0
    if is_on_gpus and chosen.number is not None:
        devices = chosen.number
    estimate_bytes = _estimate_bytes(options, gpus, devices, inventory)
    if devices > 1 and chosen.largest_part:
        estimate_bytes = int(estimate_bytes * devices * chosen.largest_part)
    allowed, parts = chosen.allowed, dict[int, float]()
    if devices == 1 and chosen.number is None and _spreads(options):
        spread = _spread(claim_bytes or estimate_bytes, inventory)
        devices, whole = len(spread), sum(spread.values())
        claim_bytes, estimate_bytes = (math.ceil(each / whole) for each in (claim_bytes, estimate_bytes))
        if whole < devices:
            allowed, parts = frozenset(spread), spread
    return ModelPolicy(
        ttl_s=own.ttl_s,
        power_saving_after_s=own.power_saving_after_s,
        is_pinned=own.pin,
        priority=own.priority,
        min_stay_s=own.min_stay_s,
        max_swap_wait_s=own.max_swap_wait_s,
        load_timeout_s=own.load_timeout_s,
        devices=devices,
        allowed_devices=allowed if devices else frozenset(),
        parts=parts,
        chosen_by=chosen.said if is_on_gpus else "",
        is_exclusive=not own.share,
        claim_bytes=claim_bytes,
        estimate_bytes=estimate_bytes,
        sleep_levels=_sleep_levels(options, gpus) if devices and own.max_workers == 1 else (),
        max_workers=own.max_workers,
        requests_per_worker=own.requests_per_worker,
    )


def _spreads(options: Mapping[str, object]) -> bool:
    """Tell whether the worker's engine divides a model over all GPUs that it sees, as llama.cpp does."""
    kind = find_engine(engine_of(options))
    return bool(kind and kind.divides_by_layers) or "llama-server" in str(options.get("command") or "")


def _spread(size_bytes: int, inventory: Sequence[Gpu]) -> dict[int, float]:
    """Return the fewest GPUs that have room for the model, the largest first; else all there are.

    Each has its part of what the fullest has: llama.cpp divides a model by the memory of the GPUs.
    """
    found: list[Gpu] = []
    for gpu in sorted(inventory, key=lambda each: -each.memory_bytes):
        if found and size_bytes <= sum(each.memory_bytes for each in found):
            break
        found.append(gpu)
    return {gpu.index: gpu.memory_bytes / max(1, found[0].memory_bytes) for gpu in found}


PROCESS_BYTES = 160 * 2**20
"""What the processes of a worker that computes on the CPU take besides weights and KV."""

UNKNOWN_FRACTION = 0.9
"""The part of a GPU that a model is taken to need of which nothing is known: what engines take unasked."""

PREALLOCATING_OVERHEAD = 1.1
PREALLOCATING_OVERHEAD_BYTES = 3 * 2**29
"""What an engine that takes all its memory at its start needs besides weights and KV: graphs, activations."""


def _estimate_bytes(
    options: Mapping[str, object], gpus: float, devices: int, inventory: Sequence[Gpu]
) -> int:
    """Return the bytes that one worker takes of each of its devices; 0 where nothing tells it.

    The configured fraction counts before the model's files. On a GPU a model of unknown size is taken to need
    nearly all of it.
    """
    from dynaplan.engines.model_memory import memory_need

    engine = engine_of(options)
    smallest = min((gpu.memory_bytes for gpu in inventory), default=0)
    given = _configured_memory_fraction(options)
    if devices and given:  # the owner's word counts before the files: so much is taken, needed or not
        return int(given * smallest)
    need = memory_need(engine, options, gpus)
    if need is None:
        return int(UNKNOWN_FRACTION * smallest) if devices else 0
    needed = int(need.total_bytes) // max(1, devices)
    if not devices:
        return needed + PROCESS_BYTES
    # One that takes what it needs has no pool to fill; its graphs and buffers are learnt from its first load.
    if engine_kind(engine).takes_given_memory:
        needed = int(needed * PREALLOCATING_OVERHEAD) + PREALLOCATING_OVERHEAD_BYTES
    return needed


def _configured_memory_fraction(options: Mapping[str, object]) -> float:
    """Return the configured fraction of each GPU's memory that the engine takes; 0 if none is configured."""
    given = options.get("gpu-memory-utilization") or options.get("mem-fraction-static")
    return given if isinstance(given, int | float) else 0.0


def is_memory_known(own: OnDemandSettings, options: Mapping[str, object], gpus: float) -> bool:
    """Tell whether a worker's memory is known before its first load: stated, or by the model's files."""
    from dynaplan.engines.model_memory import memory_need

    is_told = own.memory_bytes or _configured_memory_fraction(options)
    return bool(is_told or memory_need(engine_of(options), options, gpus))


KEPT_BYTES = 1_100_000_000
"""What a vLLM at level 1 keeps of each GPU: its CUDA context, and what is not in its pool."""

WAKE_S = 0.17
WAKE_S_PER_BYTE = 0.078e-9
"""A line through what vLLM 0.11 took to wake on an A100 at level 1, by its blog of 2025-10-26: 0.26 s with
0.6 B parameters, 0.82 s with 4.2 B of 2 bytes each."""


def _sleep_levels(options: Mapping[str, object], gpus: float) -> tuple[SleepLevel, ...]:
    """Return the levels at which the worker can sleep: level 1, or none.

    It keeps the weights in the host's memory. Level 2 drops them; vLLM reads them again only when asked to by
    calls of their own, so it is not used.
    """
    from dynaplan.engines.model_memory import memory_need

    engine = engine_of(options)
    kind = find_engine(engine)
    if not options.get("enable-sleep-mode") or kind is None or not kind.can_sleep:
        return ()
    need = memory_need(engine, options, gpus)
    weights_bytes = int(need.weights_bytes) if need else 0
    host_bytes = 0 if engine == SIMULATED else weights_bytes
    wake_s = WAKE_S + WAKE_S_PER_BYTE * weights_bytes / max(1.0, gpus)
    return (SleepLevel("1", wake_s, KEPT_BYTES, host_bytes),)
