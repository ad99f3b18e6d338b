"""``dynaplan logs``: print the logs of the running deployment's processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

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
    found = connect(namespace)
    paths = [_path(found.log_dir, name) for name in workers] or sorted(found.log_dir.glob("*.log"))
    logs: dict[Path, _LogTail] = {}
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
    from dynaplan.util.errors import ConfigError, nearest

    path = log_dir / f"{name}.log"
    if path.is_file():
        return path
    known = [each.stem for each in log_dir.glob("*.log")]
    raise ConfigError(f"logs {name}: no such log in {log_dir}", hint=nearest(name, known))


def _follow(logs: dict[Path, _LogTail], log_dir: Path | None) -> NoReturn:
    """Print what comes to these logs, and all of those that are new in ``log_dir``, if that is given."""
    while True:
        _open(logs, sorted(log_dir.glob("*.log")) if log_dir else ())
        for path, log in logs.items():
            for line in log.new_lines():
                click.echo(f"{path.stem}: {line}" if len(logs) > 1 else line)
        time.sleep(LOG_POLL_S)


def _open(logs: dict[Path, _LogTail], paths: Iterable[Path]) -> None:
    for path in paths:
        if path not in logs:
            with suppress(FileNotFoundError):  # it has been turned over or deleted since it was found
                logs[path] = _LogTail(path)


class _LogTail:
    """The lines of one log file, and of its successor after a rotation.

    ``partial_line`` is the beginning of a line that was not complete at the last reading.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open(errors="replace")
        self.partial_line = ""

    def close(self) -> None:
        self._file.close()

    def last_lines(self, number: int) -> list[str]:
        """Go to the end of the file, and return that number of complete lines before it, or all."""
        size_bytes = self._file.seek(0, os.SEEK_END)
        window_bytes = 4096 + 400 * number
        while True:
            start_bytes = max(0, size_bytes - window_bytes)
            self._file.seek(start_bytes)
            self.partial_line = ""
            lines = self._read()
            if start_bytes == 0 or len(lines) > number:  # one more: the first may lack its beginning
                return lines[-number:] if number else []
            window_bytes *= 4

    def new_lines(self) -> list[str]:
        """Return the lines that were completed since the last reading, at first from the beginning on."""
        lines = self._read()
        try:
            is_rotated = self._path.stat().st_ino != os.fstat(self._file.fileno()).st_ino
            successor = self._path.open(errors="replace") if is_rotated else None
        except FileNotFoundError:
            return lines
        if successor:
            lines += self._read()
            self._file.close()
            self._file = successor
            lines += self._read()
        return lines

    def _read(self) -> list[str]:
        *lines, self.partial_line = (self.partial_line + self._file.read()).split("\n")
        return lines
