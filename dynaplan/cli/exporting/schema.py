"""``dynaplan export schema``: the JSON schema of a deployment's YAML, for editors."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command(name="schema")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path, dir_okay=False), help="File; else it is printed."
)
def command(output: Path | None) -> None:
    """Write the JSON schema of a deployment's YAML: an editor then knows every key and its values.

    A first line `# yaml-language-server: $schema=dynaplan.schema.json` names it to VS Code and others.
    """
    from dynaplan.cli.exporting.writing import write_text
    from dynaplan.options.schema import config_schema

    write_text(json.dumps(config_schema(), indent=1) + "\n", output)
