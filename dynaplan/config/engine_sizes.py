"""The sizes of an engine as its options tell them, by the simulated engine's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dynaplan.config.settings.worker import SimOptions, engine_of
from dynaplan.config.stock import WORKER

Options = Mapping[str, Any]

SLOT_OPTION, STEP_OPTION = "max-num-seqs", "max-num-batched-tokens"
KV_OPTION, CONTEXT_OPTION = "kv-total-tokens", "max-model-len"
BLOCKS_OPTION, BLOCK_OPTION = "num-gpu-blocks-override", "block-size"

IN_BLOCKS = frozenset({"sim", "vllm"})
"""Engines whose KV cache ``num-gpu-blocks-override`` may say."""

TELLS_SLOTS = frozenset({"llamacpp"})
"""Engines with a fixed number of request slots, whether or not an option says it."""


def sizes_of(options: Options) -> dict[str, int]:
    """The request slots, and the tokens of a step, of the context and of the KV cache, where options tell.

    What is no whole number above 0 (vLLM takes ``32k``) is left out: to check options is the engine's task.
    """
    engine = engine_of(options)
    found = {
        key: _first(options, (*WORKER[key].names.get(engine, ()), *(() if key == KV_OPTION else (key,))))
        for key in (SLOT_OPTION, STEP_OPTION, CONTEXT_OPTION, KV_OPTION)
    }
    found[KV_OPTION] = found[KV_OPTION] or _of_blocks(engine, options)
    if engine in TELLS_SLOTS:
        found[SLOT_OPTION] = found[SLOT_OPTION] or WORKER[SLOT_OPTION].usual[engine]
    slots = found[SLOT_OPTION]
    if slots > (found[STEP_OPTION] or SimOptions.batched_tokens):
        found[STEP_OPTION] = slots  # each request that decodes takes one token of a step
    if found[KV_OPTION]:
        found[CONTEXT_OPTION] = min(found[CONTEXT_OPTION], found[KV_OPTION])
    return {name: size for name, size in found.items() if size}


def _first(options: Options, names: Iterable[str]) -> int:
    """The first of these options that is a size; 0 when none is."""
    values = (options.get(name) for name in names)
    return next((size for size in values if type(size) is int and size > 0), 0)


def _of_blocks(engine: str, options: Options) -> int:
    if engine not in IN_BLOCKS:
        return 0
    return _first(options, (BLOCKS_OPTION,)) * (_first(options, (BLOCK_OPTION,)) or SimOptions.block_tokens)
