"""``dynaplan report``: one masked file for a bug report."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dynaplan.cli.options import namespace_argument
from dynaplan.util.errors import ConfigError, DeploymentError
from dynaplan.util.masking import looks_secret, mask_line, mask_secrets

if TYPE_CHECKING:
    from dynaplan.fleet.deployments import RunningDeployment

DECISIONS = 20
"""The planner's last decisions that are in the report."""

MIN_SECRET_CHARS = 4
"""The length from which on a secret's value is searched for in every line: a shorter one is in any text."""


@click.command(name="report")
@namespace_argument
@click.option("-n", "--lines", type=click.IntRange(0), default=200, show_default=True, help="Of each log.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    help="File.  [default: dynaplan-report-TIME.txt]",
)
def command(namespace: str | None, lines: int, output: Path | None) -> None:
    """Write what a bug report needs into one file: box, versions, configuration, state, decisions, logs.

    Keys, tokens and passwords are masked. Prompts and answers are not in dynaplan's logs; an engine's own
    log may have them if it is configured to: read the file before you send it.
    """
    found, why = _running(namespace)
    path = output or Path(f"dynaplan-report-{datetime.now():%Y%m%d-%H%M%S}.txt")
    secrets = _secrets(found)
    try:
        with os.fdopen(
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8"
        ) as file:
            for line in report(found, why, namespace, lines):
                file.write(masked(line, secrets) + "\n")
    except OSError as error:
        raise ConfigError(
            f"--output {path}: {error.strerror}", hint="Expected a file that you may write, or a new one."
        ) from error
    click.echo(f"{path} is written, {path.stat().st_size / 1000:.0f} kB. Look through it before you send it.")


def _running(namespace: str | None) -> tuple[RunningDeployment | None, str]:
    from dynaplan.fleet.deployments import find_deployment

    try:
        return find_deployment(namespace), ""
    except DeploymentError as error:
        return None, str(error)


def masked(line: str, secrets: Iterable[str]) -> str:
    """Return a line without secrets, and with ``~`` for the home directory, which has a person's name."""
    home = str(Path.home())
    line = mask_line(line, tuple(secrets))
    return line.replace(home, "~") if home != "/" else line


def _secrets(found: RunningDeployment | None) -> list[str]:
    """Return the values of this shell's and the deployment's secrets, the longest first."""
    environment = dict(os.environ)
    if found:
        try:
            environment |= found.environment()
        except DeploymentError:
            pass  # another user's: its tokens are not readable, and so not in what is read here
    values = {value for name, value in environment.items() if looks_secret(name)}
    return sorted((value for value in values if len(value) >= MIN_SECRET_CHARS), key=len, reverse=True)


def report(
    found: RunningDeployment | None, why_none: str, namespace: str | None, lines: int
) -> Iterator[str]:
    """Yield the lines of the report; a part that cannot be had is named, and keeps none of the others."""
    yield f"dynaplan report of {datetime.now().astimezone().isoformat(timespec='seconds')}"
    parts: list[tuple[str, Callable[[], Iterable[str]]]] = [
        ("the box (dynaplan doctor)", _box),
        ("packages", _packages),
        ("environment", _environment),
    ]
    if found:
        parts += [
            ("state (dynaplan status --json)", lambda: _status(found)),
            ("statefile", lambda: _json(mask_secrets(found.document))),
            ("decisions (dynaplan why)", lambda: _decisions(found)),
        ]
    for title, part in parts:
        yield from _part(title, part)
    if found is None:
        yield from _part("deployment", lambda: why_none.splitlines())
    for path in _logs(found, namespace):
        yield from _part(f"the last {lines} lines of {path}", partial(_tail, path, lines))


def _part(title: str, lines: Callable[[], Iterable[str]]) -> Iterator[str]:
    yield from ("", f"== {title} ==")
    try:
        yield from lines()
    except Exception as error:
        yield f"(cannot be had: {type(error).__name__}: {error})"


def _box() -> Iterable[str]:
    from dynaplan.cli.doctor import findings, page

    return click.unstyle(page(tuple(findings()), 0)).splitlines()


def _packages() -> Iterable[str]:
    """Return all that is installed: an engine's fault is often that of a package below it."""
    return sorted({f"{each.name} {each.version}" for each in metadata.distributions()}, key=str.lower)


def _environment() -> Iterator[str]:
    from dynaplan.cluster.systemd import EXPORTED_VARIABLES

    for name, value in sorted(os.environ.items()):
        if EXPORTED_VARIABLES.fullmatch(name):
            yield f"{name}={mask_secrets({name: value})[name]}"


def _status(found: RunningDeployment) -> Iterable[str]:
    from dynaplan.cli.deployment import connected
    from dynaplan.cli.status_document import StatusReader, deployment_document

    async def gathered() -> dict[str, Any]:
        reader = StatusReader(found.namespace)
        try:
            return deployment_document(found, await reader.read(), {})
        finally:
            await reader.close()

    with connected(found):
        return _json(mask_secrets(asyncio.run(gathered())))


def _decisions(found: RunningDeployment) -> Iterable[str]:
    from dynaplan.planner.recorders.decision_log import all_recent_records
    from dynaplan.planner.rules.explain import explain

    records = all_recent_records(found.log_dir / "planner", DECISIONS)
    return [line for record in records for line in (*explain(record).splitlines(), "")] or ["none yet"]


def _logs(found: RunningDeployment | None, namespace: str | None) -> list[Path]:
    """Return the logs of the deployment; without one, of the one that ran last."""
    from dynaplan.fleet.preparation import log_directory

    directory = found.log_dir if found else log_directory(namespace or "dynamo")
    return sorted(directory.glob("*.log"))


def _tail(path: Path, lines: int) -> Iterable[str]:
    from dynaplan.fleet.deployments import tail

    return tail(path, lines)


def _json(document: Any) -> Iterable[str]:
    return json.dumps(document, indent=1, default=str).splitlines()
