"""The configuration of a graph: defaults < decorator < YAML < ``--Service.key=value``.

``read_config`` parses and merges; after ``validate_config`` and ``resolve_graph`` every value is valid, and
no other code checks it again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dynaplan.config.overrides import Sections, merge_sections, parse_overrides
from dynaplan.config.service_config import CONFIG_VARIABLE
from dynaplan.graph.errors import nearest
from dynaplan.graph.graph import Graph
from dynaplan.util.errors import ConfigError
from dynaplan.util.masking import mask_secrets

DEPLOYMENT_CONFIG_VARIABLE = "DYN_DEPLOYMENT_CONFIG"
"""The environment variable with YAML or JSON text that replaces the file."""


def find_config_file(
    name: str, working_dir: Path, graph: Graph | None = None, *, beside: Sequence[Path] = ()
) -> Path:
    """Find the file of ``-f NAME``: in the working directory, in ``beside``, or beside the graph's module."""
    folders = [working_dir.resolve(), *beside]
    if graph is not None and graph.module_file is not None:
        folders.append(graph.module_file.parent)
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    known = [file.name for folder in folders for file in folder.glob("*.y*ml")]
    looked = " and ".join(dict.fromkeys(map(str, folders)))
    raise ConfigError(f"-f {name}: no such file in {looked}", hint=nearest(name, known))


def read_config(file: Path | None, overrides: Sequence[str] = ()) -> Sections:
    """Read the YAML and merge the overrides into it, deeply.

    ``DYN_DEPLOYMENT_CONFIG``, when set, replaces the file; the overrides still apply. Raises ConfigError
    for text that is not YAML or an override. Names and types are checked by ``validate_config``.
    """
    from dynaplan.config.yaml_file import read_sections, read_sections_file

    text = os.environ.get(DEPLOYMENT_CONFIG_VARIABLE, "")
    if text:
        sections = read_sections(text, DEPLOYMENT_CONFIG_VARIABLE)
    else:
        sections = read_sections_file(file) if file is not None else {}
    return merge_sections(sections, parse_overrides(overrides))


def dry_run_text(config: Mapping[str, Any]) -> str:
    """Return the text of ``--dry-run`` about the configuration, in the words of NVIDIA's ``dynamo serve``.

    Secrets in it are masked.
    """
    return f"Service Configuration:\n{json.dumps(mask_secrets(config), indent=2, ensure_ascii=False)}"


def environment_text(config: Mapping[str, Any]) -> str:
    """Return the text of ``--show-env``: the variable with the whole configuration, secrets masked."""
    value = json.dumps(mask_secrets(config), ensure_ascii=False)
    return f"Environment Variable that would be set:\n{CONFIG_VARIABLE}={value}"
