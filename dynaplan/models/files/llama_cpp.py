"""llama.cpp's router mode: ``models.ini`` (``--models-preset``) and a directory of models (``--models-dir``).

A preset file has a section for each model and ``[*]`` for all of them. Its keys are llama-server's flags
without dashes, long or short, or its environment variables (``LLAMA_ARG_CTX_SIZE``). Each section becomes the
command that the router would run. ``load-on-startup`` and ``stop-timeout`` are the file's own.

Sources: llama.cpp's ``tools/server/README.md``, "Using multiple models", and ``common/preset.cpp``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dynaplan.config.command_words import (
    ADDRESS,
    COMMAND,
    DROPPED,
    MODEL_FLAGS,
    NEGATABLE,
    SWITCHES,
    long_flag,
)
from dynaplan.util.errors import ConfigError

if TYPE_CHECKING:
    from dynaplan.models.files.imported_model import ImportedFile, ImportedModel

TOOL = "llama.cpp"
PROGRAM = "llama-server"
EVERY_MODEL = "*"
VERSION = "version"
LOAD_ON_STARTUP = "load-on-startup"
STOP_TIMEOUT = "stop-timeout"
NO_FLAGS = frozenset({VERSION, LOAD_ON_STARTUP, STOP_TIMEOUT, "dedup-cache-models", *ADDRESS, *DROPPED})
"""Keys that are the file's own, or of the address, which is ours."""

TRUE, FALSE = ("true", "on", "enabled", "1"), ("false", "off", "disabled", "0")

_COMMENT = re.compile(r"\s*[;#].*")
_SECTION = re.compile(r"\[(?P<name>[^]]+)\]")
_PART = re.compile(r"-(\d{5})-of-\d{5}$")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?")


def is_presets(text: str) -> bool:
    """Tell whether a text is a file of presets: its first lines are ``version = 1`` or a section."""
    lines = (_COMMENT.sub("", line).strip() for line in text.splitlines())
    first = next((line for line in lines if line), "")
    return bool(_SECTION.fullmatch(first)) or re.fullmatch(r"version\s*=\s*\d+", first) is not None


def read_presets(text: str) -> ImportedFile:
    """Return what a preset file says; raises ConfigError with the line."""
    from dynaplan.models.files.imported_model import ImportedFile, ImportedModel  # much, for another file

    sections = _sections(text)
    common = sections.pop(EVERY_MODEL, {})
    models: dict[str, ImportedModel] = {}
    preload: list[str] = []
    notes: list[str] = []
    for name, own in sections.items():
        flags = {**common, **own}
        if flags.get(LOAD_ON_STARTUP, "").lower() in TRUE:
            preload.append(name)
        if STOP_TIMEOUT in flags:
            notes.append(f"[{name}] {STOP_TIMEOUT}: a model finishes what it answers: `drain-deadline`.")
        models[name] = ImportedModel({COMMAND: _command(name, flags)})
    if not models:
        raise ConfigError("the preset file has no model", hint="Expected a section [NAME] for each model.")
    return ImportedFile(TOOL, models, preload=tuple(preload), notes=tuple(notes))


def _sections(text: str) -> dict[str, dict[str, str]]:
    sections: dict[str, dict[str, str]] = {}
    current: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = _COMMENT.sub("", line).strip()
        if not words:
            continue
        if found := _SECTION.fullmatch(words):
            current = sections[found["name"].strip()] = {}
            continue
        key, is_there, value = (part.strip() for part in words.partition("="))
        if not is_there or not key:
            raise ConfigError(f"line {number}: {words!r}", hint="Expected [NAME], or key = value.")
        if not sections and key != VERSION:
            raise ConfigError(f"line {number}: {words!r}", hint="Expected version = 1, or a section [NAME].")
        current |= _flag(long_flag(key), value)
    return sections


def _flag(name: str, value: str) -> dict[str, str]:
    """Return the flag and its value; ``no-flag`` is the opposite of ``flag``."""
    opposite = name.removeprefix("no-")
    if name in SWITCHES or opposite == name or opposite not in NEGATABLE:
        return {name: value}
    return {opposite: FALSE[0] if value.lower() in TRUE else TRUE[0]}


def _command(name: str, flags: Mapping[str, str]) -> str:
    """Return the command of a model.

    A section that names no model is called like one on the hub, else ConfigError.
    """
    if not any(flags.get(key) for key in MODEL_FLAGS["llamacpp"]):
        if not _HUB_NAME.fullmatch(name):
            raise ConfigError(f"[{name}] has no model", hint="Expected model = /path/to/model.gguf.")
        flags = {"hf-repo": name, **flags}
    words = [_words(flag, value) for flag, value in flags.items() if flag not in NO_FLAGS]
    return shlex.join([PROGRAM, *(word for each in words for word in each)])


def _words(flag: str, value: str) -> Sequence[str]:
    if flag not in SWITCHES:
        return f"--{flag}", value
    if value.lower() not in FALSE:
        return (f"--{flag}",)
    return (f"--no-{flag}",) if flag in NEGATABLE else ()


def read_directory(directory: str, files: Iterable[str]) -> ImportedFile:
    """Return the models of a directory; ``files`` are those in it and in its sub-directories, seen from it.

    A GGUF file is a model, called like it. A sub-directory is one, too, called like itself: its first part is
    loaded, and a file ``mmproj*`` beside it is its projector. Where the name is taken, the file's path is the
    name, with "-" for "/".
    """
    from dynaplan.models.files.imported_model import ImportedFile, ImportedModel

    models: dict[str, ImportedModel] = {}
    by_folder: dict[str, list[str]] = {}
    for file in sorted(each for each in files if each.lower().endswith(SUFFIX)):
        folder, _, name = file.rpartition("/")
        by_folder.setdefault(folder, []).append(name)
    for folder, names in by_folder.items():
        projectors = [name for name in names if name.startswith("mmproj")]
        loaded = [name for name in names if name not in projectors and _is_first_part(name)]
        if not folder:
            models |= {name[: -len(SUFFIX)]: ImportedModel(_options_of(directory, name)) for name in loaded}
        elif loaded:
            within = f"{directory}/{folder}"
            projector = {"mmproj": f"{within}/{projectors[0]}"} if projectors else {}
            short = folder.rpartition("/")[2]
            whole = f"{folder}/{loaded[0][: -len(SUFFIX)]}".replace("/", "-")
            model = whole if short in models else short
            models[model] = ImportedModel({**_options_of(within, loaded[0]), **projector})
    if not models:
        raise ConfigError(f"{directory} holds no .gguf file", hint="Expected a directory of GGUF files.")
    return ImportedFile(TOOL, models)


SUFFIX = ".gguf"


def _is_first_part(name: str) -> bool:
    part = _PART.search(name[: -len(SUFFIX)])
    return part is None or int(part[1]) == 1


def _options_of(directory: str, name: str) -> dict[str, Any]:
    return {"engine": "llamacpp", "model": f"{directory}/{name}"}
