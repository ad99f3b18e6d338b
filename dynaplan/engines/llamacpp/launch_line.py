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
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dynaplan.config.command_words import (
    COMMAND,
    NEGATABLE,
    SHORT_FLAGS,
    effective_options,
    engine_command,
    read_command,
)
from dynaplan.config.parallelism import DATA, PIPELINE, TENSOR, tensor_parallel_size
from dynaplan.config.stock import OWN_OPTIONS, WORKER, engine_names
from dynaplan.engines.llamacpp.request_fields import API
from dynaplan.engines.llamacpp.saved_slots import fingerprint_of
from dynaplan.engines.llamacpp.xllamacpp_fields import check_fields, fields_of
from dynaplan.engines.model_files import GGUF_FILE, gguf_parts, public_name
from dynaplan.engines.port import Engine, EngineContext
from dynaplan.engines.requirements import Requirement
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
from dynaplan.engines.server.kind import EXIT_USAGE, LaunchLine, ServerKind
from dynaplan.engines.server.metrics import CounterNames, MetricNames
from dynaplan.engines.server.owners_command import check_engine_command, engine_line
from dynaplan.util.errors import ConfigError

DEFAULT_SLOT_TOKENS = 4096
"""The default context of one slot, in tokens."""

HTTP_THREADS = 1024
"""The default number of HTTP threads. Every request that waits for a slot occupies one.

With llama.cpp's own default a handful of waiting requests shut out ``/metrics`` for half a minute.
"""

SET_HERE = frozenset(
    {
        *("host", "hostnames", "port", "api-key", "api-keys", "alias", "model-alias", "slots", "metrics"),
        *("endpoint-slots", "endpoint-metrics", "slot-save-path", "api-prefix"),
    }
)
"""Options that dynaplan sets: without them the engine could not be reached, or its load not be read."""

OWN_NAMES = {own: option for option, names in engine_names("llamacpp").items() for own in names}
NAMES = {**{short: OWN_NAMES.get(long, long) for short, long in SHORT_FLAGS["llamacpp"].items()}, **OWN_NAMES}
"""llama.cpp's own names of an option, the short ones too -> the option."""

FLAGS = {"max-num-batched-tokens": "batch-size", "enable-prefix-caching": "cache-prompt"}
"""The options that are flags of another name."""

STYLE = FlagStyle(negatable=NEGATABLE)

HANDLED = frozenset(
    {
        *("model", "served-model-name", "block-size", "max-model-len", "ctx-size", "max-num-seqs"),
        *("kv-unified", *TENSOR, *PIPELINE, *DATA, *SET_HERE),
    }
)


@dataclass(frozen=True)
class LlamaOptions:
    """The checked options of one worker.

    ``slots`` requests are computed at once. They share ``context_tokens`` (0: the model's own): in equal
    parts, or freely if ``is_unified``. ``flags`` are all others, by llama-server's names. ``server`` is the
    llama-server program to use, empty for xllamacpp. ``environment`` is added to the worker's.
    ``takes_hand_offs``: True for a decode worker beside prefill workers. ``saved_kv_bytes``: the limit of the
    KV entries saved at unload, for all models of the deployment together.
    """

    model: str
    name: str
    slots: int
    context_tokens: int
    block_tokens: int
    server: str = ""
    takes_hand_offs: bool = False
    saved_kv_bytes: int = 0
    is_unified: bool = False
    flags: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)


def read_options(options: Options, gpus: float) -> LlamaOptions:
    """Read a worker's section; raises ConfigError for a wrong option."""
    if options.get(COMMAND):
        return _options_of_command(options)
    check_common(options, "llamacpp", SET_HERE)
    tensor_parallel_size(options, gpus)
    check_no_data_parallel(options, "llamacpp")
    own = _check_types(options)
    slots = _slots(own)
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
        is_unified=_is_unified(own),
        flags=_flags(own),
        environment=hf_token_variable(own),
    )


def _not_ours(options: Options) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key not in OWN_OPTIONS}


def _options_of_command(options: Options) -> LlamaOptions:
    """Return what is known of a server that its owner's command starts.

    Slots and context are 0: the server tells them.
    """
    stated, command = effective_options(options), read_command(options[COMMAND])
    found = engine_command(options)
    return LlamaOptions(
        model=str(stated.get("model", "")),
        name=str(options.get("served-model-name") or stated.get("alias") or stated.get("model")),
        slots=0,
        context_tokens=0,
        block_tokens=WORKER["block-size"].engine_defaults["llamacpp"],
        server=command.words[found.start - 1] if found else "",
        saved_kv_bytes=_saved_kv_bytes(stated),
        is_unified=bool(stated.get("kv-unified", "parallel" not in stated)),
        flags={COMMAND: command.words, **_not_ours(stated)},
    )


def _check_types(options: Options) -> dict[str, Any]:
    """The options that are set, each under one name.

    Raises ConfigError for a value of the wrong type, and for two names of an option that differ.
    """
    options = dict(_positive(name, value) for name, value in options.items())
    for name, value in options.items():
        option = WORKER.get(NAMES.get(name, name))
        if option and not option.accepts(value):
            raise ConfigError(f"{name} is {value!r}", hint=f"Expected {option.expected}.")
    return merge_aliases(options, NAMES)


def _positive(name: str, value: Any) -> tuple[str, Any]:
    """Return the option, ``no-mmap: true`` as ``mmap: false``."""
    opposite = NAMES.get(name, name).removeprefix("no-")
    if opposite == name or opposite not in NEGATABLE or not isinstance(value, bool):
        return name, value
    return opposite, not value


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
        "context": (options.context_tokens, options.slots, options.is_unified),
        "flags": {key: value for key, value in options.flags.items() if key not in THREADS},
    }
    files = gguf_parts(Path(os.path.expanduser(options.model)))
    return fingerprint_of(settings, [*files, *([Path(found)] if found else [])])


def server_flags(options: LlamaOptions) -> tuple[str, ...]:
    words = ["--model", options.model, "--alias", options.name]
    words += ["--ctx-size", str(options.context_tokens), "--parallel", str(options.slots)]
    words += ["--kv-unified"] if options.is_unified else []
    return (*words, *engine_flags({name: _with_commas(each) for name, each in options.flags.items()}, STYLE))


def _with_commas(value: Any) -> Any:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else value


def params_fields(options: LlamaOptions) -> dict[str, Any]:
    """The fields of xllamacpp's ``CommonParams`` for what the user may set: dotted name -> JSON value."""
    fields = {
        "model.path": options.model,
        "model_alias": [options.name],
        "n_ctx": options.context_tokens,
        "n_parallel": options.slots,
        **({"kv_unified": True} if options.is_unified else {}),
    }
    for name, value in options.flags.items():
        fields |= fields_of(name, value)
    return fields


def _flags(own: Options) -> dict[str, Any]:
    """Collect the flags that are set, and our defaults; raises ConfigError for a wrong ``flash-attn``."""
    flags = {FLAGS.get(name, name): each for name, each in _not_ours(own).items() if name not in HANDLED}
    flash = flags.get("flash-attn")
    if isinstance(flash, bool):  # YAML reads on and off as booleans
        flags["flash-attn"] = "on" if flash else "off"
    elif flash is not None and flash not in ("on", "off", "auto"):
        raise ConfigError(f"flash-attn is {flash!r}", hint="Expected on, off or auto.")
    return {"threads": default_threads(), "threads-http": HTTP_THREADS, **_batch(own)} | flags


def _batch(own: Options) -> dict[str, int]:
    """Return the flags for the tokens of one step: of a model that embeds, the longest text."""
    batch = WORKER["max-num-batched-tokens"].engine_defaults["llamacpp"]
    if not EMBEDDING & own.keys():
        return {"batch-size": batch}
    slots = 1 if _is_unified(own) else _slots(own)
    text = own.get("max-num-batched-tokens") or _context_tokens(own, _slots(own)) // slots or LLAMA_BATCH
    return {"batch-size": text, "ubatch-size": text}


def default_threads() -> int:
    """Return half of the cores of this process, at least 1.

    The rest is for the frontend, and for a second worker: llama.cpp's threads spin while they wait for each
    other, and with more of them than cores it crawls.
    """
    return max(1, len(os.sched_getaffinity(0)) // 2)


EMBEDDING = frozenset({"pooling", "embeddings", "reranking"})
"""Options of a model that embeds: it computes every text whole, whatever a slot holds."""

LLAMA_BATCH = 2048
"""llama.cpp's own default of ``batch-size``."""


def _saved_kv_bytes(own: Options) -> int:
    """The limit of saved KV entries, in bytes; 0 for a model that would not use them."""
    if own.get("enable-prefix-caching") is False or EMBEDDING.intersection(own):
        return 0
    option = WORKER["saved-kv"]
    return int(option.read(own.get("saved-kv", option.default)))


def _slots(own: Options) -> int:
    return int(own.get("max-num-seqs", WORKER["max-num-seqs"].engine_defaults["llamacpp"]))


def _is_unified(own: Options) -> bool:
    """Tell whether the slots share their context, so that each request may have all of it.

    llama-server does that where it is not told how many they are.
    """
    return bool(
        own.get("kv-unified", "ctx-size" in own and not {"max-num-seqs", "max-model-len"} & own.keys())
    )


def _context_tokens(own: Options, slots: int) -> int:
    """The tokens of all slots together: ``ctx-size``, or ``max-model-len`` (of one) times the slots.

    Raises ConfigError where both are set and differ.
    """
    total = own.get("ctx-size")
    if "max-model-len" not in own:
        return DEFAULT_SLOT_TOKENS * slots if total is None else int(total)
    needed = int(own["max-model-len"] * slots)
    if total and total != needed:
        raise ConfigError(
            f"ctx-size is {total}, but max-model-len times {slots} slots is {needed}",
            hint="Leave ctx-size out: it follows from max-model-len and parallel.",
        )
    return needed


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
    counters=CounterNames(
        steps=("llamacpp:n_decode_total",),
        sequences_per_step=("llamacpp:n_busy_slots_per_decode",),
        prompt_tokens=("llamacpp:prompt_tokens_total",),
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
    """Return the llama-server program to run; empty for our own, with the xllamacpp package."""
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
    """Return the owner's command, with the alias, metrics and place of slots that he has not set.

    A key, and what older builds may not know as flags, are variables, which such builds ignore.
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


class LlamaCppKind(ServerKind):
    """A llama.cpp server, of the xllamacpp package or llama-server."""

    name = "llamacpp"
    api = API
    model_kind = GGUF_FILE
    requirement = Requirement(
        "xllamacpp", "llama-server", "llama-server", "xllamacpp>=2026.10,<2027", is_path=True
    )
    divides_by_layers = True
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
        self.requirement.check(self.name, {"llama-server": checked.server})

    def check_ahead(self, options: Options, gpus: float) -> None:
        if options.get(COMMAND):
            self.check(options, gpus)
            return
        checked = read_options(options, gpus)
        if not checked.server and importlib.util.find_spec("xllamacpp"):
            import xllamacpp  # a library of 60 MB, which no worker loads beside its server

            check_fields(checked.flags, xllamacpp.CommonParams())

    def make(self, options: Options, context: EngineContext) -> Engine:
        from dynaplan.engines.llamacpp.engine import LlamaCppEngine

        return LlamaCppEngine(options, context)

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
