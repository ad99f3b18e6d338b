"""The options of a worker's section as the flags of its engine. Nothing here knows a particular engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dynaplan.domain.errors import ConfigError

OURS = frozenset(
    {
        "engine",
        "common-configs",
        "ServiceArgs",
        # the simulated engine's
        "speedup-ratio",
        "startup-time",
        "profile",
        "kv-total-tokens",
        "jitter",
        "max-concurrent-prefills",
        # routing and disaggregation
        "router",
        "router-num-threads",
        "min-workers",
        "kv-overlap-score-weight",
        "remote-prefill",
        "conditional-disagg",
        "max-local-prefill-length",
        "max-prefill-queue-size",
        "decode-component",
        "prefill-component",
        # the worker process
        "drain-deadline",
        "hang-timeout",
        "start-timeout",
        "vllm-command",
        "sglang-command",
        "trtllm-command",
        "llama-server",
    }
)
"""Options that are for us, whatever the engine."""


@dataclass(frozen=True)
class FlagStyle:
    """How one engine takes its flags.

    ``handled`` are options that the adapter itself turns into flags. ``renamed`` gives an option the engine's
    name for it. ``gone`` are options of older versions that the engine takes no more, and what came of them:
    they are left out. ``false`` is said as ``--no-option`` for those in ``negatable``, else it is left out.
    ``word`` joins the words of a flag's name.
    """

    handled: frozenset[str] = frozenset()
    renamed: Mapping[str, str] = field(default_factory=dict)
    gone: Mapping[str, str] = field(default_factory=dict)
    negatable: frozenset[str] = frozenset()
    word: str = "-"


def engine_flags(options: Mapping[str, Any], style: FlagStyle) -> tuple[str, ...]:
    """The command-line words of every option that is the engine's to read, in the order they were given.

    ``true`` is ``--option``, null is left out, a mapping is JSON text, a list is several words.
    """
    left_out = OURS | style.handled | set(style.gone)
    return tuple(
        word
        for option, value in options.items()
        if option not in left_out
        for word in _words(style.renamed.get(option, option), value, style)
    )


def gone_options(options: Mapping[str, Any], style: FlagStyle) -> dict[str, str]:
    """The options that are set and that the engine takes no more, each with what came of it."""
    return {key: why for key, why in style.gone.items() if options.get(key) not in (None, False)}


def flag_name(option: str, style: FlagStyle) -> str:
    """``max-model-len`` as the engine writes it: ``--max-model-len`` or ``--max_model_len``."""
    return "--" + style.renamed.get(option, option).replace("-", style.word)


def tensor_parallel_size(options: Mapping[str, Any], gpus: float, names: tuple[str, ...]) -> int:
    """Over how many GPUs each layer is split: what an option says, else ``resources.gpu``; at least 1.

    Raises ConfigError when the GPUs are not what the options need: tensor times pipeline parallel size.
    """
    given = next((name for name in names if options.get(name) is not None), "")
    pipeline = _count(options, "pipeline-parallel-size")
    whole = max(1, int(gpus))
    if not given:
        if whole % pipeline:
            raise ConfigError(
                f"resources.gpu is {gpus:g}, pipeline-parallel-size {pipeline}",
                hint="expected the first to be a multiple of the second",
            )
        return whole // pipeline
    size = _count(options, given)
    if gpus and size * pipeline != whole:
        needed = f"{given} {size}" + (f" times pipeline-parallel-size {pipeline}" if pipeline > 1 else "")
        raise ConfigError(
            f"{needed} needs {size * pipeline} GPUs, but resources.gpu is {gpus:g}",
            hint=f"leave {given} out: it follows from ServiceArgs.resources.gpu",
        )
    return size


def memory_fraction(gpus: float, whole_gpu: float) -> float | None:
    """The part of the GPU's memory for an engine that gets a fraction of a GPU; None for whole ones."""
    return round(gpus * whole_gpu, 4) if 0 < gpus < 1 else None


def _words(name: str, value: Any, style: FlagStyle) -> list[str]:
    flag = "--" + name.replace("-", style.word)
    match value:
        case None:
            return []
        case True:
            return [flag]
        case False:
            negated = "--" + f"no-{name}".replace("-", style.word)
            return [negated] if name in style.negatable else []
        case Mapping():
            return [flag, json.dumps(value, separators=(",", ":"))]
        case list() | tuple():
            return [flag, *(_text(each) for each in value)] if value else []
        case _:
            return [flag, _text(value)]


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":")) if isinstance(value, Mapping | list) else str(value)


def _count(options: Mapping[str, Any], key: str) -> int:
    value = options.get(key, 1)
    value = 1 if value is None else value
    if type(value) is not int or value < 1:
        raise ConfigError(f"{key} is {value!r}", hint="expected a whole number, at least 1")
    return value
