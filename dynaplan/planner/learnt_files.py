"""What was learnt of engines, kept from one start to the next: ``~/.dynamo/learnt``, a file for each engine.

A file holds what the times are of (engine and its version, model and a digest, options, machine, GPUs, role)
and a ``LearntTiming``. The digest is of the model file's place, size, time and head: the whole is never read.
An option that may change a step makes another file; those in ``WITHOUT_EFFECT`` do not. The newest
``MAX_FILES`` stay. A file that cannot be read is as none.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from dynaplan.config.service_config import section_options
from dynaplan.config.settings.worker import engine_of
from dynaplan.engines.machine_speed import Machine
from dynaplan.engines.model_facts import read_facts
from dynaplan.engines.registry import find_engine
from dynaplan.engines.timing_model.learnt_timing import LearntTiming
from dynaplan.util.documents import parse_object

log = logging.getLogger(__name__)

MAX_FILES = 200

WITHOUT_EFFECT = frozenset(
    {"common-configs", "served-model-name", "startup-time", "hang-timeout", "seed", "saved-kv", "metrics"}
    | {"max-concurrent-prefills", "remote-prefill", "router", "namespace", "ServiceArgs", "drain-timeout"}
)
"""Options of a worker that do not change how long a step of its engine takes."""


@dataclass(frozen=True)
class LearntOf:
    """What a learnt timing belongs to; a digest of all of it is in the name of its file."""

    engine: str
    version: str
    model: str
    model_digest: str
    options: Mapping[str, Any]
    machine: str
    gpus: float
    role: str

    @property
    def file_name(self) -> str:
        text = json.dumps(vars(self), sort_keys=True, default=str)
        model = Path(self.model).name.removesuffix(".gguf") or "model"
        stem = re.sub(r"[^A-Za-z0-9.]+", "-", f"{self.engine}-{model}-{self.role}")
        return f"{stem[:80]}-{hashlib.sha256(text.encode()).hexdigest()[:12]}.json"


@dataclass(frozen=True)
class LearntFile:
    """One file as it was read."""

    path: Path
    of: Mapping[str, Any]
    learnt: LearntTiming


def learnt_of(
    config: Mapping[str, Mapping[str, Any]], component: str, machine: Machine, gpus: float, role: str
) -> LearntOf:
    """Return what the timings of a component's workers belong to, by their section of the configuration."""
    options = section_options(config, component)
    engine, model = engine_of(options), str(options.get("model") or "")
    kept = {key: value for key, value in options.items() if key not in WITHOUT_EFFECT and key != "model"}
    digest = read_facts(model, options).digest[:12]
    return LearntOf(engine, _version(engine), model, digest, kept, machine.name, gpus, role)


def _version(engine: str) -> str:
    kind = find_engine(engine)
    package = re.split(r"[<>=,\[ ]", kind.requirement.package)[0] if kind and kind.requirement else "dynaplan"
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def learnt_dir(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("HOME") or Path.home()) / ".dynamo" / "learnt"


def read_file(path: Path) -> LearntFile | None:
    """Return what the file holds; None where it is missing, or cannot be read, which is logged."""
    try:
        document = parse_object(path.read_bytes())
        return LearntFile(path, document["of"], LearntTiming.from_json(document["learnt"]))
    except (OSError, KeyError, TypeError, ValueError) as error:
        if not isinstance(error, FileNotFoundError):
            log.warning("%s cannot be read, so it counts for nothing: %s", path, error)
        return None


def list_files(directory: Path) -> list[LearntFile]:
    """Read the files of the directory, the newest first; those that cannot be read are left out."""
    return [found for path in _newest_first(directory) if (found := read_file(path))]


def _newest_first(directory: Path) -> list[Path]:
    """Return the JSON files of the directory, the newest first; one that is deleted meanwhile is left out."""
    changed_s = {}
    for path in directory.glob("*.json"):
        with suppress(OSError):
            changed_s[path] = path.stat().st_mtime
    return sorted(changed_s, key=changed_s.__getitem__, reverse=True)


def write_file(directory: Path, of: LearntOf, learnt: LearntTiming) -> None:
    """Write what was learnt, and delete the oldest files beyond ``MAX_FILES``; raises OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / of.file_name
    part = path.with_suffix(f".{os.getpid()}.part")
    document = {"of": vars(of), "learnt": learnt.to_json()}
    part.write_text(json.dumps(document, indent=1, default=str))
    part.replace(path)
    for old in _newest_first(directory)[MAX_FILES:]:
        old.unlink(missing_ok=True)
