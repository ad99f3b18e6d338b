"""What each key had computed: in metrics, and in a file of comma-separated values for each day.

Requests are counted in plain numbers, which go to both when the metrics are rendered, or a file is written.
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
from collections import Counter as Counts
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from prometheus_client import Counter

from dynaplan.gateway import timing

log = logging.getLogger(__name__)

USAGE_DIRECTORY = "usage"
"""The directory of the files, beside the logs."""

REFUSED = "refused"
"""The ``status`` of a request that was not accepted; others are ``success`` and ``error``."""

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


@dataclass(slots=True)
class _Unwritten:
    """What was counted of a key and a model since the last writing; ``requests`` by their status."""

    requests: Counts[str] = field(default_factory=Counts)
    prompt_tokens: int = 0
    answer_tokens: int = 0


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
        self._unwritten: dict[tuple[str, str], _Unwritten] = {}
        self._day = today()
        self._days: defaultdict[date, Usage] = defaultdict(dict)
        self._is_failing = False

    def add(self, key: str, model: str, status: str, prompt_tokens: int = 0, answer_tokens: int = 0) -> None:
        """Count a request that has ended."""
        if (today := self._today()) != self._day:
            self.write()
            self._day = today
        found = self._unwritten.get((key, model))
        if found is None:
            found = self._unwritten[key, model] = _Unwritten()
        found.requests[status] += 1
        found.prompt_tokens += prompt_tokens
        found.answer_tokens += answer_tokens

    def write(self) -> None:
        """Add what was counted to the metrics, and to what is to be written of its day."""
        unwritten, self._unwritten = self._unwritten, {}
        for (key, model), counted in unwritten.items():
            of_model = self._namespace, key, model
            for status, number in counted.requests.items():
                self._requests.labels(*of_model, status).inc(number)
            answered = counted.requests.total() - counted.requests[REFUSED]
            if not answered:
                continue
            self._tokens.labels(*of_model, "prompt").inc(counted.prompt_tokens)
            self._tokens.labels(*of_model, "answer").inc(counted.answer_tokens)
            if self._directory:
                amounts = Amounts(answered, counted.prompt_tokens, counted.answer_tokens)
                of_day = self._days[self._day]
                of_day[key, model] = of_day.get((key, model), Amounts()).plus(amounts)

    async def run(self) -> None:
        """Write the files every ``USAGE_INTERVAL_S``, for ever."""
        while True:
            await asyncio.sleep(timing.USAGE_INTERVAL_S)
            self._keep(await asyncio.to_thread(self._add_to_files, self._take()))

    def write_files(self) -> None:
        """Add to the files what was counted since; what no file takes is kept for the next time."""
        self._keep(self._add_to_files(self._take()))

    def _take(self) -> Mapping[date, Usage]:
        self.write()
        taken, self._days = self._days, defaultdict(dict)
        return taken

    def _keep(self, untaken: Mapping[date, Usage]) -> None:
        for day, usage in untaken.items():
            self._days[day] = add_up(usage.items(), self._days[day].items())

    def _add_to_files(self, taken: Mapping[date, Usage]) -> Mapping[date, Usage]:
        """Return what no file took."""
        untaken = {}
        for day, usage in taken.items():
            try:
                assert self._directory
                _add_to_file(self._directory / f"{day}.csv", usage)
            except (OSError, ValueError) as error:
                level = logging.DEBUG if self._is_failing else logging.WARNING
                log.log(level, "the usage of keys is not written to %s: %s", self._directory, error)
                untaken[day] = usage
        self._is_failing = bool(untaken)
        return untaken


def read_usage(file: Path) -> Usage:
    """Return what a day's file says, without lines that are none of usage.

    Raises OSError, and ValueError for a file that is something else.
    """
    with file.open(newline="") as lines:
        rows = csv.reader(lines)
        try:
            if tuple(next(rows, ())) == COLUMNS:
                return add_up(_amounts_in(rows, file))
        except csv.Error as error:
            raise ValueError(f"{file} is no file of usage: {error}") from None
        raise ValueError(f"{file} is no file of usage")


def _amounts_in(rows: Iterable[list[str]], file: Path) -> Iterator[tuple[tuple[str, str], Amounts]]:
    for row in rows:
        try:
            key, model, requests, prompt_tokens, answer_tokens = row
            yield (key, model), Amounts(int(requests), int(prompt_tokens), int(answer_tokens))
        except ValueError:
            log.warning("%s: left out, for it is no line of usage: %s", file, ",".join(row))


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
