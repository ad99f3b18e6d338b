"""Checks of a model's files, made before GPUs are taken for it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

from dynaplan.engines.gguf import min_file_bytes
from dynaplan.engines.registry import find_engine
from dynaplan.util.errors import ConfigError

GGUF_FILE = "a GGUF file"
DIRECTORY = "a Hugging Face directory, which holds a config.json"

CONFIG_FILES = ("config.json", "params.json")
"""Either makes a directory a model: Hugging Face's, and Mistral's own."""

OPTION = "--Common.model=PATH"
"""The way to name a model on the command line."""

PULL = "`dynaplan pull` lists small ones to begin with."
"""The way to a first model."""

GGUF_MAGIC = b"GGUF"
GGUF_VERSIONS = range(1, 16)
GGUF_HEADER_BYTES = 24
GGUF_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def model_kind(engine: str) -> str:
    """Return the kind of model that the engine takes; empty where its model is only a name."""
    kind = find_engine(engine)
    return kind.model_kind if kind else ""


def check_model(engine: str, model: Any) -> list[str]:
    """Raise ConfigError unless the engine can load this model; returns warnings.

    A path must lead to what the engine takes. The engine itself looks up a name (``org/name``).
    """
    kind = model_kind(engine)
    if not kind:
        return []
    if not isinstance(model, str) or not model.strip():
        raise ConfigError(f"model is {model!r}", hint=f"Engine {engine} takes the path of {kind}.")
    path = Path(os.path.expanduser(model))
    try:
        if kind == GGUF_FILE:
            _check_gguf(model, path)
        elif is_path(model):
            _check_directory(engine, model, path)
        elif "://" not in model:
            return _hub_warning(engine, model)
    except OSError as error:
        raise _wrong(model, f"cannot be read: {error.strerror}", "Check its permissions.") from error
    return []


def absolute_path(engine: str, model: Any, directory: Path) -> Any:
    """Replace ``~`` in the model's path and make it absolute; a name stays as it is."""
    kind = model_kind(engine)
    if not kind or not isinstance(model, str) or not model.strip():
        return model
    path = directory / Path(os.path.expanduser(model))
    name = model.rpartition(":")[0] or model  # llama.cpp takes org/name:kind
    if is_path(model) or exists(path) or (kind == GGUF_FILE and not is_hub_name(name, path)):
        return str(path.resolve() if ".." in path.parts else path)
    return model


def public_name(engine: str, model: Any) -> str:
    """Return the name for clients of a model that is a path: its last part; empty for one that is a name."""
    if not model_kind(engine) or not isinstance(model, str) or not is_path(model):
        return ""
    return gguf_stem(Path(model))


def gguf_stem(path: Path) -> str:
    """Return the name of a model's file without its ending, and without the number of a part."""
    part = GGUF_PART.fullmatch(path.name)
    return part["stem"] if part else path.name.removesuffix(".gguf")


def is_path(model: str) -> bool:
    """True when this means a file or directory, there or not; ``org/name`` does only when it exists."""
    return model.startswith(("/", ".", "~")) or model.endswith(".gguf") or exists(Path(model))


def is_hub_name(model: str, path: Path) -> bool:
    """Tell whether this can only be ``org/name`` on the hub: there is no such path, nor its directory."""
    return "/" in model and HUB_NAME.fullmatch(model) is not None and not exists(path.parent)


def exists(path: Path) -> bool:
    """Tell whether there is such a path, of whatever length and with whatever characters."""
    try:
        return path.exists()
    except OSError:
        return False


def _wrong(model: str, fault: str, hint: str) -> ConfigError:
    return ConfigError(f"model is {model!r}, which {fault}", hint=hint)


def _check_gguf(model: str, path: Path) -> None:
    expected = f"Engine llamacpp takes the path of {GGUF_FILE}."
    if not path.exists():
        if not is_path(model) and is_hub_name(model, path):
            hint = f"Download one and write {OPTION}. Engine vllm takes names on the hub: -f vllm.yaml."
            raise _wrong(model, "does not exist", f"{expected} {hint}")
        raise _wrong(model, "does not exist", f"{expected}{_others(path) or f' Write {OPTION}. {PULL}'}")
    if path.is_dir():
        raise _wrong(model, "is a directory", f"{expected}{_inside(path)}")
    with path.open("rb") as file:
        header = file.read(GGUF_HEADER_BYTES)
    if not header:
        raise _wrong(model, "is empty", expected)
    if path.suffix == ".safetensors":
        raise _wrong(
            model, "holds safetensors", f"{expected} Engines vllm, sglang and trtllm take its directory."
        )
    if not header.startswith(GGUF_MAGIC):
        raise _wrong(model, f"is no GGUF file: it begins with {header[:4]!r}", expected)
    version = int.from_bytes(header[4:8], "little")
    if len(header) < GGUF_HEADER_BYTES or version not in GGUF_VERSIONS:
        raise _wrong(model, "is no whole GGUF file", f"{expected} Was it copied to its end?")
    for part in _whole_model(model, path):
        _check_whole(str(part), part)


def _check_whole(model: str, path: Path) -> None:
    """Raise ConfigError when the file ends before its tensors do, as after a broken download."""
    needed, size = min_file_bytes(path), path.stat().st_size
    if size < needed:
        fault = f"is cut off: it has {size:,} bytes, and its tensors end at {needed:,}"
        raise _wrong(model, fault, "Copy it, or pull it, again.")


def gguf_parts(path: Path) -> list[Path]:
    """Return the paths of a model's files in order, existing or not: all parts of a split one."""
    part = GGUF_PART.fullmatch(path.name)
    if part is None:
        return [path]
    count = part["count"]
    return [path.with_name(f"{part['stem']}-{n:05}-of-{count}.gguf") for n in range(1, int(count) + 1)]


def _whole_model(model: str, path: Path) -> list[Path]:
    """Return all files of a model; llama.cpp finds the parts of a split one by the first.

    Raises ConfigError unless this is the first part and all the others are there.
    """
    parts = gguf_parts(path)
    if path != parts[0]:
        raise _wrong(model, "is not the first of its parts", f"Name {parts[0]}.")
    missing = [part.name for part in parts if not part.exists()]
    if missing:
        raise _wrong(model, f"lacks {len(missing)} of its parts", f"There is no {', '.join(missing)}.")
    return parts


def _check_directory(engine: str, model: str, path: Path) -> None:
    expected = f"Engine {engine} takes {DIRECTORY}."
    if not path.exists():
        raise _wrong(model, "does not exist", f"{expected}{_others(path)}")
    if not path.is_dir():
        raise _wrong(model, "is a file", _hint_for_file(expected, path))
    configs = [path / name for name in CONFIG_FILES if (path / name).exists()]
    if not configs:
        raise _wrong(model, "has no config.json", f"{expected}{_inside(path)}")
    try:
        document = json.loads(configs[0].read_bytes())
    except ValueError as error:
        raise _wrong(model, f"has a {configs[0].name} that is no JSON: {error}", expected) from error
    if not isinstance(document, dict):
        raise _wrong(model, f"has a {configs[0].name} that is no JSON object", expected)


def _hint_for_file(expected: str, path: Path) -> str:
    with path.open("rb") as file:
        is_gguf = file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    if is_gguf:
        return f"{expected} A GGUF file is for engine llamacpp."
    if path.name in CONFIG_FILES or path.suffix == ".safetensors":
        return f"{expected} Name {path.parent}."
    return expected


def _others(path: Path) -> str:
    """Suggest the nearest name beside a path that is missing; a sentence, or nothing."""
    from difflib import get_close_matches

    try:
        names = [each.name for each in path.parent.iterdir()]
    except OSError:
        return f" There is no {path.parent} either."
    near = get_close_matches(path.name, names, 1, cutoff=0.6)
    return f" Did you mean {path.parent / near[0]}?" if near else ""


def _inside(directory: Path) -> str:
    """Suggest what the user may have meant inside a directory that is no model; a sentence, or nothing."""
    if any((directory / name).exists() for name in CONFIG_FILES):
        return " This directory is for engines vllm, sglang and trtllm."
    snapshots = sorted(path.parent for path in directory.glob("snapshots/*/config.json"))
    if snapshots:
        return f" Did you mean {snapshots[-1]}?"
    files = sorted(directory.glob("*.gguf"))
    return f" Engine llamacpp takes {files[0]}." if files else ""


def _hub_warning(engine: str, model: str) -> list[str]:
    if not HUB_NAME.fullmatch(model):
        raise _wrong(
            model, "does not exist", f"Engine {engine} takes {DIRECTORY}, or a model's name on the hub."
        )
    return [f"model {model} is no directory here; {engine} will look it up on the Hugging Face hub"]
