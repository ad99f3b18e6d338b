"""Record the frontend's traffic as a trace for ``dynaplan simulate``: lengths and times, no text.

Every frontend of a deployment appends to the same file, and one that is started again continues it. The
first line states the moment that arrivals are counted from (``began_unix_s``). When the file is moved away,
the next write begins a new one.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import json
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from dynaplan.contract.traced_requests import TracedRequest
from dynaplan.gateway import timing
from dynaplan.gateway.openai_api import PromptBlocks
from dynaplan.util.errors import ConfigError

log = logging.getLogger(__name__)


LINES_AT_ONCE = 64
"""Lines encoded between two writes. A write lets other threads run, so encoding does not delay tokens."""

MAX_WAITING_REQUESTS = 50_000
"""Requests kept while the disk takes none; further ones are lost."""

HASH_BITS = 40
"""Bits kept of a block's hash: a million blocks stay distinct, and lines become half as long."""

_ZERO = re.compile(rb'\{"began_unix_s":(\d+(?:\.\d+)?),')
_READ_AT_ONCE = 65_536


class TrafficRecording:
    """Appends a line for each request that ended with an answer, or with a part of one.

    ``now_s`` is the clock of their arrivals. The constructor raises ConfigError when the file cannot be
    written or is not a recording. Later errors lose lines, are logged once, and never reach a request.
    """

    def __init__(self, path: Path, now_s: Callable[[], float]) -> None:
        self._path = Path(os.path.expanduser(path))
        self._clock_zero_unix_s = time.time() - now_s()
        self._secret = secrets.randbits(64)
        self._waiting: list[TracedRequest] = []
        self._has_waiting = asyncio.Event()
        self._one_writer = asyncio.Lock()
        self._is_failing = False
        try:
            os.close(self._open())
        except OSError as error:
            raise ConfigError(
                f"Frontend.record-traffic: {str(path)!r}: {error.strerror or error}",
                hint="Expected a file in a directory that exists: a new one, or a recording to continue.",
            ) from None

    def add(self, begun_s: float, prompt_tokens: int, output_tokens: int, blocks: PromptBlocks) -> None:
        """Record a request that began at that time of ``now_s`` and has ended with these lengths."""
        if len(self._waiting) >= MAX_WAITING_REQUESTS:
            return
        # The blocks were cut by an estimate of the prompt's tokens: keep only those that it really fills.
        full = prompt_tokens // blocks.tokens if blocks.tokens else 0
        self._waiting.append(
            TracedRequest(begun_s, prompt_tokens, output_tokens, blocks.hashes[:full], blocks.tokens)
        )
        self._has_waiting.set()

    async def run(self) -> None:
        """Write the gathered requests every ``RECORDING_INTERVAL_S``, for ever."""
        while True:
            await self._has_waiting.wait()
            await asyncio.sleep(timing.RECORDING_INTERVAL_S)
            await self.write()

    async def write(self) -> None:
        """Append the requests that were gathered since the last call, in a thread."""
        async with self._one_writer:
            requests, self._waiting = self._waiting, []
            self._has_waiting.clear()
            if requests:
                await asyncio.to_thread(self._append, requests)

    def _append(self, requests: list[TracedRequest]) -> None:
        try:
            self._append_lines(requests)
        except Exception as error:  # a recording that fails must not end the frontend
            level = logging.DEBUG if self._is_failing else logging.WARNING
            log.log(level, "traffic is not recorded in %s: %s", self._path, error)
            self._is_failing = True
            return
        if self._is_failing:
            log.info("traffic is recorded in %s again", self._path)
        self._is_failing = False

    def _append_lines(self, requests: list[TracedRequest]) -> None:
        descriptor = self._open()
        try:
            end = _truncate_to_whole_lines(descriptor)
            zero_unix_s = _read_zero(descriptor) if end else None
            for lines in self._lines(requests, zero_unix_s):
                try:
                    _write_all(descriptor, lines)
                except OSError:
                    os.ftruncate(descriptor, end)
                    raise
                end += len(lines)
        finally:
            os.close(descriptor)

    def _open(self) -> int:
        """Open the file, make it if needed, and lock it until it is closed."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        descriptor = os.open(self._path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            state = os.fstat(descriptor)
            if not stat.S_ISREG(state.st_mode):
                raise OSError(errno.EINVAL, "it is no file")
            if state.st_size:
                _read_zero(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _lines(self, requests: list[TracedRequest], zero_unix_s: float | None) -> Iterator[bytes]:
        head: dict[str, float] = {}
        if zero_unix_s is None:
            zero_unix_s = round(self._clock_zero_unix_s + min(each.arrival_s for each in requests), 3)
            head = {"began_unix_s": zero_unix_s}
        shift_s = self._clock_zero_unix_s - zero_unix_s
        waiting = iter(requests)
        while some := list(islice(waiting, LINES_AT_ONCE)):
            lines = []
            for each in some:
                lines.append(_ENCODE(head | self._anonymize(each, shift_s).to_json()))
                head = {}
            yield "".join(f"{line}\n" for line in lines).encode()

    def _anonymize(self, request: TracedRequest, shift_s: float) -> TracedRequest:
        """Return the request as it is written: arrival from the file's zero, hashes mixed with a secret.

        Without the secret, a reader of the file could test whether a guessed prompt was among the requests.
        """
        secret, mask = self._secret, (1 << HASH_BITS) - 1
        return request._replace(
            arrival_s=round(request.arrival_s + shift_s, 3) + 0.0,  # a negative zero becomes a zero
            block_hashes=tuple(hash((secret, each)) & mask for each in request.block_hashes),
        )


_ENCODE = json.JSONEncoder(separators=(",", ":")).encode


def _read_zero(descriptor: int) -> float:
    """Read the time that the file's arrivals are counted from; OSError when it is not a recording."""
    found = _ZERO.match(os.pread(descriptor, 64, 0))
    if not found:
        raise OSError(errno.EINVAL, "it is not a recording of a frontend")
    return float(found[1])


def _truncate_to_whole_lines(descriptor: int) -> int:
    """Cut off the incomplete last line of a writer that was killed; return the file's new length in bytes."""
    size = end = os.fstat(descriptor).st_size
    while end and os.pread(descriptor, 1, end - 1) != b"\n":
        begin = max(0, end - _READ_AT_ONCE)
        end = begin + os.pread(descriptor, end - begin, begin).rfind(b"\n") + 1
    if end < size:
        os.ftruncate(descriptor, end)
    return end


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
