"""``dynaplan logs``: print the logs of the running deployment's processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from dynaplan.cli.options import namespace_option
from dynaplan.cli.running_deployment import connect
from dynaplan.cli.timing import LOG_POLL_S


@click.command(name="logs")
@click.argument("workers", nargs=-1, metavar="[WORKER]...")
@namespace_option
@click.option("-n", "--lines", type=click.IntRange(0), default=50, show_default=True)
@click.option("-f", "--follow", is_flag=True, help="Go on with what is written from now on.")
def command(workers: Sequence[str], namespace: str | None, lines: int, follow: bool) -> None:
    """Print the end of these logs, or of all; etcd, NATS, circus and the fleet plugin have one too."""
    from dynaplan.fleet.deployments import tail

    found = connect(namespace)
    paths = [_path(found.log_dir, name) for name in workers] or sorted(found.log_dir.glob("*.log"))
    for path in paths:
        if len(paths) > 1:
            click.echo(f"==> {path.stem} <==")
        for line in tail(path, lines):
            click.echo(line)
    if follow:
        _follow(paths)


def _path(log_dir: Path, name: str) -> Path:
    from dynaplan.util.errors import ConfigError, nearest

    path = log_dir / f"{name}.log"
    if path.is_file():
        return path
    known = [each.stem for each in log_dir.glob("*.log")]
    raise ConfigError(f"logs {name}: no such log in {log_dir}", hint=nearest(name, known))


def _follow(paths: Sequence[Path]) -> None:
    followed = {path: _Followed(path) for path in paths}
    while True:
        for path, log in followed.items():
            for line in log.new_lines():
                click.echo(f"{path.stem}: {line}" if len(followed) > 1 else line)
        time.sleep(LOG_POLL_S)


class _Followed:
    """Follows one file from its present end on, and its successor after a rotation."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open(errors="replace")
        self._file.seek(0, os.SEEK_END)
        self._rest = ""

    def new_lines(self) -> Iterator[str]:
        """Yield the lines that were completed since the last call."""
        yield from self._read()
        try:
            is_rotated = self._path.stat().st_ino != os.fstat(self._file.fileno()).st_ino
        except FileNotFoundError:
            return
        if is_rotated:
            self._file.close()
            self._file = self._path.open(errors="replace")
            yield from self._read()

    def _read(self) -> Iterator[str]:
        *lines, self._rest = (self._rest + self._file.read()).split("\n")
        yield from lines
