"""llama.cpp's router mode: ``models.ini`` (``--models-preset``) and a directory of models (``--models-dir``).

A preset file has a section for each model and ``[*]`` for all of them. Its keys are llama-server's flags
without dashes, long or short, or its environment variables (``LLAMA_ARG_CTX_SIZE``). Each becomes an option
of the same name. ``load-on-startup`` and ``stop-timeout`` are the file's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from dynaplan.models.files.command_lines import LLAMA_OTHER_NAMES, LLAMA_SHORT, SET_BY_US, typed
from dynaplan.models.files.imported_model import ImportedFile, ImportedModel
from dynaplan.util.errors import ConfigError

TOOL = "llama.cpp"
EVERY_MODEL = "*"
LOAD_ON_STARTUP = "load-on-startup"
STOP_TIMEOUT = "stop-timeout"
OWN_KEYS = frozenset({LOAD_ON_STARTUP, STOP_TIMEOUT, "dedup-cache-models"})
TRUE, FALSE = ("true", "on", "yes", "1"), ("false", "off", "no", "0")

_SECTION = re.compile(r"\[(?P<name>.+)\]")
_VARIABLE = "LLAMA_ARG_"
_PART = re.compile(r"-(\d{5})-of-\d{5}$")
_HAS_MODEL = ("model", "hf-repo", "model-url")


def is_presets(text: str) -> bool:
    """Tell whether a text is a file of presets: its first lines are ``version = 1`` or a section."""
    lines = (line.strip() for line in text.splitlines())
    first = next((line for line in lines if line and line[0] not in "#;"), "")
    return bool(_SECTION.fullmatch(first)) or re.fullmatch(r"version\s*=\s*\d+", first) is not None


def read_presets(text: str) -> ImportedFile:
    """Return what a preset file says; raises ConfigError with the line."""
    sections = _sections(text)
    common = sections.pop(EVERY_MODEL, {})
    models: dict[str, ImportedModel] = {}
    preload: list[str] = []
    notes: list[str] = []
    for name, own in sections.items():
        options = {**common, **own}
        if str(options.get(LOAD_ON_STARTUP, "")).lower() in TRUE:
            preload.append(name)
        models[name] = _model(name, options, notes)
    if not models:
        raise ConfigError("the preset file has no model", hint="Expected a section [NAME] for each model.")
    return ImportedFile(TOOL, models, preload=tuple(preload), notes=tuple(notes))


def _sections(text: str) -> dict[str, dict[str, str]]:
    sections: dict[str, dict[str, str]] = {}
    current: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.strip()
        if not words or words[0] in "#;":
            continue
        if found := _SECTION.fullmatch(words):
            current = sections.setdefault(found["name"].strip(), {})
            continue
        key, is_there, value = words.partition("=")
        if not is_there or not key.strip():
            raise ConfigError(f"line {number}: {words!r}", hint="Expected [NAME], or key = value.")
        if sections:
            current[_long(key.strip())] = value.strip()
        elif (key.strip(), value.strip()) != ("version", "1"):
            raise ConfigError(f"line {number}: {words!r}", hint="Expected version = 1, or a section [NAME].")
    return sections


def _long(key: str) -> str:
    """Return the long flag, without dashes, that a key stands for."""
    if key.startswith(_VARIABLE):
        return key.removeprefix(_VARIABLE).lower().replace("_", "-")
    key = key.lstrip("-")
    key = LLAMA_SHORT.get(key, key)
    return LLAMA_OTHER_NAMES.get(key, key)


def _model(name: str, options: Mapping[str, str], notes: list[str]) -> ImportedModel:
    if not any(options.get(key) for key in _HAS_MODEL):
        raise ConfigError(f"[{name}] has no model", hint="Expected model = /path/to/model.gguf.")
    if "model" not in options:
        given = next(key for key in _HAS_MODEL if options.get(key))
        raise ConfigError(
            f"[{name}] has {given} = {options[given]}",
            hint="dynaplan fetches nothing from a hub: download the file, and name it in model = ...",
        )
    if STOP_TIMEOUT in options:
        notes.append(f"[{name}] {STOP_TIMEOUT}: a model finishes what it answers: `drain-deadline`.")
    passed = {key: value for key, value in options.items() if key not in SET_BY_US | OWN_KEYS}
    return ImportedModel({"engine": "llamacpp", **dict(_option(*item) for item in passed.items())})


def _option(key: str, value: str) -> tuple[str, Any]:
    """Return the option; a flag that is switched on or off is true or false."""
    is_flag = value.lower() in ("true", "false")
    if key.startswith("no-") and is_flag:
        return key.removeprefix("no-"), value.lower() != "true"
    return key, value.lower() == "true" if is_flag else typed(value)


def read_directory(directory: str, files: Iterable[str]) -> ImportedFile:
    """Return the models of a directory; ``files`` are those in it and in its sub-directories, seen from it.

    A GGUF file is a model, called like it. A sub-directory is one, too, called like itself: its first part is
    loaded, and a file ``mmproj*`` beside it is its projector. Where the name is taken, the file's path is the
    name, with "-" for "/".
    """
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
