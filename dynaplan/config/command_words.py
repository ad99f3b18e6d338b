"""A command as its owner wrote it: its words, the engine that it starts, and what it says of that.

A command is run as it stands. That a known engine is recognised in it serves an estimate of its memory,
its metrics and its name; the line is never made anew of what was read. ``launch_argv`` changes the address in
it, which is dynaplan's, and appends flags that its owner cannot notice.

Behind a program that becomes another one (``env``, ``nice``, ``numactl``, ``uv run``) the engine is
recognised too. In a container, or in a shell's text, it is not: its port there is another one.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from dynaplan.util.errors import ConfigError

COMMAND = "command"
"""The option that holds a command."""

PORT = "${PORT}"
"""What stands for the leased port in a command."""


class Command(NamedTuple):
    """A program with its arguments, and the variables assigned before it (``NAME=value program``)."""

    words: tuple[str, ...]
    environment: Mapping[str, str]

    @property
    def texts(self) -> tuple[str, ...]:
        """Every text in which a port may stand: the words, and the variables' values."""
        return (*self.words, *self.environment.values())


_ASSIGNMENT = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.DOTALL)


def read_command(value: Any, option: str = COMMAND) -> Command:
    """Return a command that is given as a text or as a list of words; no words where there is none.

    Raises ConfigError, naming the option.
    """
    words, environment = words_of(value, option), {}
    for word in words:
        if (found := _ASSIGNMENT.fullmatch(word)) is None:
            break
        environment[found["name"]] = found["value"]
    return Command(tuple(words[len(environment) :]), environment)


def words_of(value: Any, option: str) -> list[str]:
    """Return the words of a text or of a list; none where there is none. Raises ConfigError."""
    words = split_words(value, option) if isinstance(value, str) else [] if value is None else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ConfigError(
            f"{option} is {value!r}", hint="Expected a command: a string, or a list of strings."
        )
    return words


_COMMENT = re.compile(r"""(?P<kept>\\.|"(?:\\.|[^"\\])*"|'[^']*')|(?<!\S)\#[^\n]*""", re.DOTALL)
_CONTINUED = re.compile(r"\\[ \t]*(?:\n|$)")


def without_comments(text: str) -> str:
    """Return a command without its lines of comments, and without comments at ends of lines.

    Those begin with a ``#`` that neither stands in quotes nor in a word.
    """
    text = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    return _COMMENT.sub(lambda found: found["kept"] or "", text)


def split_words(text: str, option: str) -> list[str]:
    """Return the words of a command without its comments; a backslash joins lines. Raises ConfigError."""
    try:
        return shlex.split(_CONTINUED.sub(" ", without_comments(text)))
    except ValueError as error:
        raise ConfigError(f"{option} is {text!r}: {error}", hint="Close every quote.") from None


# engines


class EngineCommand(NamedTuple):
    """An engine in a command: its arguments begin at ``words[start]``, and ``flags`` are what they say.

    Names are the engine's long ones, without dashes; a number or truth value is one.
    """

    engine: str
    start: int
    flags: Mapping[str, Any]

    @property
    def model(self) -> str:
        """The model as the command names it: a path, or a name on a hub."""
        return next(str(self.flags[name]) for name in MODEL_FLAGS[self.engine] if self.flags.get(name))


MODEL_FLAGS: Mapping[str, tuple[str, ...]] = {
    "llamacpp": ("model", "hf-repo", "model-url", "docker-repo"),
    "vllm": ("model",),
    "sglang": ("model-path", "model"),
}
"""The flags that name the model. A llama-server with none of them is a router of many models."""

_PARALLEL = {"tp": "tensor-parallel-size", "pp": "pipeline-parallel-size", "dp": "data-parallel-size"}

SHORT_FLAGS: Mapping[str, Mapping[str, str]] = {
    "llamacpp": {
        "m": "model",
        "mu": "model-url",
        "dr": "docker-repo",
        "c": "ctx-size",
        "np": "parallel",
        "ngl": "n-gpu-layers",
        "b": "batch-size",
        "ub": "ubatch-size",
        "t": "threads",
        "tb": "threads-batch",
        "fa": "flash-attn",
        "ctk": "cache-type-k",
        "ctv": "cache-type-v",
        "sm": "split-mode",
        "ts": "tensor-split",
        "mg": "main-gpu",
        "s": "seed",
        "n": "n-predict",
        "mm": "mmproj",
        "md": "model-draft",
        "ngld": "n-gpu-layers-draft",
        "cd": "ctx-size-draft",
        "a": "alias",
        "hf": "hf-repo",
        "hfr": "hf-repo",
        "hff": "hf-file",
        "hft": "hf-token",
        "ot": "override-tensor",
        "cmoe": "cpu-moe",
        "ncmoe": "n-cpu-moe",
        "kvo": "kv-offload",
        "nkvo": "no-kv-offload",
        "kvu": "kv-unified",
        "cb": "cont-batching",
        "nocb": "no-cont-batching",
        "cram": "cache-ram",
        "dev": "device",
        "to": "timeout",
        "sps": "slot-prompt-similarity",
        "gpu-layers": "n-gpu-layers",
        "predict": "n-predict",
        "embedding": "embeddings",
        "rerank": "reranking",
        "temperature": "temp",
        "typical": "typical-p",
        "draft": "draft-max",
        "draft-n": "draft-max",
        "draft-n-min": "draft-min",
        "log-verbose": "verbose",
    },
    "vllm": _PARALLEL,
    "sglang": _PARALLEL,
}
"""Further names of flags, without dashes, and the long ones that are used here (llama.cpp's README)."""

COLLECTED = frozenset({"lora", "lora-scaled", "control-vector", "control-vector-scaled"}) | {
    *("override-tensor", "override-kv", "lora-modules", "logit-bias", "dry-sequence-breaker"),
}
"""Flags of which every one counts; of any other it is the last."""

NEGATABLE = frozenset(
    {
        *("agent", "cache-idle-slots", "cache-prompt", "cont-batching", "context-shift", "cors-credentials"),
        *("direct-io", "escape", "fit", "jinja", "kv-offload", "kv-unified", "log-prefix", "log-timestamps"),
        *("mmap", "mmproj", "mmproj-auto", "mmproj-offload", "models-autoload", "op-offload", "perf"),
        *("prefill-assistant", "reasoning-preserve", "repack", "skip-chat-parsing", "slots", "ui"),
        *("ui-mcp-proxy", "warmup", "webui", "webui-mcp-proxy"),
    }
)
"""llama-server's flags without a value that have an opposite, ``--no-flag``."""

SWITCHES = NEGATABLE - {"fit"} | {
    *("backend-sampling", "check-tensors", "cpu-moe", "cpu-moe-draft", "embeddings", "ignore-eos"),
    *("log-disable", "lora-init-without-apply", "metrics", "mlock", "no-host", "offline", "props"),
    *("reranking", "reuse-port", "special", "spec-default", "spm-infill", "swa-full", "verbose"),
}
"""llama-server's flags without a value."""

_VARIABLE = "LLAMA_ARG_"
_UNLIKE_FLAGS = {
    "batch": "batch-size",
    "ubatch": "ubatch-size",
    "n-parallel": "parallel",
    "think": "reasoning-format",
    "think-budget": "reasoning-budget",
    "static-path": "path",
    "rope-scaling-type": "rope-scaling",
    "endpoint-metrics": "metrics",
    "endpoint-slots": "slots",
    "endpoint-props": "props",
    "log-verbosity": "verbosity",
}
"""Variables of llama-server that are not called like their flag."""

LLAMA_SERVERS = ("llama-server", "llama.cpp-server")
"""The beginnings of the names of llama.cpp's server: builds often have a version behind it."""

SLEEPS_BY_ITSELF = "sleep-idle-seconds"
"""A flag of llama-server. Whoever asks for its metrics keeps it awake, so it is nothing but a command."""

MODULES = {
    "vllm.entrypoints.openai.api_server": "vllm",
    "sglang.launch_server": "sglang",
}
"""Modules that Python runs as an engine's server."""

WRAPPERS = frozenset(
    {
        *("env", "nice", "ionice", "chrt", "taskset", "numactl", "stdbuf", "time", "setsid"),
        *("uv", "uvx", "conda", "mamba", "micromamba", "poetry", "pixi", "pipenv", "hatch"),
    }
)
"""Programs that run another one in their place, with its own words behind theirs."""


def recognise(words: Sequence[str]) -> EngineCommand | None:
    """Return the engine that the words start, with a model; None where that is not known for certain."""
    if not words:
        return None
    for at in range(len(words) if _name(words[0]) in WRAPPERS else 1):
        if found := _program_at(words, at):
            engine, start = found
            flags = read_flags(words[start:], SHORT_FLAGS[engine])
            if engine != "llamacpp" and start < len(words) and not words[start].startswith("-"):
                flags = {"model": words[start], **flags}
            is_known = any(isinstance(flags.get(name), str) for name in MODEL_FLAGS[engine])
            return EngineCommand(engine, start, flags) if is_known and SLEEPS_BY_ITSELF not in flags else None
    return None


def _program_at(words: Sequence[str], at: int) -> tuple[str, int] | None:
    """Return the engine whose program is that word, and where its arguments begin."""
    program, following = _name(words[at]), list(words[at + 1 : at + 3])
    if program.startswith(LLAMA_SERVERS):
        return "llamacpp", at + 1
    if program in ("vllm", "sglang") and following[:1] == ["serve"]:
        return program, at + 2
    if program.startswith("python") and following[:1] == ["-m"] and following[-1] in MODULES:
        return MODULES[following[-1]], at + 3
    return None


def _name(program: str) -> str:
    return program.rpartition("/")[2].rpartition("\\")[2]


def read_flags(words: Sequence[str], short: Mapping[str, str]) -> dict[str, Any]:
    """Read ``--name value``, ``--name=value``, ``-short value`` and ``--flag``; other words are passed over.

    Of a flag that comes several times the last counts, or all as a list, where it is one that is
    ``COLLECTED``; ``--no-flag`` alone is ``flag`` false.
    """
    flags: dict[str, Any] = {}
    for position, word in enumerate(words):
        if not is_flag(word):
            continue
        name, has_value, text = word.lstrip("-").partition("=")
        name = short.get(name, name)
        if not has_value and position + 1 < len(words) and not is_flag(words[position + 1]):
            has_value, text = "=", words[position + 1]
        value: Any = typed(text) if has_value else True
        if not has_value and name.startswith("no-"):
            name, value = name.removeprefix("no-"), False
            name = short.get(name, name)
        before = flags.get(name, [])
        flags[name] = [*before, value] if name in COLLECTED else value
    return flags


def long_flag(key: str) -> str:
    """Return llama-server's long flag, without dashes, for a short one or a variable (``LLAMA_ARG_...``)."""
    if key.startswith(_VARIABLE):
        key = key.removeprefix(_VARIABLE).lower().replace("_", "-")
        return _UNLIKE_FLAGS.get(key, key)
    key = key.lstrip("-")
    return SHORT_FLAGS["llamacpp"].get(key, key)


def is_flag(word: str) -> bool:
    """Tell whether a word is a flag; a negative number is a value."""
    return word.startswith("-") and word not in ("-", "--") and not word[1].isdigit()


def typed(text: str) -> Any:
    """Return the number or truth value that the text is, else the text."""
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def engine_command(options: Mapping[str, Any]) -> EngineCommand | None:
    """Return the engine that is recognised in a worker's ``command``; None without one, or of another."""
    if not options.get(COMMAND):
        return None
    found = recognise(read_command(options[COMMAND]).words)
    return found if found and options.get("engine", found.engine) == found.engine else None


def effective_options(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a worker's options with those that its command states, by the engine's names.

    Of llama.cpp its variables state some, too, ``LLAMA_ARG_...``; a flag comes before them.
    """
    found = engine_command(options)
    if found is None:
        return options
    arguments = options.get("ServiceArgs")
    given = arguments.get("envs") if isinstance(arguments, Mapping) else None
    variables = {**(given or {}), **read_command(options[COMMAND]).environment}
    by_variable = {
        long_flag(name): typed(str(value)) for name, value in variables.items() if name.startswith(_VARIABLE)
    }
    return {**by_variable, **found.flags, "model": found.model, **options}


# the line that is run

ADDRESS = ("host", "port")
"""The flags by which an engine listens where dynaplan reaches it."""

DROPPED = frozenset({"api-key", "api-key-file", "api-prefix", "ssl-key-file", "ssl-cert-file"}) | {
    *("ssl-keyfile", "ssl-certfile", "root-path", "uds"),
}
"""Flags that belong to the address, too: clients do not reach the engine but through the frontend."""


def launch_argv(
    command: Command, found: EngineCommand, address: Sequence[str], added: Sequence[tuple[str, ...]]
) -> tuple[str, ...]:
    """Return the words of the command, in their order, for an engine that listens at ``address``.

    ``address`` are the values of the flags ``ADDRESS``, which are put in the place of the owner's, or
    appended. Flags in ``DROPPED`` are left out: with them it could not be reached. ``added`` are flags, each
    with its values, that are appended where the owner has not set them.
    """
    short = SHORT_FLAGS[found.engine]
    ours = dict(zip(ADDRESS, address, strict=True))
    words = list(command.words[: found.start])
    rest = iter(command.words[found.start :])
    for word in rest:
        name, has_value, _ = word.lstrip("-").partition("=")
        name = short.get(name, name) if is_flag(word) else ""
        if name not in DROPPED and name not in ours:
            words.append(word)
            continue
        if name in ours:
            words += [f"--{name}", ours[name]]
        if not has_value:
            next(rest, None)
    given = {f"--{name}" for name in found.flags}
    for flag in (*((f"--{name}", value) for name, value in ours.items()), *added):
        words += flag if flag[0] not in given else ()
    return tuple(word.replace(PORT, ours["port"]) for word in words)
