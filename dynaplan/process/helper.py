"""Helper processes: a module of ours in a process of its own, which answers questions over its pipes.

For work that would stall an event loop, take all memory or see secrets (docs/decisions/0025). This is the
side of the process that asks; ``helper_main`` is the helper's. Questions and answers are a JSON object and
bytes each, and belong to the module that runs and the one that asks.

- The first question starts the helper. It leads a process group, and the kernel kills
  it when the asking process ends.
- Answers arrive in the order of the questions; many may be under way.
- A helper that takes longer than ``answer_s`` for the question that is its turn, its start included, is
  killed with its process group: everyone who waits gets ``HelperFailed``. So it is when it ends by itself.
- After an end the next question starts another one, but not before the pause of ``restart_s``. The last pause
  repeats; the first answer begins them anew.
- A helper of which nothing has been asked for ``idle_s`` is ended.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import dynaplan
from dynaplan.process.helper_main import HEAD, pack
from dynaplan.process.subprocesses import kill_with_group, start_process

PASSED_ON = ("PYTHON", "COV")
"""Prefixes of the variables that a helper gets: none of them is a secret, and most need no other."""

PIECE_BYTES = 256 * 1024
"""Bytes that are written at once; other tasks run between two pieces."""

END_S = 1.0
"""Time to end by itself for a helper that has closed its output."""

Answer = tuple[dict[str, Any], bytes]


class HelperFailed(Exception):
    """The helper has ended or was killed, and the question is not answered; the text says what happened."""


class HelperTimeout(HelperFailed):
    """The helper was killed at its limit of time."""


@dataclass(frozen=True)
class HelperLimits:
    """The bounds of a helper: ``answer_s`` and ``answer_bytes`` for one answer, ``memory_bytes`` of address
    space (0: no bound), ``idle_s`` without a question after which it is ended (0: never), and ``restart_s``
    to wait before each further start, the last one repeated.
    """

    answer_s: float
    memory_bytes: int = 0
    idle_s: float = 0.0
    restart_s: Sequence[float] = (0.0,)
    answer_bytes: int = 1 << 24


def helper_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return a helper's whole environment: of ours only the variables of Python and of coverage.py.

    On its PYTHONPATH is this dynaplan, installed or not.
    """
    environment = {name: value for name, value in environ.items() if name.startswith(PASSED_ON)}
    paths = [environment.get("PYTHONPATH", ""), str(Path(dynaplan.__file__).resolve().parents[1])]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment


class HelperProcess:
    """One helper: ``python -m module PARENT_PID MEMORY_BYTES [ARGUMENT]...``. Used by one event loop.

    Start it from the main thread: the kernel ties its end to the thread that started it.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        limits: HelperLimits,
        environment: Mapping[str, str] | None = None,
        stderr: int | None = None,
    ) -> None:
        own = (str(os.getpid()), str(limits.memory_bytes))
        self._command = (sys.executable, "-P", "-m", module, *own, *arguments)
        self._limits = limits
        self._environment = helper_environment() if environment is None else environment
        self._stderr = stderr
        self._process: Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()
        self._waiting: deque[asyncio.Future[Answer]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._failure: HelperFailed | None = None
        self._ends = 0
        self._start_at_s = 0.0
        self._is_closed = False

    @property
    def pid(self) -> int:
        """The helper's pid; 0 while there is none."""
        return self._process.pid if self._process else 0

    @property
    def can_be_asked(self) -> bool:
        """False in the pause before the next start of a helper that has ended, and once closed for good."""
        is_due = asyncio.get_running_loop().time() >= self._start_at_s
        return not self._is_closed and (self._process is not None or is_due)

    async def ask(self, question: Mapping[str, Any], payload: bytes = b"") -> Answer:
        """Return the answer; raises HelperFailed, or HelperTimeout when it took too long.

        Starts the helper if need be. Cancelled before all of the question was written, it kills the helper.
        """
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        async with self._writing:
            process = await self._started()
            self._waiting.append(answer)
            if len(self._waiting) == 1:
                self._set_timer()
            try:
                await _write(process, question, payload)
            except (OSError, RuntimeError):  # the latter on uvloop: it has ended, which fails the answer
                pass
            except BaseException:
                answer.cancel()
                self._kill(HelperFailed("a question was given up"))
                raise
        return await answer

    async def end(self) -> None:
        """Kill the helper and its process group; return when it is gone. The next question starts another."""
        self._kill(HelperFailed("it was ended"))
        if self._reading:
            # Nothing else notes its end: this goes on when the caller is cancelled.
            await asyncio.shield(self._reading)

    async def close(self) -> None:
        self._is_closed = True
        await self.end()
        async with self._writing:  # a question may just have started another one
            await self.end()

    async def _started(self) -> Process:
        """Return the helper, started if need be; one that is being killed is waited for."""
        if self._process is None and self._reading:
            await asyncio.shield(self._reading)
        if not self.can_be_asked:
            raise HelperFailed("its process has ended")
        if self._process is None:
            try:
                self._process = await start_process(
                    *self._command,
                    stdin=PIPE,
                    stdout=PIPE,
                    stderr=self._stderr,
                    env=dict(self._environment),
                )
            except OSError as error:
                self._note_end()
                raise HelperFailed(f"its process cannot be started: {error}") from error
            self._failure = None
            self._reading = asyncio.create_task(self._read(self._process), name="helper")
        return self._process

    async def _read(self, process: Process) -> None:
        """Give each answer to who waits for it, until the helper has ended; then fail the others."""
        try:
            while True:
                document, payload = await _next_answer(process, self._limits.answer_bytes)
                answer = self._waiting.popleft()
                self._ends = 0
                self._set_timer()
                if not answer.done():
                    answer.set_result((document, payload))
        except asyncio.IncompleteReadError:
            pass
        except (OSError, ValueError, IndexError) as error:
            self._kill(HelperFailed(f"its answer cannot be read: {error!r}"))
        finally:
            if self._process is process:
                self._process = None
            code = await _end_of(process)
            self._note_end()
            self._fail_waiting(self._failure or HelperFailed(f"its process ended with {code}"))

    def _set_timer(self) -> None:
        """Set the timer that kills the helper: for the next answer or, without a question, for idling."""
        if self._timer:
            self._timer.cancel()
        loop, limits = asyncio.get_running_loop(), self._limits
        if self._waiting:
            late = HelperTimeout(f"it has not answered for {limits.answer_s:g} s")
            self._timer = loop.call_later(limits.answer_s, self._kill, late)
        elif limits.idle_s:
            self._timer = loop.call_later(limits.idle_s, self._kill, HelperFailed("it was idle"))

    def _kill(self, failure: HelperFailed) -> None:
        # Taken here, not when it is gone: a question that is asked meanwhile is not for this one.
        process, self._process = self._process, None
        if process:
            self._failure = failure
            kill_with_group(process)

    def _note_end(self) -> None:
        pauses_s = self._limits.restart_s
        pause_s = pauses_s[min(self._ends, len(pauses_s) - 1)]
        self._start_at_s = asyncio.get_running_loop().time() + pause_s
        self._ends += 1

    def _fail_waiting(self, failure: HelperFailed) -> None:
        if self._timer:
            self._timer.cancel()
        while self._waiting:
            answer = self._waiting.popleft()
            if not answer.done():
                answer.set_exception(type(failure)(str(failure)))


async def _write(process: Process, question: Mapping[str, Any], payload: bytes) -> None:
    assert process.stdin
    process.stdin.write(pack(question, payload))
    whole = memoryview(payload)
    for begin in range(0, len(payload), PIECE_BYTES):
        process.stdin.write(whole[begin : begin + PIECE_BYTES])
        await process.stdin.drain()


async def _next_answer(process: Process, max_bytes: int) -> Answer:
    assert process.stdout
    lengths = HEAD.unpack(await process.stdout.readexactly(HEAD.size))
    if sum(lengths) > max_bytes:
        raise ValueError(f"an answer of {sum(lengths)} bytes")
    text, payload = [await process.stdout.readexactly(length) for length in lengths]
    return json.loads(text), payload


async def _end_of(process: Process) -> int:
    """Return the exit code of a process that has closed its output; it is killed if it does not exit."""
    with suppress(TimeoutError):
        async with asyncio.timeout(END_S):
            return await process.wait()
    kill_with_group(process)
    return await process.wait()
