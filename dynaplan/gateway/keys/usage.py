"""What each key had computed: in metrics, and in a file of comma-separated values for each day.

The file, ``usage/2026-11-29.csv`` beside the logs, has a line for each key and model. It is written every few
seconds, anew and in one step, under a lock that the frontends of a deployment share: each adds what it has
counted since. A frontend that is killed loses those seconds.
"""

from __future__ import annotations

import asyncio
import csv
import fcntl
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import date
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from prometheus_client import Counter

from dynaplan.gateway import timing

log = logging.getLogger(__name__)

USAGE_DIRECTORY = "usage"
"""The directory of the files, beside the logs."""

COLUMNS = ("key", "model", "requests", "prompt_tokens", "answer_tokens")


class Amounts(NamedTuple):
    """What a key had of a model."""

    requests: int = 0
    prompt_tokens: int = 0
    answer_tokens: int = 0

    def plus(self, other: Amounts) -> Amounts:
        return Amounts(*(mine + its for mine, its in zip(self, other, strict=True)))


Usage = dict[tuple[str, str], Amounts]
"""By key and model."""


class KeyUsage:
    """What one frontend counts. ``directory`` None: there are no files.

    ``requests`` and ``tokens`` are the metrics, whose first label is the namespace.
    """

    def __init__(
        self,
        namespace: str,
        requests: Counter,
        tokens: Counter,
        directory: Path | None = None,
        today: Callable[[], date] = date.today,
    ) -> None:
        self._namespace = namespace
        self._requests = requests
        self._tokens = tokens
        self._directory = directory
        self._today = today
        self._unwritten: defaultdict[date, Usage] = defaultdict(dict)
        self._is_failing = False

    def add(self, key: str, model: str, amounts: Amounts, status: str) -> None:
        """Count a request that has ended; ``status`` is the metric's: success, error or refused."""
        self._requests.labels(self._namespace, key, model, status).inc()
        if not amounts.requests:
            return
        self._tokens.labels(self._namespace, key, model, "prompt").inc(amounts.prompt_tokens)
        self._tokens.labels(self._namespace, key, model, "answer").inc(amounts.answer_tokens)
        if self._directory:
            of_day = self._unwritten[self._today()]
            of_day[key, model] = of_day.get((key, model), Amounts()).plus(amounts)

    async def run(self) -> None:
        """Write every ``USAGE_INTERVAL_S``, for ever."""
        while True:
            await asyncio.sleep(timing.USAGE_INTERVAL_S)
            await asyncio.to_thread(self.write)

    def write(self) -> None:
        """Add to the files what was counted since; what no file takes is kept for the next time."""
        taken, self._unwritten = self._unwritten, defaultdict(dict)
        for day, usage in taken.items():
            try:
                assert self._directory
                _add_to_file(self._directory / f"{day}.csv", usage)
            except (OSError, ValueError) as error:
                level = logging.DEBUG if self._is_failing else logging.WARNING
                log.log(level, "the usage of keys is not written to %s: %s", self._directory, error)
                self._is_failing = True
                self._unwritten[day] = add_up(usage.items(), self._unwritten[day].items())
                continue
            self._is_failing = False


def read_usage(file: Path) -> Usage:
    """Return what a day's file says; raises OSError, and ValueError for one that is something else."""
    with file.open(newline="") as lines:
        rows = csv.reader(lines)
        if tuple(next(rows, ())) != COLUMNS:
            raise ValueError(f"{file} is no file of usage")
        return {(key, model): Amounts(*map(int, numbers)) for key, model, *numbers in rows}


def usage_text(usage: Usage) -> str:
    """Return the text of a file."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows((*names, *amounts) for names, amounts in sorted(usage.items()))
    return text.getvalue()


def add_up(*parts: Iterable[tuple[tuple[str, str], Amounts]]) -> Usage:
    """Return the sum of what these say."""
    total: Usage = {}
    for names, amounts in (each for part in parts for each in part):
        total[names] = total.get(names, Amounts()).plus(amounts)
    return total


def _add_to_file(file: Path, usage: Usage) -> None:
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(file.parent):
        known = read_usage(file) if file.exists() else {}
        new = file.with_name(f".{file.name}")
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as out:
            out.write(usage_text(add_up(known.items(), usage.items())))
        new.replace(file)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    descriptor = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
