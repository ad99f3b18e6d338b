"""The launch of a llama.cpp server: its options, under its names and vLLM's, and its command lines.

There are two: the fields of ``CommonParams`` for our own program, which serves with the xllamacpp package, or
the flags of llama-server.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from dynaplan.config.command_words import COMMAND, NEGATABLE, engine_command, read_command, stated_options
from dynaplan.config.parallelism import DATA, PIPELINE, TENSOR, tensor_parallel_size
from dynaplan.config.stock import OWN_OPTIONS, WORKER, engine_names
from dynaplan.engines.llamacpp.saved_slots import fingerprint_of
from dynaplan.engines.llamacpp.server_main import set_field
from dynaplan.engines.model_files import gguf_parts, public_name
from dynaplan.engines.port import EngineContext
from dynaplan.engines.requirements import check_installed
from dynaplan.engines.server.engine_options import (
    FlagStyle,
    Options,
    check_common,
    check_no_data_parallel,
    engine_flags,
    hf_token_variable,
    merge_aliases,
    physical_gpus,
)
from dynaplan.engines.server.kind import EXIT_USAGE, EngineKind, LaunchLine
from dynaplan.engines.server.metrics import MetricNames
from dynaplan.engines.server.owners_command import check_engine_command, engine_line
from dynaplan.util.errors import ConfigError, nearest

DEFAULT_SLOT_TOKENS = 4096
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


class TranslatedOption(NamedTuple):
    """One option: the field of xllamacpp's ``CommonParams`` (dotted), and llama-server's flag.

    Where the field is an enum, its members are named ``prefix`` + VALUE. ``flag`` is empty for the option's
    own name.
    """

    attribute: str
    prefix: str = ""
    flag: str = ""


FLASH_ATTENTION = {"on": "ENABLED", "off": "DISABLED", "auto": "AUTO"}
"""The values of ``flash-attn``, and the members of xllamacpp's enum for them, without their prefix."""

TRANSLATED_OPTIONS: Mapping[str, TranslatedOption] = {
    "threads": TranslatedOption("cpuparams.n_threads"),
    "threads-batch": TranslatedOption("cpuparams_batch.n_threads"),
    "threads-http": TranslatedOption("n_threads_http"),
    "max-num-batched-tokens": TranslatedOption("n_batch", flag="batch-size"),
    "ubatch-size": TranslatedOption("n_ubatch"),
    "n-gpu-layers": TranslatedOption("n_gpu_layers"),
    "main-gpu": TranslatedOption("main_gpu"),
    "split-mode": TranslatedOption("split_mode", "LLAMA_SPLIT_MODE_"),
    "flash-attn": TranslatedOption("flash_attn_type", "LLAMA_FLASH_ATTN_TYPE_"),
    "cache-type-k": TranslatedOption("cache_type_k", "GGML_TYPE_"),
    "cache-type-v": TranslatedOption("cache_type_v", "GGML_TYPE_"),
    "cache-ram": TranslatedOption("cache_ram_mib"),
    "enable-prefix-caching": TranslatedOption("cache_prompt", flag="cache-prompt"),
    "chat-template": TranslatedOption("chat_template"),
    "pooling": TranslatedOption("pooling_type", "LLAMA_POOLING_TYPE_"),
    "seed": TranslatedOption("sampling.seed"),
}
"""The options that have a field and a flag. Every other option is passed on by its own name."""

NAMES = {own: option for option, names in engine_names("llamacpp").items() for own in names}
"""llama.cpp's own name of an option -> the option."""

STYLE = FlagStyle(negatable=NEGATABLE)

HANDLED = frozenset(
    {
        *("model", "served-model-name", "block-size", "max-model-len", "ctx-size", "max-num-seqs"),
        *(*TENSOR, *PIPELINE, *DATA, *TRANSLATED_OPTIONS, *NAMES),
    }
)


@dataclass(frozen=True)
class LlamaOptions:
    """The checked options of one worker.

    ``slots`` requests are computed at once, each in ``context_tokens / slots`` tokens. ``translated`` are
    the options in ``TRANSLATED_OPTIONS``, ``passthrough`` those unknown to dynaplan, given to the server as
    they are. ``server`` is the llama-server program to use, empty for xllamacpp. ``environment`` is added to
    the worker's. ``takes_hand_offs``: True for a decode worker beside prefill workers. ``saved_kv_bytes``:
    the limit of the KV entries saved at unload, for all models of the deployment together.
    """

    model: str
    name: str
    slots: int
    context_tokens: int
    block_tokens: int
    server: str = ""
    takes_hand_offs: bool = False
    saved_kv_bytes: int = 0
    translated: Mapping[str, Any] = field(default_factory=dict)
    passthrough: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)


def read_options(options: Options, gpus: float) -> LlamaOptions:
    """Read a worker's section; raises ConfigError for a wrong option."""
    if options.get(COMMAND):
        return _options_of_command(options)
    check_common(options, "llamacpp", SET_HERE)
    tensor_parallel_size(options, gpus)
    check_no_data_parallel(options, "llamacpp")
    own = _check_types(options)
    slots = own.get("max-num-seqs", WORKER["max-num-seqs"].engine_defaults["llamacpp"])
    server = own.get("llama-server", "")
    if not isinstance(server, str | bool):
        raise ConfigError(f"llama-server is {server!r}", hint="Expected true, or the program's path.")
    return LlamaOptions(
        model=own["model"],
        name=str(own.get("served-model-name") or public_name("llamacpp", own["model"]) or own["model"]),
        slots=slots,
        context_tokens=_context_tokens(own, slots),
        block_tokens=own.get("block-size", WORKER["block-size"].engine_defaults["llamacpp"]),
        server="llama-server" if server is True else str(server or ""),
        takes_hand_offs=bool(own.get("remote-prefill")),
        saved_kv_bytes=_saved_kv_bytes(own),
        translated=_translated(own),
        passthrough={key: value for key, value in _not_ours(own).items() if key not in HANDLED | SET_HERE},
        environment=hf_token_variable(own),
    )


def _not_ours(options: Options) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key not in OWN_OPTIONS}


def _options_of_command(options: Options) -> LlamaOptions:
    """Return what is known of a server that its owner's command starts: slots and context it tells itself."""
    stated, command = stated_options(options), read_command(options[COMMAND])
    found = engine_command(options)
    return LlamaOptions(
        model=str(stated.get("model", "")),
        name=str(options.get("served-model-name") or stated.get("alias") or stated.get("model")),
        slots=0,
        context_tokens=0,
        block_tokens=WORKER["block-size"].engine_defaults["llamacpp"],
        server=command.words[found.start - 1] if found else "",
        saved_kv_bytes=_saved_kv_bytes(stated),
        passthrough={COMMAND: command.words, **_not_ours(stated)},
    )


def _check_types(options: Options) -> dict[str, Any]:
    """The options that are set, each under one name; raises ConfigError for a value of the wrong type."""
    for name, value in options.items():
        option = WORKER.get(NAMES.get(name, name))
        if option and not option.accepts(value):
            raise ConfigError(f"{name} is {value!r}", hint=f"Expected {option.expected}.")
    return merge_aliases(options, NAMES)


THREADS = frozenset({"threads", "threads-batch", "threads-http"})
"""Options that change how fast llama.cpp computes, and not what."""


def fingerprint(options: LlamaOptions, gpus: float) -> str:
    """Digest what KV entries depend on: the model's files, the options, llama.cpp itself.

    Empty when the model is not a file here.
    """
    program = _program(options.server)
    found = shutil.which(program) if program else None
    settings = {
        "llama.cpp": program or version("xllamacpp"),
        "gpus": gpus,
        "name": options.name,
        "context": (options.context_tokens, options.slots),
        "options": {key: value for key, value in options.translated.items() if key not in THREADS},
        "others": dict(options.passthrough),
    }
    files = gguf_parts(Path(os.path.expanduser(options.model)))
    return fingerprint_of(settings, [*files, *([Path(found)] if found else [])])


def server_flags(options: LlamaOptions) -> tuple[str, ...]:
    words = ["--model", options.model, "--alias", options.name]
    words += ["--ctx-size", str(options.context_tokens), "--parallel", str(options.slots)]
    for name, value in options.translated.items():
        flag = TRANSLATED_OPTIONS[name].flag or name
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", str(value)]
    passthrough = {name: _with_commas(value) for name, value in options.passthrough.items()}
    return (*words, *engine_flags(passthrough, STYLE))


def _with_commas(value: Any) -> Any:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else value


def params_fields(options: LlamaOptions) -> dict[str, Any]:
    """The fields of xllamacpp's ``CommonParams`` for what the user may set: dotted name -> JSON value."""
    return {
        "model.path": options.model,
        "model_alias": [options.name],
        "n_ctx": options.context_tokens,
        "n_parallel": options.slots,
        **dict(_fields_of_options(options).values()),
    }


def _fields_of_options(options: LlamaOptions) -> dict[str, tuple[str, Any]]:
    translated = {
        name: (TRANSLATED_OPTIONS[name].attribute, _field_value(name, value))
        for name, value in options.translated.items()
    }
    return translated | {name: (name.replace("-", "_"), value) for name, value in options.passthrough.items()}


def _field_value(option: str, value: Any) -> Any:
    """The value of an option's field: where that is an enum, the name of its member."""
    prefix = TRANSLATED_OPTIONS[option].prefix
    if not prefix:
        return value
    return prefix + (FLASH_ATTENTION[value] if option == "flash-attn" else value.upper())


def check_fields(options: LlamaOptions, params: Any) -> None:
    """Raise ConfigError for an option that ``params``, a ``CommonParams``, has no field or member for."""
    for name, (attribute, value) in _fields_of_options(options).items():
        given = options.translated.get(name, options.passthrough.get(name))
        try:
            set_field(params, attribute, value)
        except AttributeError:
            raise ConfigError(
                f"{name} is no option of llama.cpp",
                hint=LLAMACPP_INSTEAD.get(name) or _nearest_field(params, name),
            ) from None
        except KeyError:
            prefix = TRANSLATED_OPTIONS[name].prefix if name in TRANSLATED_OPTIONS else ""
            members = type(getattr(params, attribute)).__members__
            names = ", ".join(member.removeprefix(prefix).lower() for member in members)
            raise ConfigError(f"{name} is {given!r}", hint=f"Expected one of: {names}.") from None
        except (TypeError, ValueError, OverflowError) as error:
            expected = type(reduce(getattr, attribute.split("."), params)).__name__
            raise ConfigError(f"{name} is {given!r}: {error}", hint=f"Expected {expected}.") from error


def _translated(own: Options) -> dict[str, Any]:
    """Collect the translated options that are set, and our defaults where they differ from llama.cpp's."""
    translated = {name: own[name] for name in TRANSLATED_OPTIONS if name in own}
    flash = translated.get("flash-attn")
    if isinstance(flash, bool):  # YAML reads on and off as booleans
        translated["flash-attn"] = "on" if flash else "off"
    elif flash is not None and flash not in FLASH_ATTENTION:
        raise ConfigError(f"flash-attn is {flash!r}", hint="Expected on, off or auto.")
    defaults = {
        "threads": default_threads(),
        "threads-http": HTTP_THREADS,
        "max-num-batched-tokens": WORKER["max-num-batched-tokens"].engine_defaults["llamacpp"],
    }
    return translated | {name: value for name, value in defaults.items() if name not in translated}


def default_threads() -> int:
    """Count half of the cores of this process: the rest is for the frontend, and for a second worker.

    llama.cpp's own threads spin while they wait for each other: with more of them than cores it crawls.
    """
    return max(1, len(os.sched_getaffinity(0)) // 2)


EMBEDDING = frozenset({"pooling", "embedding", "embeddings", "reranking"})
"""Options of a model that embeds: it computes every text whole, whatever a slot holds."""


def _saved_kv_bytes(own: Options) -> int:
    """The limit of what is saved; 0 for a model that would not use it."""
    if own.get("enable-prefix-caching") is False or EMBEDDING.intersection(own):
        return 0
    option = WORKER["saved-kv"]
    return int(option.read(own.get("saved-kv", option.default)))


def _context_tokens(own: Options, slots: int) -> int:
    """The tokens of all slots together: ``ctx-size``, or ``max-model-len`` (of one) times the slots."""
    total = own.get("ctx-size", 0)
    if "max-model-len" not in own:
        return total or DEFAULT_SLOT_TOKENS * slots
    needed = int(own["max-model-len"] * slots)
    if total and total != needed:
        raise ConfigError(
            f"ctx-size is {total}, but max-model-len times {slots} slots is {needed}",
            hint="Leave ctx-size out: it follows from max-model-len and parallel.",
        )
    return needed


_IN_THE_FILE = "It is vLLM's; a GGUF file says it itself."

LLAMACPP_INSTEAD: Mapping[str, str] = {
    "gpu-memory-utilization": "It is vLLM's; llama.cpp has n-gpu-layers: the layers on the GPU, -1 for all.",
    "cpu-offload-gb": "It is vLLM's; llama.cpp has n-gpu-layers: all further layers stay on the CPU.",
    "kv-cache-dtype": "It is vLLM's; llama.cpp has cache-type-k and cache-type-v: f16, q8_0, q4_0 ...",
    "enforce-eager": "It is vLLM's, and there is nothing like it here: leave it out.",
    "swap-space": "It is vLLM's, and there is nothing like it here: leave it out.",
    "enable-chunked-prefill": "It is vLLM's; llama.cpp always divides prompts, by max-num-batched-tokens.",
    "num-gpu-blocks-override": "It is vLLM's; the KV cache has room for max-num-seqs times max-model-len.",
    **dict.fromkeys(("dtype", "quantization", "tokenizer", "load-format", "trust-remote-code"), _IN_THE_FILE),
}
"""vLLM's options that llama.cpp lacks, and the ones that do the same."""


def _nearest_field(params: Any, name: str) -> str:
    params_fields = {each.replace("_", "-") for each in dir(params) if not each.startswith("_")}
    near = nearest(name, params_fields | HANDLED)
    return near if near.startswith("Did you") else "xllamacpp takes the fields of its CommonParams."


CHILD = "dynaplan.engines.llamacpp.server_main"
"""The module of our own program, which serves with the xllamacpp package."""

EXIT_RETRY = 1
"""The exit code for a model that may load later: a GPU's memory may be about to be freed."""

VERBOSITY = 1
"""llama.cpp's level for errors: two warnings come with every prompt that was prefilled elsewhere."""

METRIC_NAMES = MetricNames(
    running=("llamacpp:requests_processing",),
    waiting=("llamacpp:requests_deferred",),
    generated=("llamacpp:tokens_predicted_total",),
    progress=(
        ("llamacpp:n_decode_total",),  # moves with every step, so within a long prompt too
        ("llamacpp:tokens_predicted_total",),
        ("llamacpp:prompt_tokens_total",),
    ),
    samples=(
        "llamacpp:requests_processing",
        "llamacpp:requests_deferred",
        "llamacpp:prompt_tokens_total",
        "llamacpp:prompt_tokens_cached_total",
        "llamacpp:prompt_seconds_total",
        "llamacpp:tokens_predicted_total",
        "llamacpp:tokens_predicted_seconds_total",
        "llamacpp:n_decode_total",
        "llamacpp:n_busy_slots_per_decode",
    ),
)


def _program(named: str) -> str:
    """Find the llama-server program to run; empty for our own."""
    if named:
        return os.path.expanduser(named)
    return "" if importlib.util.find_spec("xllamacpp") else shutil.which("llama-server") or "llama-server"


def _child_words(options: LlamaOptions, port: int, slots: str) -> tuple[str, ...]:
    ours = {
        "hostnames": ["127.0.0.1"],
        "port": port,
        "endpoint_metrics": True,
        "endpoint_slots": True,
        "ui": False,
        "verbosity": VERBOSITY,
        "slot_save_path": slots,
    }
    words = (f"--{name}={json.dumps(value)}" for name, value in {**ours, **params_fields(options)}.items())
    exit_unloaded = EXIT_RETRY if physical_gpus(os.environ) else EXIT_USAGE
    return sys.executable, "-m", CHILD, str(exit_unloaded), *words


def _server_words(program: str, options: LlamaOptions, port: int, slots: str) -> tuple[str, ...]:
    return (
        *(program, "--host", "127.0.0.1", "--port", str(port), "--metrics", "--slots"),
        *(("--slot-save-path", slots) if slots else ()),
        *server_flags(options),
    )


def _line_of_owner(options: Options, context: EngineContext, port: int, slots: str) -> LaunchLine:
    """Return the owner's words, with what he cannot notice.

    Flags that builds of another age or origin may not know are variables, which such a build ignores.
    """
    name = str(options.get("served-model-name") or options.get("model"))
    added = [("--alias", name), ("--metrics",), *([("--slot-save-path", slots)] if slots else [])]
    variables = {
        "LLAMA_ARG_ENDPOINT_SLOTS": "1",
        "LLAMA_ARG_THREADS_HTTP": str(HTTP_THREADS),
        "GGML_NO_BACKTRACE": "1",  # else a crash would start a debugger on the process, if there is one
        **({"LLAMA_API_KEY": context.token} if context.token else {}),
    }
    return engine_line(options, port, added, variables)


class LlamaCppKind(EngineKind):
    """A llama.cpp server, of the xllamacpp package or llama-server."""

    name = "llamacpp"
    metric_names = METRIC_NAMES
    metrics_timeout_s = 4.0
    term_grace_s = 5.0  # idle, it ends in milliseconds
    stalls_on_term = True
    address_in_use = ("couldn't bind HTTP server socket",)
    measures_memory = False
    prefills = True

    def check(self, options: Options, gpus: float) -> None:
        if options.get(COMMAND):
            check_engine_command(options, self.name)
            return
        checked = read_options(options, gpus)
        check_installed("llamacpp", {"llama-server": checked.server})

    def command(self, options: Options, context: EngineContext, ports: Sequence[int]) -> LaunchLine:
        """Build the command line of llama-server where it is named, else of our program.

        Without the xllamacpp package it is PATH's llama-server.
        """
        # llama.cpp puts a file's name right behind the directory's.
        slots = context.scratch_dir.rstrip("/") + "/" if context.scratch_dir else ""
        if options.get(COMMAND):
            return _line_of_owner(options, context, ports[0], slots)
        checked = read_options(options, context.gpus)
        program = _program(checked.server)
        if program:
            argv = _server_words(program, checked, ports[0], slots)
        else:
            argv = _child_words(checked, ports[0], slots)
        key = {"LLAMA_API_KEY": context.token} if context.token else {}
        # Else a crash would start a debugger on the process, if there is one.
        backtrace = {"GGML_NO_BACKTRACE": os.environ.get("GGML_NO_BACKTRACE", "1")}
        return LaunchLine(argv, {**key, **backtrace, **checked.environment})


KIND = LlamaCppKind()
