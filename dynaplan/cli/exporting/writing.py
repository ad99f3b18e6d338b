"""Exported texts, printed or written into files: manifests into one for each object."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
import yaml

from dynaplan.core.manifests.exported import Document
from dynaplan.domain.errors import ConfigError


class ManifestDumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks, which people can read, and each object without references."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write an object out wherever it stands: kubectl reads references, people lose their way."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


ManifestDumper.add_representer(str, _text)


def yaml_of(documents: Iterable[Document]) -> str:
    """Return the documents as one YAML text."""
    return yaml.dump_all(documents, Dumper=ManifestDumper, sort_keys=False, allow_unicode=True, width=110)


def print_documents(documents: Sequence[Document]) -> None:
    """Print the documents, and on standard error that a secret is among them."""
    click.echo(yaml_of(documents), nl=False)
    click.echo("The Secret among them holds the workers' token: keep it to yourself.", err=True)


def write_documents(documents: Sequence[Document], directory: Path) -> None:
    """Write a file of each object, readable by this user alone; raises ConfigError where that fails."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for each in documents:
            path = directory / f"{each['kind'].lower()}-{each['metadata']['name']}.yaml"
            path.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with os.fdopen(os.open(path, flags, 0o600), "w", encoding="utf-8") as file:
                file.write(yaml_of([each]))
    except OSError as error:
        raise ConfigError(
            f"--output {directory}: {error.strerror}", hint="Expected a directory of yours, or a new one."
        ) from error
    click.echo(f"{len(documents)} objects are in {directory}: kubectl apply -f {directory}")


def write_text(text: str, path: Path | None) -> None:
    """Print the text, or write it into that file; raises ConfigError where that fails."""
    if path is None:
        click.echo(text, nl=False)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"--output {path}: {error.strerror}", hint="Expected a file that you may write, or a new one."
        ) from error
    click.echo(f"{path} is written.", err=True)
