"""The graph that a configuration belongs to, for ``dynaplan serve FILE`` without one.

A YAML file belongs to the module beside it that has its name (``mine.yaml`` to ``mine.py``), or to the graph
of the command in its first line, as in ``llamacpp.yaml``. One that has a shipped file's name belongs where
that does. All others are asked about.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from dynaplan.cli.imported_models import imported_file
from dynaplan.config.overrides import MODELS
from dynaplan.graph.config import read_config
from dynaplan.graph.loading import shipped_graphs
from dynaplan.util.errors import ConfigError, nearest

COMMAND = re.compile(r"#\s*dynaplan serve (?P<graph>[\w.]+:\w+)")
"""The first line of a file that says how it is served."""

SECTION_SLIP = 0.7
"""The similarity from which a section's name counts as a slip of ``Models``."""


def has_models(file: Path, overrides: Sequence[str]) -> bool:
    """Tell whether a file, or the options beside it, describe models that are loaded on request.

    Raises ConfigError for a section that looks like a slip of ``Models``, and for one without a model.
    """
    if file.is_dir() or any(each.startswith(f"--{MODELS}.") for each in overrides) or imported_file(file):
        return True
    sections = read_config(file)
    for name in () if MODELS in sections else sections:
        if nearest(name, [MODELS], cutoff=SECTION_SLIP).startswith("Did"):
            raise ConfigError(f"{file}: there is no section {name!r}", hint=f"Did you mean {MODELS!r}?")
    if MODELS in sections and not sections[MODELS]:
        raise ConfigError(
            f"{file}: {MODELS} names no model", hint=f"Write {MODELS}: {{NAME: {{model: x.gguf}}}}."
        )
    return MODELS in sections


def graph_of_file(file: Path) -> str:
    """Return the graph that a configuration file belongs to: ``module:Class``, or the path of a ``.py`` file.

    Raises ConfigError where neither a module beside it, nor its first line, nor a shipped file tells.
    """
    if file.with_suffix(".py").is_file() and file.parent.resolve() not in _shipped():
        return str(file.with_suffix(".py"))
    for folder in (file.parent, *_shipped()):
        if (folder / file.name).is_file() and (graph := _stated(folder / file.name)):
            return graph
        if folder in _shipped() and (folder / file.name).with_suffix(".py").is_file():
            return f"graphs.{file.stem}:Frontend"
    raise ConfigError(
        f"{file} has no section {MODELS}, and says of no graph that it is its configuration",
        hint=f"Name the graph: `dynaplan serve graphs.agg:Frontend -f {file}`, graphs.disagg:Frontend with "
        "prefill workers, or a module of your own.",
    )


def shipped_file(name: str) -> Path | None:
    """Return the shipped configuration of that name; None where there is none."""
    return next((folder / name for folder in _shipped() if (folder / name).is_file()), None)


def _shipped() -> list[Path]:
    return [folder.resolve() for folder in shipped_graphs()]


def _stated(file: Path) -> str:
    with file.open(encoding="utf-8", errors="replace") as lines:
        found = COMMAND.match(lines.readline())
    return found["graph"] if found else ""
