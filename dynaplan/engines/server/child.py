"""An engine's server as a child process of the worker, and its end."""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from dynaplan.engines.server.client import ServerClient
from dynaplan.process.kernel import TRACKERS_TIMEOUT_S
from dynaplan.process.logfile import write_bounded
from dynaplan.process.process_table import (
    command_under,
    descendants_of,
    group_members,
    kill_but_self_ending,
)
from dynaplan.process.shim import END_SIGNAL, shim_command
from dynaplan.util.errors import TemporaryError
from dynaplan.util.masking import MASK

log = logging.getLogger(__name__)

SECRET_PREFIXES = (
    "DYNAPLAN_WORKER_TOKEN",
    "DYNAPLAN_API_KEY",
    "DYNAMO_SERVICE_CONFIG",
    "NATS_AUTH_",
    "ETCD_AUTH_",
)
"""Beginnings of environment variables that an engine does not get; the configuration may hold keys."""

MAX_LAST_LINES = 30
"""The number of an engine's last lines that are kept, for the message when it dies."""

MAX_LINE_BYTES = 65536
"""A line without an end is passed on when it is longer than this."""

MAX_READS = 16
"""Reads of an engine's output, of 64 KiB each, before others have their turn; more than a pipe holds."""

KILL_POLL_S = 0.02
"""Seconds between two checks whether a killed group is gone."""

READY_POLL_S = 0.1
"""Seconds between two questions to a starting server whether it is ready."""

SHIM_TIMEOUT_S = TRACKERS_TIMEOUT_S + 1.0
"""Seconds after which a shim that was signalled to end the engine is not waited for any more."""

KILL_TIMEOUT_S = 10.0
"""Seconds that the kernel may take to end killed processes: freeing a GPU's memory takes a while."""


async def run_bounded(command: Sequence[str], seconds: float) -> None:
    """Run a command, its output going to our standard error.

    After so many seconds, or when this is cancelled, it is killed with all that it has started. A failure of
    it is only logged.
    """
    child = EngineChild.spawn(command, {})
    try:
        async with asyncio.timeout(seconds):
            if code := await child.wait():
                log.warning("%s %s", shlex.join(command), describe_exit(code))
    except TimeoutError:
        log.warning("%s has not ended within %g s", shlex.join(command), seconds)
    finally:
        await child.stop(0)


class EngineChild:
    """One engine process and all that it starts, below a shim (``dynaplan.process.shim``).

    The shim leads a process group of their own within the worker's session. It ends all of them, whatever
    group and session they have moved to, when the worker dies, or the thread that spawned it: spawn from the
    main thread. And when the engine ends; then the shim ends like it. The output goes to standard error,
    which is the worker's log. No other process gets the shim's pid before ``stop`` returns.
    """

    def __init__(
        self, process: subprocess.Popen[bytes], pidfd: int, output: int, hidden: bytes = b""
    ) -> None:
        self._process = process
        self._pidfd = pidfd
        self._output = output
        self._hidden = hidden
        self._lines: deque[str] = deque(maxlen=MAX_LAST_LINES)
        self._partial_line = b""
        self._loop = asyncio.get_running_loop()
        self._exit: asyncio.Future[int] = self._loop.create_future()
        self._loop.add_reader(pidfd, self._on_exit)
        self._loop.add_reader(output, self._forward_output)

    @classmethod
    def spawn(
        cls,
        argv: Sequence[str],
        extra: Mapping[str, str],
        pass_descriptors: Sequence[int] = (),
        hidden: str = "",
    ) -> EngineChild:
        """Start it, in our environment without our secrets, plus ``extra``; its standard input is empty.

        ``hidden`` is masked in its output: SGLang begins with its settings, the API key among them.
        """
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith(SECRET_PREFIXES)
        } | dict(extra)
        ours, theirs = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(theirs, True)
        try:
            process = subprocess.Popen(
                shim_command(argv, os.getpid()),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=theirs,
                stderr=theirs,
                process_group=0,
                pass_fds=tuple(pass_descriptors),
            )
        except BaseException:
            os.close(ours)
            raise
        finally:
            os.close(theirs)
        return cls(process, os.pidfd_open(process.pid), ours, hidden.encode())

    @property
    def pid(self) -> int:
        """The shim's pid, which is also the number of the group."""
        return self._process.pid

    @property
    def engine_pid(self) -> int:
        """The engine's pid; 0 when it has ended, or the shim has not started it yet."""
        return command_under(self.pid)

    @property
    def has_exited(self) -> bool:
        """True when the engine has ended, with all that it had started."""
        return self._exit.done()

    async def wait(self) -> int:
        """Wait for its end; returns the engine's exit code, or the negative number of the signal."""
        return await asyncio.shield(self._exit)

    async def wait_for_lost_part(self, marks: Sequence[str]) -> str:
        """Wait until a process that the engine has started has ended; returns its command line.

        Watches only processes whose command line holds one of the texts in ``marks``; without any it never
        returns.
        """
        ended: asyncio.Future[str] = self._loop.create_future()
        watched: list[int] = []
        try:
            engine_pid = self.engine_pid
            for pid, command in _commands(descendants_of(self.pid)):
                if pid == engine_pid or not any(mark in command for mark in marks):
                    continue
                with suppress(ProcessLookupError):
                    watched.append(os.pidfd_open(pid))
                    self._loop.add_reader(watched[-1], _set_result, ended, command)
            return await ended
        finally:
            for descriptor in watched:
                self._loop.remove_reader(descriptor)
                os.close(descriptor)

    def last_lines(self) -> str:
        self._forward_output()
        begun = self._masked(self._partial_line).decode(errors="replace")
        return "\n".join([*self._lines, *([begun] if begun else [])])

    async def stop(self, term_deadline_s: float, command: Sequence[str] = ()) -> None:
        """Send SIGTERM to the engine, or run the command; after so many seconds, or when the engine has
        ended, send SIGKILL to whatever it has started. Return when all of these processes have ended.

        0 s kills at once. Cancelled, it kills at once too, and raises only when they have ended. Calling it
        again, or after the end, does no harm.
        """
        try:
            if not self.has_exited and term_deadline_s > 0:
                ending = asyncio.create_task(run_bounded(command, term_deadline_s)) if command else None
                if ending is None:
                    os.kill(self.pid, signal.SIGTERM)  # Popen.send_signal might reap it
                try:
                    await asyncio.wait({self._exit}, timeout=term_deadline_s)
                finally:
                    if ending:
                        ending.cancel()
                        await asyncio.gather(ending, return_exceptions=True)
                if not self.has_exited:
                    asked = shlex.join(command) if command else "SIGTERM"
                    log.error("the engine did not end within %g s of %s: killing it", term_deadline_s, asked)
        finally:
            self.kill()
            gone = asyncio.create_task(self._wait_until_gone())
            try:
                await asyncio.shield(gone)
            except asyncio.CancelledError:
                await gone
                raise

    def kill(self, *, by_shim: bool = True) -> None:
        """Send SIGKILL to the engine and to all that it has started; never blocks.

        The shim does it, and spares Python's resource trackers: they remove the engine's shared memory and
        then end by themselves. ``by_shim=False`` kills them too, and the shim.
        """
        if self._process.returncode is not None:  # reaped: the number may be another's
            return
        if by_shim and not self.has_exited:
            os.kill(self.pid, END_SIGNAL)
            os.kill(self.pid, signal.SIGCONT)  # somebody may have stopped it, with its engine
            return
        others = descendants_of(self.pid)
        if by_shim and kill_but_self_ending(group_members(self.pid)):
            return
        for pid in others:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    async def _wait_until_gone(self) -> None:
        """Wait for the end of all, then reap the shim: only after that may its number be used again.

        Processes that resist SIGKILL for ``KILL_TIMEOUT_S`` are logged and left.
        """
        if self._process.returncode is not None:
            return
        started_s = time.monotonic()
        while not self.has_exited or group_members(self.pid):
            waited_s = time.monotonic() - started_s
            self.kill(by_shim=waited_s < SHIM_TIMEOUT_S)
            if waited_s > KILL_TIMEOUT_S:
                log.error("processes of the engine's group %d resist SIGKILL", self.pid)
                return
            await asyncio.sleep(KILL_POLL_S)
        self.close()

    def close(self) -> None:
        if self._process.poll() is None or self._pidfd < 0:
            return
        self._forward_output()
        self._write(len(self._partial_line))
        for descriptor in (self._pidfd, self._output):
            self._loop.remove_reader(descriptor)
            os.close(descriptor)
        self._pidfd = self._output = -1

    def _on_exit(self) -> None:
        """Note the shim's end, and leave it a zombie, so that its number is not used again."""
        self._loop.remove_reader(self._pidfd)
        result = os.waitid(os.P_PIDFD, self._pidfd, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if not self._exit.done():
            is_exit = result is not None and result.si_code == os.CLD_EXITED
            status = result.si_status if result is not None else 0
            self._exit.set_result(status if is_exit else -status)

    def _forward_output(self) -> None:
        """Move its output so far, or a part of much, into the log and into the last lines."""
        for _ in range(MAX_READS):
            if self._output < 0:
                return
            try:
                data = os.read(self._output, 65536)
            except BlockingIOError:
                return
            if not data:
                self._loop.remove_reader(self._output)
                return
            self._partial_line += data
            end = 1 + max(self._partial_line.rfind(b"\n"), self._partial_line.rfind(b"\r"))
            self._write(len(self._partial_line) if len(self._partial_line) > MAX_LINE_BYTES else end)

    def _write(self, end: int) -> None:
        """Write the output up to ``end`` to the log: whole lines, so that no secret comes in two parts."""
        text, self._partial_line = self._masked(self._partial_line[:end]), self._partial_line[end:]
        self._lines.extend(text.decode(errors="replace").splitlines())
        write_bounded(text)

    def _masked(self, text: bytes) -> bytes:
        return text.replace(self._hidden, MASK.encode()) if self._hidden else text


async def wait_until_ready(
    child: EngineChild, client: ServerClient, path: str, name: str, timeout_s: float
) -> bool:
    """Wait for a 200 of the child's server at that path; False when the child has ended before.

    Raises TemporaryError with its last lines when neither happens within ``timeout_s``.
    """
    exited = asyncio.create_task(child.wait())
    try:
        async with asyncio.timeout(timeout_s):
            while not exited.done():
                if await client.is_ready(path) and not child.has_exited:
                    return True
                await asyncio.wait({exited}, timeout=READY_POLL_S)
    except TimeoutError:
        message = f"{name} was not ready within {timeout_s:g} s (start-timeout); its last lines:"
        raise TemporaryError(f"{message}\n{child.last_lines()}") from None
    finally:
        exited.cancel()
    return False


def _commands(pids: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Yield the pid and the command line of every process that still exists."""
    for pid in pids:
        with suppress(OSError):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            yield pid, command.replace(b"\0", b" ").decode(errors="replace").strip()


def _set_result(future: asyncio.Future[str], result: str) -> None:
    if not future.done():
        future.set_result(result)


def describe_exit(code: int) -> str:
    """Describe an exit: ``exited with 3``, or ``was killed by SIGKILL``."""
    if code >= 0:
        return f"exited with {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"
