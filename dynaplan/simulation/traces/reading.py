"""Traces, read one request at a time: files of any length in constant memory, at a multiple of their rate."""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush, merge
from io import TextIOWrapper
from itertools import chain
from pathlib import Path
from typing import BinaryIO, cast

from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.simulation.traces.formats import FORMATS, BadLine, NumberedRequests, TraceFormat
from dynaplan.simulation.traces.synthetic import is_synthetic, synthetic
from dynaplan.util.errors import ConfigError
from dynaplan.util.splitmix import UniformDraws

SPREAD_S = 5.0
"""Seconds over which the copies of a request are spread: they stand for other users, not for one user's
burst."""


def scale_rate(
    trace: Iterable[TracedRequest], rate_scale: float, *, seed: int = 1
) -> Iterator[TracedRequest]:
    """Return the trace with ``rate_scale`` times the requests, over the same time.

    The load rises and falls as fast as before, as with that many times the users. Each request comes
    ``rate_scale`` times on average: the first one as it was, the others up to ``SPREAD_S`` later and with
    prefixes of their own, so that they hit each other's cache no more than strangers do. A scale below 1
    leaves requests out. 1 changes nothing. Deterministic under the seed.
    """
    if not (math.isfinite(rate_scale) and rate_scale > 0):
        raise ConfigError(f"rate-scale: {rate_scale!r}", hint="Expected a number, more than 0.")
    return iter(trace) if rate_scale == 1 else _copy_requests(trace, rate_scale, UniformDraws(seed))


def _copy_requests(
    trace: Iterable[TracedRequest], rate_scale: float, draws: Iterator[float]
) -> Iterator[TracedRequest]:
    whole, part = divmod(rate_scale, 1.0)
    users = math.ceil(rate_scale)
    waiting: list[tuple[float, int, TracedRequest]] = []
    number = 0
    for request in trace:
        while waiting and waiting[0][0] <= request.arrival_s:
            yield heappop(waiting)[2]
        copies = int(whole) + (next(draws) < part if part else 0)
        for user in range(copies):
            arrival_s = request.arrival_s + (SPREAD_S * next(draws) if user else 0.0)
            hashes = tuple(block * users + user for block in request.block_hashes)
            number += 1
            copy = request._replace(arrival_s=arrival_s, block_hashes=hashes)
            heappush(waiting, (arrival_s, number, copy))
    while waiting:
        yield heappop(waiting)[2]


GZIP_MAGIC = b"\x1f\x8b"
"""The first two bytes of every gzip file (RFC 1952)."""
MAX_FIRST_LINE_CHARACTERS = 1 << 20
"""The characters of a first line that are read to tell the format: a file without line ends is no trace."""

REORDERED_REQUESTS = 65_536
"""The number of requests by which a line may stand too late in the file.

A recording is written as requests end: at 100 a second, an answer of ten minutes is not too long. In memory
65,536 requests are some 10 MiB.
"""

REORDERED_BLOCKS = 1 << 22
"""The number of blocks of prompts by which a line may stand too late: less than 200 MB of hashes in
memory."""


SHARDS = ("*.jsonl", "*.jsonl.gz", "*.json", "*.json.gz", "*.csv", "*.csv.gz")
"""The files of a directory that are taken to be its trace."""


def read_requests(trace: str, rate_scale: float, seed: int) -> Iterator[TracedRequest]:
    """Yield the requests of a trace file, a directory of them, or made-up load, at ``rate_scale`` times their
    rate."""
    requests = synthetic(trace, seed) if is_synthetic(trace) else read_trace(Path(trace))
    return scale_rate(requests, rate_scale, seed=seed)


def read_trace(path: Path) -> Iterator[TracedRequest]:
    """Yield the requests of a trace in the order in which they arrived; the first arrives at 0 s.

    A trace is a file, or a directory of files that count from the same moment (``SHARDS``): Azure CSV,
    Mooncake JSON lines, Dynamo's request traces or our own recordings, plain or gzip; the content shows
    which. Rows that are out of order are put in order, within ``REORDERED_REQUESTS``. Raises ConfigError
    naming the file, the line and what was expected, as soon as the reading comes to it.
    """
    began_s: float | None = None
    shards = _shards(path) if path.is_dir() else [path]
    for request in merge(*map(_requests, shards), key=lambda each: each.arrival_s):
        began_s = request.arrival_s if began_s is None else began_s
        arrival_s = round(request.arrival_s - began_s, 6)
        if arrival_s != request.arrival_s:
            request = TracedRequest(arrival_s, *request[1:])
        yield request


def _shards(directory: Path) -> list[Path]:
    found = sorted({file for pattern in SHARDS for file in directory.glob(pattern) if file.is_file()})
    if not found:
        raise ConfigError(
            f"{directory} holds no trace", hint=f"Expected files of these names: {', '.join(SHARDS)}."
        )
    return found


def _requests(path: Path) -> Iterator[TracedRequest]:
    """Yield the requests of one file in order, their arrivals as the file counts them."""
    is_empty = True
    with _open(path) as file:
        first = file.readline(MAX_FIRST_LINE_CHARACTERS)
        kind = _format_of(path, first)
        for request in _in_order(path, kind, kind.read(chain([first], file))):
            is_empty = False
            yield request
    if is_empty:
        raise ConfigError(f"{path} holds no request", hint=f"Expected {kind.name} with {kind.expected}.")


@contextmanager
def _open(path: Path) -> Iterator[TextIOWrapper]:
    """Open the file as text, gzip or not; raise ConfigError for whatever is wrong with reading it."""
    try:
        with path.open("rb") as raw:
            is_gzip = raw.read(2) == GZIP_MAGIC
            raw.seek(0)
            binary = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if is_gzip else raw
            with TextIOWrapper(binary, encoding="utf-8-sig", newline="") as file:
                yield file
    except FileNotFoundError:
        raise ConfigError(
            f"there is no trace {path}",
            hint="Expected a file, a directory, or made-up load: sinusoid:low=5,high=20.",
        ) from None
    except (OSError, EOFError, zlib.error, UnicodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"cannot read the trace {path}: {reason}", hint=_known_formats()) from error


def _format_of(path: Path, first_line: str) -> TraceFormat:
    for known in FORMATS:
        if known.is_first_line(first_line):
            return known
    if not first_line:
        raise ConfigError(f"{path} is empty", hint=_known_formats())
    shown = first_line.strip()[:80]
    raise ConfigError(f"{path}, line 1: {shown!r} begins no known trace", hint=_known_formats())


def _known_formats() -> str:
    return "Expected " + "; or ".join(f"{known.name}: {known.expected}" for known in FORMATS) + "."


def _in_order(path: Path, kind: TraceFormat, rows: NumberedRequests) -> Iterator[TracedRequest]:
    """Sort by arrival, equal arrivals by line; raise ConfigError for a request that stands too late."""
    waiting: list[tuple[float, int, TracedRequest]] = []
    passed_s, blocks = float("-inf"), 0
    for number, request in _with_places(path, kind, rows):
        if request.arrival_s < passed_s:
            raise ConfigError(
                f"{path}, line {number}: arrived {passed_s - request.arrival_s:g} s before requests that "
                "stand too far above it",
                hint="Expected the lines in the order of arrival, or nearly so: sort the file.",
            )
        heappush(waiting, (request.arrival_s, number, request))
        blocks += len(request.block_hashes)
        while len(waiting) > REORDERED_REQUESTS or blocks > REORDERED_BLOCKS:
            passed_s, _, earliest = heappop(waiting)
            blocks -= len(earliest.block_hashes)
            yield earliest
    waiting.sort()  # much faster than popping one by one, and mostly in order already
    for _, _, request in waiting:
        yield request


def _with_places(path: Path, kind: TraceFormat, rows: NumberedRequests) -> NumberedRequests:
    try:
        yield from rows
    except BadLine as error:
        raise ConfigError(
            f"{path}, line {error.number}: {error}", hint=f"Expected {kind.name} with {kind.expected}."
        ) from None
