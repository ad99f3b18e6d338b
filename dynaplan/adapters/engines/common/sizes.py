"""What an engine's options say of what it holds, by the simulated engine's names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dynaplan.adapters.engines.llamacpp.options import SLOTS

Options = Mapping[str, Any]

SLOT_OPTION, STEP_OPTION = "max-num-seqs", "max-num-batched-tokens"
KV_OPTION, CONTEXT_OPTION = "kv-total-tokens", "max-model-len"

USUAL_STEP_TOKENS = 8192
"""Where no option says it; as of the simulated engine."""

BLOCK_TOKENS = 16

NAMES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "sim": {KV_OPTION: (KV_OPTION,)},
    "vllm": {},
    "sglang": {
        SLOT_OPTION: ("max-running-requests",),
        STEP_OPTION: ("chunked-prefill-size",),
        KV_OPTION: ("max-total-tokens",),
        CONTEXT_OPTION: ("context-length",),
    },
    "trtllm": {
        SLOT_OPTION: ("max-batch-size",),
        STEP_OPTION: ("max-num-tokens",),
        CONTEXT_OPTION: ("max-seq-len",),
    },
    "llamacpp": {SLOT_OPTION: ("parallel", "n-parallel")},
}
"""The engine's own names for these options, beside those of the simulated engine and vLLM."""

IN_BLOCKS = frozenset({"sim", "vllm"})
"""Engines whose KV cache ``num-gpu-blocks-override`` may say."""


def sizes_of(engine: str, options: Options) -> dict[str, int]:
    """Request slots, tokens of a step and of the context, and of the KV cache: those that the options tell.

    What is no whole number above 0 (vLLM takes ``32k``) is left out: to check options is the engine's task.
    """
    names = NAMES.get(engine, {})
    common = (SLOT_OPTION, STEP_OPTION, CONTEXT_OPTION)
    found = {each: _first(options, (*names.get(each, ()), each)) for each in common}
    found[KV_OPTION] = _first(options, names.get(KV_OPTION, ())) or _of_blocks(engine, options)
    if engine == "llamacpp":
        found[SLOT_OPTION] = found[SLOT_OPTION] or SLOTS
    slots = found[SLOT_OPTION] or 0
    if slots > (found[STEP_OPTION] or USUAL_STEP_TOKENS):
        found[STEP_OPTION] = slots  # each request that decodes takes one token of a step
    if found[KV_OPTION]:
        found[CONTEXT_OPTION] = min(found[CONTEXT_OPTION], found[KV_OPTION])
    return {name: size for name, size in found.items() if size}


def _first(options: Options, names: Iterable[str]) -> int:
    """The first of these options that is a size; 0 when none is."""
    values = (options.get(name) for name in names)
    return next((each for each in values if type(each) is int and each > 0), 0)


def _of_blocks(engine: str, options: Options) -> int:
    if engine not in IN_BLOCKS:
        return 0
    blocks = _first(options, ("num-gpu-blocks-override",))
    return blocks * (_first(options, ("block-size",)) or BLOCK_TOKENS)
