"""A model by its name: the GGUF file that another tool, or ``dynaplan pull``, has put on this machine.

| place | its files | names that mean one |
|---|---|---|
| `dynaplan pull` | `dynaplan/models` in the user's cache | `smollm2` |
| Ollama | blobs, by manifests: `OLLAMA_MODELS`, `~/.ollama/models` | `qwen3`, `qwen3:8b`, `owner/name:tag` |
| Hugging Face | `HF_HUB_CACHE`, `HF_HOME/hub`, `~/.cache/huggingface/hub` | `owner/name`, `owner/name:Q4_0` |
| LM Studio | `~/.lmstudio/models`, `~/.cache/lm-studio/models` | the same |
| llama.cpp | `LLAMA_CACHE`, `~/.cache/llama.cpp` | the same |

In the last three a file's own name, with its ending or without, means it as well. A path comes before any
name, and what was pulled before what other tools have. Nothing is downloaded. Directories that vLLM, SGLang
and TensorRT-LLM load are not looked for: these find ``owner/name`` in Hugging Face's cache by themselves.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from dynaplan.config.overrides import MODELS, Sections
from dynaplan.config.service_config import COMMON, kebab_keys
from dynaplan.engines.model_files import GGUF_MAGIC, GGUF_PART, exists, gguf_stem, is_hub_name, is_path
from dynaplan.engines.pulled_models import CATALOGUE, check_pulled, models_dir
from dynaplan.util.errors import ConfigError, Faults

OLLAMA_REGISTRY = "registry.ollama.ai"
OLLAMA_MODEL_LAYER = "application/vnd.ollama.image.model"
OLLAMA_SERVICE_DIRECTORY = Path("/usr/share/ollama/.ollama/models")
"""The home of Ollama's files where it runs as a system service."""


@dataclass(frozen=True)
class LocalModel:
    """A model's file, the tool that has it, and a name that means no other file of that tool.

    ``repository`` is ``owner/name``, where the tool keeps it.
    """

    name: str
    path: Path
    tool: str
    repository: str = ""

    def matches(self, text: str) -> bool:
        """Tell whether a text names this model, in any case: its name, its file's, or ``owner/name:ENDING``.

        ENDING is that of the file's name, usually the quantisation.
        """
        wanted = text.lower().removeprefix("hf.co/").removeprefix("huggingface.co/")
        stem = gguf_stem(self.path).lower()
        if wanted in (self.name.lower(), self.path.name.lower(), stem):
            return True
        repository, _, kind = wanted.partition(":")
        return repository == self.repository.lower() != "" and stem.endswith(kind)


def find_model(text: str, directory: Path, environ: Mapping[str, str]) -> LocalModel | None:
    """Return the model that this text names; None for a path that ``directory`` has, and for no such name.

    Raises ConfigError, with the names to choose from, where it means several files.
    """
    if exists(directory / os.path.expanduser(text)):
        return None
    found: dict[Path, LocalModel] = {}
    for model in local_models(environ):
        if model.matches(text):
            found.setdefault(model.path.resolve(), model)
    if not found:
        return None
    candidates = list(found.values())
    if len(candidates) > 1 and candidates[0].tool != PULLED:
        listed = "\n  ".join(f"{each.name}  ({each.tool}: {each.path})" for each in candidates)
        raise ConfigError(
            f"model is {text!r}, which names {len(candidates)} files on this machine",
            hint=f"Write one of these names, or its path:\n  {listed}",
        )
    return candidates[0]


def not_found_hint(text: str, environ: Mapping[str, str]) -> str:
    """Return what to do about a name that no place has: the nearest one, and how a model gets here."""
    names = dict.fromkeys([*CATALOGUE, *(each.name for each in local_models(environ))])
    near = get_close_matches(text.lower(), {name.lower(): name for name in names}, 1)
    meant = f"Did you mean {near[0]!r}? " if near else ""
    return (
        f"{meant}Expected the path of a .gguf file, or a name that `dynaplan pull`, Ollama, Hugging Face, "
        "LM Studio or llama.cpp has here; for vLLM a model on the hub, as OWNER/NAME."
    )


def local_models(environ: Mapping[str, str]) -> Iterator[LocalModel]:
    """Yield every GGUF model that this user has, what was pulled first. Unreadable places have none."""
    yield from _pulled(environ)
    yield from _of_ollama(environ)
    yield from _of_hugging_face(environ)
    yield from _of_lm_studio(environ)
    yield from _of_llama_cpp(environ)


def is_gguf(path: Path) -> bool:
    """Tell whether a file begins as GGUF does, whatever it is called: Ollama's blobs have no ending."""
    try:
        with path.open("rb") as file:
            return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC
    except OSError:
        return False


def locate_entries(config: Sections, directory: Path, environ: Mapping[str, str], faults: Faults) -> Sections:
    """Return the configuration in which each model of ``Models`` that llama.cpp loads is a path.

    An entry without an engine gets ``llamacpp`` where its model is a GGUF file, by its path or by its name.
    ``faults`` gathers names of several files, and names that neither this machine nor the hub has.
    """
    common = kebab_keys(config.get(COMMON) or {})
    located = dict(config.get(MODELS) or {})
    for name, entry in located.items():
        place = f"{MODELS}.{name}"
        with faults.gathering(place, prefix=f"{place}: "):
            located[name] = _located_entry(entry, common, directory, environ)
    return {**config, MODELS: located} if located else config


def _located_entry(entry: Any, common: Mapping[str, Any], directory: Path, environ: Mapping[str, str]) -> Any:
    """Return the entry with its model's path and engine; as it is where its model is not llama.cpp's.

    Raises ConfigError for a name of several files, or of none here.
    """
    if not isinstance(entry, Mapping) or "command" in entry:
        return entry  # what is no mapping is refused with the other settings
    given = {**common, **kebab_keys(entry)}
    model, engine = given.get("model"), given.get("engine")
    if not isinstance(model, str) or not model.strip() or engine not in (None, LLAMACPP):
        return entry
    if found := find_model(model, directory, environ):
        return {**entry, "model": str(found.path), "engine": LLAMACPP}
    path = directory / os.path.expanduser(model)
    if is_gguf(path):
        return {**entry, "engine": LLAMACPP}
    if not exists(path) and not is_path(model) and not (engine is None and is_hub_name(model, path)):
        check_pulled(model, directory)
        raise ConfigError(
            f"model is {model!r}, which is not on this machine", hint=not_found_hint(model, environ)
        )
    return entry


LLAMACPP = "llamacpp"
PULLED = "dynaplan pull"


def _pulled(environ: Mapping[str, str]) -> Iterator[LocalModel]:
    for model in CATALOGUE.values():
        path = models_dir(environ) / model.file
        if path.is_file():
            yield LocalModel(model.name, path, PULLED)


def _of_ollama(environ: Mapping[str, str]) -> Iterator[LocalModel]:
    given = environ.get("OLLAMA_MODELS")
    for folder in [Path(given)] if given else [_home(environ) / ".ollama/models", OLLAMA_SERVICE_DIRECTORY]:
        manifests = folder / "manifests"
        for file in _files(manifests, "*"):
            name = _ollama_name(file.relative_to(manifests).parts)
            if name and (blob := _ollama_blob(file, folder / "blobs")):
                repository = name.removesuffix(":latest") if name.endswith(":latest") else ""
                yield LocalModel(name, blob, "Ollama", repository)


def _ollama_name(parts: tuple[str, ...]) -> str:
    """Return Ollama's name for a manifest at that place (host, owner, model, tag); "" for another file."""
    if len(parts) < 4:
        return ""
    host, owner, *model, tag = parts
    places = [] if host == OLLAMA_REGISTRY else [host]
    places += [] if owner == "library" else [owner]
    return f"{'/'.join([*places, *model])}:{tag}"


def _ollama_blob(manifest: Path, blobs: Path) -> Path | None:
    try:
        layers = json.loads(manifest.read_bytes())["layers"]
        digests = [each["digest"] for each in layers if each["mediaType"] == OLLAMA_MODEL_LAYER]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    path = blobs / str(digests[0]).replace(":", "-") if digests else None
    return path if path and path.is_file() else None


def hub_snapshots(environ: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    """Yield ``owner/name`` and the newest directory of each model in Hugging Face's cache."""
    home = Path(environ.get("HF_HOME") or _cache(environ) / "huggingface")
    for repository in sorted(Path(environ.get("HF_HUB_CACHE") or home / "hub").glob("models--*--*")):
        owner, _, name = repository.name.removeprefix("models--").partition("--")
        revisions = sorted(repository.glob("snapshots/*"), key=lambda each: each.stat().st_mtime)
        if revisions:
            yield f"{owner}/{name}", revisions[-1]


def _of_hugging_face(environ: Mapping[str, str]) -> Iterator[LocalModel]:
    for name, snapshot in hub_snapshots(environ):
        for file in _files(snapshot, "*.gguf"):
            yield _of_repository(name, file, "Hugging Face")


def _of_lm_studio(environ: Mapping[str, str]) -> Iterator[LocalModel]:
    for folder in (_home(environ) / ".lmstudio/models", _home(environ) / ".cache/lm-studio/models"):
        for file in _files(folder, "*.gguf"):
            owner, name, *_ = (*file.relative_to(folder).parts, "")
            yield _of_repository(f"{owner}/{name}", file, "LM Studio")


def _of_llama_cpp(environ: Mapping[str, str]) -> Iterator[LocalModel]:
    """Yield what ``-hf owner/name`` has fetched: files ``owner_name_FILE.gguf``."""
    folder = Path(environ.get("LLAMA_CACHE") or _cache(environ) / "llama.cpp")
    for file in _files(folder, "*.gguf"):
        parts = file.stem.split("_", 2)
        repository = "/".join(parts[:2]) if len(parts) == 3 else ""
        yield _of_repository(repository, file, "llama.cpp")


def _of_repository(repository: str, file: Path, tool: str) -> LocalModel:
    """Return a repository's file as a model, called ``owner/name:QUANTISATION`` as llama.cpp does."""
    stem = gguf_stem(file)
    kind = stem.replace("-", ".").rpartition(".")[2]
    return LocalModel(f"{repository}:{kind}" if repository else stem, file, tool, repository)


def _files(folder: Path, pattern: str) -> Iterator[Path]:
    """Yield the models' files below a folder: of a split one the first part, and no projector of images."""
    for path in sorted(folder.rglob(pattern)):
        part = GGUF_PART.fullmatch(path.name)
        if path.is_file() and not path.name.startswith("mmproj") and (not part or int(part["number"]) == 1):
            yield path


def _home(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("HOME") or os.path.expanduser("~"))


def _cache(environ: Mapping[str, str]) -> Path:
    given = Path(environ.get("XDG_CACHE_HOME", ""))
    return given if given.is_absolute() else _home(environ) / ".cache"
