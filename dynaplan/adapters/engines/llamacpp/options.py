"""The options of llama.cpp, under its names and vLLM's: xllamacpp's fields, or llama-server's flags."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

from dynaplan.adapters.engines.common.kinds import Options, check_common, check_no_data_parallel, hub_token
from dynaplan.adapters.engines.common.model_files import public_name
from dynaplan.adapters.engines.llamacpp.child import set_field
from dynaplan.domain.errors import ConfigError
from dynaplan.domain.parallelism import DATA, PIPELINE, TENSOR, tensor_parallel_size
from dynaplan.options.engine_flags import FlagStyle, engine_flags
from dynaplan.options.stock import OURS, WORKER

SLOTS, STEP, BLOCK = "max-num-seqs", "max-num-batched-tokens", "block-size"

SLOT_TOKENS = 4096
"""The default context of one slot, in tokens."""

HTTP_THREADS = 1024
"""The default number of HTTP threads. Every request that waits for a slot occupies one.

With llama.cpp's own default a handful of waiting requests shut out ``/metrics`` for half a minute.
"""

SET_HERE = frozenset(
    {
        *("host", "hostnames", "port", "api-key", "api-keys", "alias", "model-alias", "slots", "metrics"),
        *("endpoint-slots", "endpoint-metrics", "slot-save-path", "kv-unified", "api-prefix"),
    }
)
"""Options that dynaplan sets: without them the engine could not be reached, or its load not be read."""


@dataclass(frozen=True)
class Knob:
    """One option: the field of xllamacpp's ``CommonParams`` (dotted), and llama-server's flag.

    Where the field is an enum, its members are named ``prefix`` + VALUE.
    """

    attribute: str
    flag: str
    prefix: str = ""


FLASH_PREFIX = "LLAMA_FLASH_ATTN_TYPE_"

FLASH_ATTENTION = {True: "on", False: "off"}
"""Values of ``flash-attn`` in YAML, which reads on and off as booleans."""

FLASH_ATTENTION_MEMBERS = {"on": "ENABLED", "off": "DISABLED", "auto": "AUTO"}
"""Members of xllamacpp's enum for the values of ``flash-attn``, without their prefix."""

KNOBS: Mapping[str, Knob] = {
    "threads": Knob("cpuparams.n_threads", "threads"),
    "threads-batch": Knob("cpuparams_batch.n_threads", "threads-batch"),
    "threads-http": Knob("n_threads_http", "threads-http"),
    "batch-size": Knob("n_batch", "batch-size"),
    "max-num-batched-tokens": Knob("n_batch", "batch-size"),
    "ubatch-size": Knob("n_ubatch", "ubatch-size"),
    "n-gpu-layers": Knob("n_gpu_layers", "n-gpu-layers"),
    "main-gpu": Knob("main_gpu", "main-gpu"),
    "split-mode": Knob("split_mode", "split-mode", "LLAMA_SPLIT_MODE_"),
    "flash-attn": Knob("flash_attn_type", "flash-attn", FLASH_PREFIX),
    "cache-type-k": Knob("cache_type_k", "cache-type-k", "GGML_TYPE_"),
    "cache-type-v": Knob("cache_type_v", "cache-type-v", "GGML_TYPE_"),
    "cache-ram": Knob("cache_ram_mib", "cache-ram"),
    "enable-prefix-caching": Knob("cache_prompt", "cache-prompt"),
    "chat-template": Knob("chat_template", "chat-template"),
    "seed": Knob("sampling.seed", "seed"),
}  # fmt: skip
"""The options that have a field and a flag. Every other option is passed on by its own name."""

STYLE = FlagStyle(
    negatable=frozenset(
        {
            *("cont-batching", "context-shift", "escape", "fit", "jinja", "kv-offload", "mmap", "mmproj"),
            *("op-offload", "perf", "prefill-assistant", "repack", "warmup"),
        }
    )
)
"""``negatable`` are the flags that llama-server has on by default."""

HANDLED = frozenset(
    {
        *("model", "served-model-name", "block-size", "max-model-len", "ctx-size", "n-ctx", "parallel"),
        *("n-parallel", "max-num-seqs", *TENSOR, *PIPELINE, *DATA, *KNOBS),
    }
)


@dataclass(frozen=True)
class LlamaOptions:
    """The checked options of one worker.

    ``slots`` requests are computed at once, each in ``context_tokens / slots`` tokens. ``knobs`` are values
    by the names in ``KNOBS``, ``others`` by names that are not known here. ``server`` is the llama-server
    program to use, empty for xllamacpp. ``environment`` comes on top of the worker's. ``takes_hand_offs`` is
    True for a decode worker beside prefill workers.
    """

    model: str
    name: str
    slots: int
    context_tokens: int
    block_tokens: int
    server: str = ""
    takes_hand_offs: bool = False
    knobs: Mapping[str, Any] = field(default_factory=dict)
    others: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)


def read_options(options: Options, gpus: float) -> LlamaOptions:
    """Read a worker's section; raises ConfigError for a wrong option."""
    check_common(options, "llamacpp", SET_HERE)
    tensor_parallel_size(options, gpus)
    check_no_data_parallel(options, "llamacpp")
    slots = _one_of(options, (*WORKER[SLOTS].names["llamacpp"], SLOTS), WORKER[SLOTS].usual["llamacpp"])
    server = options.get("llama-server", "")
    if server is not None and not isinstance(server, str | bool):
        raise ConfigError(f"llama-server is {server!r}", hint="Expected true, or the program's path.")
    return LlamaOptions(
        model=options["model"],
        name=str(
            options.get("served-model-name") or public_name("llamacpp", options["model"]) or options["model"]
        ),
        slots=slots,
        context_tokens=_context_tokens(options, slots),
        block_tokens=_one_of(options, (BLOCK,), WORKER[BLOCK].usual["llamacpp"]),
        server="llama-server" if server is True else str(server or ""),
        takes_hand_offs=bool(options.get("remote-prefill")),
        knobs=_knobs(options),
        others={
            key: value
            for key, value in options.items()
            if key not in OURS | HANDLED | SET_HERE and value is not None
        },
        environment=hub_token(options),
    )


def server_flags(options: LlamaOptions) -> tuple[str, ...]:
    """The flags of llama-server for what the user may set."""
    words = ["--model", options.model, "--alias", options.name]
    words += ["--ctx-size", str(options.context_tokens), "--parallel", str(options.slots)]
    for name, value in options.knobs.items():
        knob = KNOBS[name]
        if isinstance(value, bool):
            words.append(f"--{knob.flag}" if value else f"--no-{knob.flag}")
        else:
            words += [f"--{knob.flag}", str(value)]
    others = {name: _with_commas(value) for name, value in options.others.items()}
    return (*words, *engine_flags(others, STYLE))


def _with_commas(value: Any) -> Any:
    """Join a list as llama-server reads one."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else value


def fields(options: LlamaOptions) -> dict[str, Any]:
    """The fields of xllamacpp's ``CommonParams`` for what the user may set: dotted name -> JSON value."""
    return {
        "model.path": options.model,
        "model_alias": [options.name],
        "n_ctx": options.context_tokens,
        "n_parallel": options.slots,
        **dict(_fields_of_options(options).values()),
    }


def _fields_of_options(options: LlamaOptions) -> dict[str, tuple[str, Any]]:
    """Map each option to its field and the field's value."""
    knobs = {
        name: (KNOBS[name].attribute, _field_value(name, value)) for name, value in options.knobs.items()
    }
    return knobs | {name: (name.replace("-", "_"), value) for name, value in options.others.items()}


def _field_value(option: str, value: Any) -> Any:
    """The value of a knob's field: where that is an enum, the name of its member."""
    prefix = KNOBS[option].prefix
    if not prefix:
        return value
    return prefix + (FLASH_ATTENTION_MEMBERS[value] if option == "flash-attn" else value.upper())


def check_fields(options: LlamaOptions, params: Any) -> None:
    """Raise ConfigError for an option that ``params``, a ``CommonParams``, has no field or member for."""
    for name, (attribute, value) in _fields_of_options(options).items():
        given = options.knobs.get(name, options.others.get(name))
        try:
            set_field(params, attribute, value)
        except AttributeError:
            raise ConfigError(
                f"{name} is no option of llama.cpp", hint=_nearest_field(params, name)
            ) from None
        except KeyError:
            prefix = KNOBS[name].prefix if name in KNOBS else ""
            members = type(getattr(params, attribute)).__members__
            names = ", ".join(member.removeprefix(prefix).lower() for member in members)
            raise ConfigError(f"{name} is {given!r}", hint=f"Expected one of: {names}.") from None
        except (TypeError, ValueError, OverflowError) as error:
            expected = type(reduce(getattr, attribute.split("."), params)).__name__
            raise ConfigError(f"{name} is {given!r}: {error}", hint=f"Expected {expected}.") from error


def _knobs(options: Options) -> dict[str, Any]:
    """Collect the knobs that are set, and our defaults where they differ from llama.cpp's."""
    knobs: dict[str, Any] = {}
    by_attribute: dict[str, str] = {}
    for name, knob in KNOBS.items():
        if options.get(name) is None:
            continue
        value = _checked(name, options[name])
        other = by_attribute.setdefault(knob.attribute, name)
        if other == name:
            knobs[name] = value
        elif knobs[other] != value:
            raise _contradiction(options, other, name)
    defaults = {
        "threads": default_threads(),
        "threads-http": HTTP_THREADS,
        "batch-size": WORKER[STEP].usual["llamacpp"],
    }
    return knobs | {
        name: value for name, value in defaults.items() if KNOBS[name].attribute not in by_attribute
    }


def default_threads() -> int:
    """Count half of the cores of this process: the rest is for the frontend, and for a second worker.

    llama.cpp's own threads spin while they wait for each other: with more of them than cores it crawls.
    """
    return max(1, len(os.sched_getaffinity(0)) // 2)


def _checked(name: str, value: Any, known_as: str = "") -> Any:
    """Check a value against its option; ``known_as`` is the option of which this name is another name."""
    option = WORKER[known_as or name]
    if name == "flash-attn":
        value = FLASH_ATTENTION[value] if isinstance(value, bool) else value
        if value not in FLASH_ATTENTION_MEMBERS:
            raise ConfigError(f"{name} is {value!r}", hint="Expected on, off or auto.")
    elif not option.accepts(value):
        raise ConfigError(f"{name} is {value!r}", hint=f"Expected {option.expected}.")
    return value


def _context_tokens(options: Options, slots: int) -> int:
    """The tokens of all slots together: ``ctx-size``, or ``max-model-len`` (of one) times the slots."""
    total = _one_of(options, ("ctx-size", "n-ctx"), 0)
    if options.get("max-model-len") is None:
        return total or SLOT_TOKENS * slots
    needed = _checked("max-model-len", options["max-model-len"]) * slots
    if total and total != needed:
        raise ConfigError(
            f"ctx-size is {total}, but max-model-len times {slots} slots is {needed}",
            hint="Leave ctx-size out: it follows from max-model-len and parallel.",
        )
    return int(needed)


def _one_of(options: Options, names: Sequence[str], default: int) -> int:
    """The value of options that mean the same; the first name is in the table of options."""
    given = [name for name in names if options.get(name) is not None]
    values = [_checked(name, options[name], names[0]) for name in given]
    if len(set(values)) > 1:
        raise _contradiction(options, given[0], given[1])
    return values[0] if values else default


def _contradiction(options: Options, first: str, second: str) -> ConfigError:
    return ConfigError(
        f"{first} is {options[first]!r}, but {second} is {options[second]!r}",
        hint="Both say the same to llama.cpp: leave one out.",
    )


def _nearest_field(params: Any, name: str) -> str:
    from dynaplan.domain.errors import nearest

    fields = {each.replace("_", "-") for each in dir(params) if not each.startswith("_")}
    near = nearest(name, fields | HANDLED)
    return near if near.startswith("Did you") else "xllamacpp takes the fields of its CommonParams."
