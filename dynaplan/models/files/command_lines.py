"""Command lines of engines, recognised: ``llama-server ...`` and ``vllm serve ...`` as options of a model.

A recognised engine is more than a command: its KV usage is known, its memory is estimated, it sleeps.
Everything on the command line becomes an option of the same name, which our engines pass on. Only host, port,
and what else dynaplan sets itself is left out. A command in a container, behind a wrapper, or with words that
are no flags stays a command.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LLAMA_SHORT: Mapping[str, str] = {
    "m": "model",
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
    "hff": "hf-file",
    "ot": "override-tensor",
    "cmoe": "cpu-moe",
    "ncmoe": "n-cpu-moe",
    "nkvo": "no-kv-offload",
    "cb": "cont-batching",
    "nocb": "no-cont-batching",
    "dev": "device",
}
"""llama-server's short flags, without the dash, and their long ones (its README, "Usage")."""

LLAMA_OTHER_NAMES = {"gpu-layers": "n-gpu-layers", "predict": "n-predict", "embedding": "embeddings"}

SET_BY_US = frozenset({"host", "port", "alias", "api-key", "api-key-file", "metrics", "slots", "no-webui"})
"""Flags that dynaplan sets, or that would be of no use behind it."""

LLAMA_SERVERS = ("llama-server", "llama.cpp-server")
"""The beginnings of the names of llama.cpp's server: builds often have a version behind it."""


def recognise(words: Sequence[str]) -> dict[str, Any] | None:
    """Return the options of the engine that the command line starts; None where it is not recognised.

    Values are numbers and truth values where they look like them, else text.
    """
    if not words:
        return None
    program = words[0].rpartition("/")[2].rpartition("\\")[2]
    if program.startswith(LLAMA_SERVERS):
        return _llama_server(words)
    if program == "vllm" and words[1:2] == ["serve"]:
        return _vllm(words[2:], ["vllm"] if words[0] == "vllm" else list(words[:2]))
    if program.startswith("python") and list(words[1:3]) == ["-m", "vllm.entrypoints.openai.api_server"]:
        return _vllm(words[3:], list(words[:3]))
    return None


def _llama_server(words: Sequence[str]) -> dict[str, Any] | None:
    flags = read_flags(words[1:], LLAMA_SHORT)
    if flags is None or not isinstance(flags.get("model"), str):
        return None
    own = {LLAMA_OTHER_NAMES.get(name, name): value for name, value in flags.items()}
    options = {name: value for name, value in own.items() if name not in SET_BY_US}
    return {"engine": "llamacpp", "llama-server": words[0], **options}


def _vllm(arguments: Sequence[str], program: list[str]) -> dict[str, Any] | None:
    model = arguments[0] if arguments and not arguments[0].startswith("-") else None
    flags = read_flags(arguments[1:] if model else arguments, {"tp": "tensor-parallel-size"})
    if flags is None:
        return None
    model = model or flags.pop("model", None)
    if not isinstance(model, str):
        return None
    left_out = SET_BY_US | {"served-model-name"}
    options = {name: value for name, value in flags.items() if name not in left_out}
    if program != ["vllm"]:
        options["vllm-command"] = program
    return {"engine": "vllm", "model": model, **options}


def read_flags(words: Sequence[str], short: Mapping[str, str]) -> dict[str, Any] | None:
    """Read ``--name value``, ``--name=value``, ``-short value`` and ``--flag``; None for other words.

    A flag that comes several times has a list of its values; ``--no-flag`` alone is ``flag`` false.
    """
    flags: dict[str, Any] = {}
    position = 0
    while position < len(words):
        word = words[position]
        if not word.startswith("-") or word in ("-", "--"):
            return None
        name, has_value, text = word.lstrip("-").partition("=")
        name = name if word.startswith("--") else short.get(name, "")
        if not name:
            return None
        position += 1
        if not has_value and position < len(words) and _is_value(words[position]):
            has_value, text, position = "=", words[position], position + 1
        value: Any = typed(text) if has_value else True
        if not has_value and name.startswith("no-"):
            name, value = name.removeprefix("no-"), False
        flags[name] = _with(flags[name], value) if name in flags else value
    return flags


def _is_value(word: str) -> bool:
    """Tell whether the word is a value: not a flag, or a negative number."""
    return not word.startswith("-") or word[1:2].isdigit()


def _with(before: Any, value: Any) -> list[Any]:
    return [*before, value] if isinstance(before, list) else [before, value]


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
