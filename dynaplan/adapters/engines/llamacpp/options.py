"""The options of llama.cpp, under its names and vLLM's: xllamacpp's fields, or llama-server's flags."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dynaplan.adapters.engines.common.kinds import Options, check_common, check_no_data_parallel, hub_token
from dynaplan.adapters.engines.common.model_files import public_name
from dynaplan.domain.errors import ConfigError
from dynaplan.domain.parallelism import DATA, PIPELINE, TENSOR, tensor_parallel_size
from dynaplan.options.engine_flags import FlagStyle, engine_flags
from dynaplan.options.stock import OURS, WORKER

SLOTS, STEP, BLOCK = "max-num-seqs", "max-num-batched-tokens", "block-size"

SLOT_TOKENS = 4096
"""Context of one slot where no option says it."""

HTTP_THREADS = 1024
"""Every request that waits for a slot holds one, and so does asking for the load.

llama.cpp's own default lets a handful of waiting requests shut out ``/metrics`` for half a minute.
"""

SET_HERE = frozenset(
    {
        *("host", "hostnames", "port", "api-key", "api-keys", "alias", "model-alias", "slots", "metrics"),
        *("endpoint-slots", "endpoint-metrics", "slot-save-path", "kv-unified", "api-prefix"),
    }
)
"""Options without which we could not reach the engine, or would not see its load."""


@dataclass(frozen=True)
class Knob:
    """One option: the field of xllamacpp's ``CommonParams`` (dotted), and llama-server's flag.

    ``enum`` is the name of xllamacpp's enum of its values, whose members are named ``prefix`` + VALUE.
    """

    attribute: str
    flag: str
    enum: str = ""
    prefix: str = ""


FLASH_PREFIX = "LLAMA_FLASH_ATTN_TYPE_"
FLASH_ATTENTION = {True: "on", False: "off"}
FLASH_ATTENTION_MEMBERS = {"on": "ENABLED", "off": "DISABLED", "auto": "AUTO"}

KNOBS: Mapping[str, Knob] = {
    "threads": Knob("cpuparams.n_threads", "threads"),
    "threads-batch": Knob("cpuparams_batch.n_threads", "threads-batch"),
    "threads-http": Knob("n_threads_http", "threads-http"),
    "batch-size": Knob("n_batch", "batch-size"),
    "max-num-batched-tokens": Knob("n_batch", "batch-size"),
    "ubatch-size": Knob("n_ubatch", "ubatch-size"),
    "n-gpu-layers": Knob("n_gpu_layers", "n-gpu-layers"),
    "main-gpu": Knob("main_gpu", "main-gpu"),
    "split-mode": Knob("split_mode", "split-mode", "llama_split_mode", prefix="LLAMA_SPLIT_MODE_"),
    "flash-attn": Knob("flash_attn_type", "flash-attn", "llama_flash_attn_type", prefix=FLASH_PREFIX),
    "cache-type-k": Knob("cache_type_k", "cache-type-k", "ggml_type", prefix="GGML_TYPE_"),
    "cache-type-v": Knob("cache_type_v", "cache-type-v", "ggml_type", prefix="GGML_TYPE_"),
    "cache-ram": Knob("cache_ram_mib", "cache-ram"),
    "enable-prefix-caching": Knob("cache_prompt", "cache-prompt"),
    "chat-template": Knob("chat_template", "chat-template"),
    "seed": Knob("sampling.seed", "seed"),
}  # fmt: skip
"""The options that both hosts take. Every other one is passed on by its own name."""

STYLE = FlagStyle(
    negatable=frozenset(
        {
            *("cont-batching", "context-shift", "escape", "fit", "jinja", "kv-offload", "mmap", "mmproj"),
            *("op-offload", "perf", "prefill-assistant", "repack", "warmup"),
        }
    )
)
"""``negatable`` are those that llama-server has on when nobody says anything."""

HANDLED = frozenset(
    {
        *("model", "served-model-name", "block-size", "max-model-len", "ctx-size", "n-ctx", "parallel"),
        *("n-parallel", "max-num-seqs", *TENSOR, *PIPELINE, *DATA, *KNOBS),
    }
)


OWN_FIELDS = ("model", "name", "slots", "context-tokens")
"""The words of our own program for the fields that every start has, in the order of LlamaOptions."""


@dataclass(frozen=True)
class LlamaOptions:
    """The checked options of one worker.

    ``slots`` requests are computed at once, each in ``context_tokens / slots`` tokens. ``knobs`` are values
    by the names in ``KNOBS``; ``others`` are not known here. ``server`` is the llama-server program to use,
    "" for xllamacpp, and ``environment`` what it gets on top of ours.
    ``takes_hand_offs`` is a decode worker's beside prefill workers.
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

    @classmethod
    def from_words(cls, words: Mapping[str, Any]) -> LlamaOptions:
        """Read what ``own_words`` wrote, the port and the directory of slots apart."""
        others = dict(words)
        model, name, slots, context_tokens = (others.pop(field) for field in OWN_FIELDS)
        knobs = {option: others.pop(option) for option in KNOBS if option in others}
        return cls(
            model, name, slots, context_tokens, WORKER[BLOCK].usual["llamacpp"], knobs=knobs, others=others
        )


def read_options(options: Options, gpus: float) -> LlamaOptions:
    """The options in a worker's section; raises ConfigError for one that is wrong."""
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
    """llama-server's flags for what the user may set."""
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


def own_words(options: LlamaOptions, port: int, slot_directory: str) -> tuple[str, ...]:
    """The command line of our own program, for the same: words of the form ``--name=JSON``."""
    fields = (options.model, options.name, options.slots, options.context_tokens)
    values = {"port": port, "slot-save-path": slot_directory, **dict(zip(OWN_FIELDS, fields, strict=True))}
    values |= {**options.knobs, **options.others}
    return tuple(f"--{name}={json.dumps(value)}" for name, value in values.items())


def _with_commas(value: Any) -> Any:
    """A list as llama-server reads one."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else value


def set_fields(params: Any, options: LlamaOptions, enums: Any) -> None:
    """Set the same on xllamacpp's ``CommonParams``; ``enums`` is the module with its enums.

    Raises ConfigError for an option that it has no field for.
    """
    params.model.path = options.model
    params.model_alias = {options.name}
    params.n_ctx = options.context_tokens
    params.n_parallel = options.slots
    for name, value in options.knobs.items():
        knob = KNOBS[name]
        _set(params, name, knob.attribute, _member(enums, name, knob, value) if knob.prefix else value)
    for name, value in options.others.items():
        _set(params, name, name.replace("-", "_"), value)


def _knobs(options: Options) -> dict[str, Any]:
    """The knobs that are set, and the defaults that are not llama.cpp's."""
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
    """Half of the cores that this process may use: the rest is for the frontend, and for a second worker.

    llama.cpp's own threads spin while they wait for each other: with more of them than cores it crawls.
    """
    return max(1, len(os.sched_getaffinity(0)) // 2)


def _checked(name: str, value: Any, known_as: str = "") -> Any:
    """A value that fits the option; ``known_as`` is the option that this name means the same as."""
    option = WORKER[known_as or name]
    if name == "flash-attn":
        value = FLASH_ATTENTION[value] if isinstance(value, bool) else value
        if value not in FLASH_ATTENTION_MEMBERS:
            raise ConfigError(f"{name} is {value!r}", hint="Expected on, off or auto.")
    elif not option.accepts(value):
        raise ConfigError(f"{name} is {value!r}", hint=f"Expected {option.expected}.")
    return value


def _context_tokens(options: Options, slots: int) -> int:
    """Of all slots together: ``ctx-size`` says just that, ``max-model-len`` is what one request may have."""
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
    """The value of options that mean the same; the first of them is in the table."""
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


def _member(enums: Any, name: str, knob: Knob, value: str) -> Any:
    """The member of xllamacpp's enum; ConfigError naming those that there are."""
    enum = getattr(enums, knob.enum)
    wanted = FLASH_ATTENTION_MEMBERS[value] if name == "flash-attn" else value.upper()
    try:
        return enum[knob.prefix + wanted]
    except KeyError:
        names = [each.removeprefix(knob.prefix).lower() for each in enum.__members__]
        raise ConfigError(f"{name} is {value!r}", hint=f"Expected one of: {', '.join(names)}.") from None


def _set(params: Any, name: str, attribute: str, value: Any) -> None:
    *path, last = attribute.split(".")
    target = params
    for part in path:
        target = getattr(target, part)
    if last.startswith("_") or not hasattr(target, last) or callable(getattr(target, last)):
        raise ConfigError(f"{name} is no option of llama.cpp", hint=_nearest_field(params, name))
    try:
        setattr(target, last, value)
    except (TypeError, ValueError, OverflowError, AttributeError) as error:
        expected = type(getattr(target, last)).__name__
        raise ConfigError(f"{name} is {value!r}: {error}", hint=f"Expected {expected}.") from error


def _nearest_field(params: Any, name: str) -> str:
    from dynaplan.domain.errors import nearest

    fields = {each.replace("_", "-") for each in dir(params) if not each.startswith("_")}
    near = nearest(name, fields | HANDLED)
    return near if near.startswith("did you") else "xllamacpp takes the fields of its CommonParams."
