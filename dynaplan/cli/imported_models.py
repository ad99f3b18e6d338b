"""Files of other tools that describe several models, recognised by their form."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynaplan.config.command_words import ADDRESS, COMMAND, DROPPED, read_command, recognise
from dynaplan.config.overrides import MODEL_SETS, MODELS, Sections, merge_sections, parse_overrides
from dynaplan.config.yaml_file import refuse_second_keys
from dynaplan.engines.local_models import locate_entries
from dynaplan.models.files import llama_cpp
from dynaplan.util import screen
from dynaplan.util.errors import Faults

if TYPE_CHECKING:
    from dynaplan.models.files.imported_model import ImportedFile, ImportedModel
    from dynaplan.models.model import Constraints


def read_config_file(
    file: Path | None, overrides: Sequence[str], directory: Path, faults: Faults
) -> tuple[Sections, list[str]]:
    """Return the configuration, and a line for everything in another tool's file that has no meaning here.

    The models of the section ``Models`` are looked for in ``directory``, and by their names on this machine.
    """
    from dynaplan.graph.config import read_config

    found = imported_file(file) if file else None
    notes: list[str] = []
    if found is None:
        config = read_config(file, overrides)
    else:
        sections, more = sections_of(found)
        number = "1 model" if len(found.models) == 1 else f"{len(found.models)} models"
        said = [f"{file} is a file of {found.tool}: {number}", *found.notes, *more]
        notes = [screen.Note(each) for each in said]
        config = merge_sections(sections, parse_overrides(overrides))
    return locate_entries(config, directory, os.environ, faults), notes


def imported_file(file: Path) -> ImportedFile | None:
    """Return what another tool's file or directory of models says; None for any other file."""
    if file.is_dir():
        return llama_cpp.read_directory(
            str(file), [str(each.relative_to(file)) for each in file.rglob("*.gguf")]
        )
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError):
        return None  # who reads it as a file of ours says what is wrong
    if llama_cpp.is_presets(text):
        return llama_cpp.read_presets(text)
    if "cmd" not in text:
        return None
    from dynaplan.models.files import llama_swap

    document = _yaml(text, str(file))
    return llama_swap.read(document, os.environ) if document and llama_swap.is_config(document) else None


def _yaml(text: str, source: str) -> Any:
    """Return the YAML document, its folded blocks as ``FoldedText``; None for text that is empty or no YAML.

    Raises ConfigError for a key that a mapping has twice, of which PyYAML takes the last.
    """
    import yaml

    from dynaplan.models.files.llama_swap import FoldedText

    class Loader(yaml.SafeLoader):
        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            node = super().compose_mapping_node(anchor)
            refuse_second_keys(node, source)
            return node

        def construct_text(self, node: yaml.ScalarNode) -> str:
            value = FoldedText(self.construct_scalar(node))
            begin, end = node.start_mark, node.end_mark
            value.lines = str(begin.buffer)[begin.pointer : end.pointer].partition("\n")[2]
            return value if node.style == ">" else str(value)

    Loader.add_constructor("tag:yaml.org,2002:str", Loader.construct_text)
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError:
        return None


def sections_of(found: ImportedFile) -> tuple[Sections, list[str]]:
    """Return the file as a configuration's sections, and a line for all that is left out or replaced."""
    notes = []
    models = {}
    for name, model in found.models.items():
        models[name] = _entry(name, model, found.constraints)
        notes += [*_key_notes(name, models[name]), *_use_own_llama_server(name, models[name])]
    for name in found.preload:
        models[name]["preload"] = True
    sections: Sections = {MODELS: models}
    if found.constraints.together:
        sections[MODEL_SETS] = {"together": [sorted(each) for each in found.constraints.together]}
    if found.api_keys:
        further = {"further-api-key": list(found.api_keys[1:])} if found.api_keys[1:] else {}
        sections["Frontend"] = {"api-key": found.api_keys[0], **further}
    return sections, notes


def _key_notes(name: str, entry: Mapping[str, Any]) -> list[str]:
    """Return a line for each API key in the engine's command: it is left out, clients need the frontend's."""
    found = recognise(read_command(entry.get(COMMAND)).words)
    keys = [f"--{each}" for each in ("api-key", "api-key-file") if found and each in found.flags]
    return [f"{name}: {each} is left out: clients are asked for `Frontend.api-key`." for each in keys]


def _use_own_llama_server(name: str, entry: dict[str, Any]) -> list[str]:
    """Have a model served by the installed package where the PATH has no ``llama-server``.

    One that is named by its path is another build, with flags of its own: nothing stands in for it.
    """
    command = read_command(entry.get(COMMAND))
    found = recognise(command.words)
    if not found or found.engine != "llamacpp" or not importlib.util.find_spec("xllamacpp"):
        return []
    program = command.words[found.start - 1]
    if shutil.which(program) or os.path.basename(program) != program:
        return []
    del entry[COMMAND]
    flags = {key: each for key, each in found.flags.items() if key not in OURS and key != "hf-repo"}
    entry |= {"engine": found.engine, **flags, "model": found.model}
    return [f"models.{name}.cmd: there is no {program} here; the xllamacpp package serves it."]


OURS = frozenset({*ADDRESS, *DROPPED, "alias", "metrics", "slots", "webui", "ui"})
"""Flags of a command that dynaplan sets, or that would be of no use behind it."""


def _entry(name: str, model: ImportedModel, constraints: Constraints) -> dict[str, Any]:
    filters = model.filters
    leaves = constraints.leaves.get(name, frozenset())
    said = {
        "url": model.url,
        "stop-command": model.stop_command,
        "upstream-name": model.upstream_name,
        "unlisted": model.is_unlisted,
        "strip-params": list(filters.removed),
        "set-params": dict(filters.set),
        "set-params-by-name": dict(filters.set_by_name),
        "set-params-by-match": [asdict(rule) for rule in filters.set_by_match],
        "not-beside": sorted(leaves),
    }
    return {**model.options, **{key: value for key, value in said.items() if value}}
