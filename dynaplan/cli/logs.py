"""``dynaplan logs``: print the logs of the running deployment's processes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import click

from dynaplan.cli.options import namespace_option
from dynaplan.cli.running_deployment import connect
from dynaplan.cli.timing import LOG_POLL_S
from dynaplan.process.log_tail import LogTail
from dynaplan.util.errors import ConfigError, nearest


@click.command(name="logs")
@click.argument("workers", nargs=-1, metavar="[WORKER]...")
@namespace_option
@click.option("-n", "--lines", type=click.IntRange(0), default=50, show_default=True)
@click.option("-f", "--follow", is_flag=True, help="Go on with what is written from now on.")
def command(workers: Sequence[str], namespace: str | None, lines: int, follow: bool) -> None:
    """Print the end of these logs, or of all; etcd, NATS, circus and the fleet plugin have one too."""
    found = connect(namespace)
    paths = [_path(found.log_dir, name) for name in workers] or sorted(found.log_dir.glob("*.log"))
    logs: dict[Path, LogTail] = {}
    try:
        _open(logs, paths)
        for path, log in logs.items():
            if len(paths) > 1:
                click.echo(f"==> {path.stem} <==")
            last = log.last_lines(lines)
            if log.partial_line and not follow:
                last.append(log.partial_line)
            for line in last[-lines:] if lines else ():
                click.echo(line)
        if follow:
            _follow(logs, None if workers else found.log_dir)
    finally:
        for log in logs.values():
            log.close()


def _path(log_dir: Path, name: str) -> Path:
    path = log_dir / f"{name}.log"
    if path.is_file():
        return path
    known = [each.stem for each in log_dir.glob("*.log")]
    raise ConfigError(f"logs {name}: no such log in {log_dir}", hint=nearest(name, known))


def _follow(logs: dict[Path, LogTail], log_dir: Path | None) -> NoReturn:
    """Print new lines of these logs, and of logs that appear in ``log_dir`` if given, until interrupted."""
    while True:
        _open(logs, sorted(log_dir.glob("*.log")) if log_dir else ())
        for path, log in logs.items():
            for line in log.new_lines():
                click.echo(f"{path.stem}: {line}" if len(logs) > 1 else line)
        time.sleep(LOG_POLL_S)


def _open(logs: dict[Path, LogTail], paths: Iterable[Path]) -> None:
    for path in paths:
        if path not in logs:
            with suppress(FileNotFoundError):  # it has been turned over or deleted since it was found
                logs[path] = LogTail(path)
