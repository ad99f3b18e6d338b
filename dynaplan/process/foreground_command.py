"""A command in a session of its own that ends with us, and to which this process's signals are passed.

A shim (``process/shim.py``) leads the session: whatever the command has started is killed when the command
ends, and when this process does, by whatever. So the shim's identity tells others whether anything of the
command may be left. The command has our standard streams, and no controlling terminal: Ctrl-C reaches it from
here.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress

from dynaplan.process import process_table
from dynaplan.process.identity import ProcessIdentity
from dynaplan.process.kernel import adopt_orphans, start_session
from dynaplan.process.shim import END_SIGNAL, PASSED_ON, shim_command

BESIDE_THE_SHIM = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH)
"""Signals that the shim does not pass on: they go to the command itself."""


class ForegroundCommand:
    """A command that is started at once, under a shim (``process/shim.py``), which ends all that it starts.

    Raises OSError where no process can be started. To be made in the main thread: the kernel ends the shim
    with the thread that started it.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        adopt_orphans()  # of a shim that somebody kills
        self._pid = start_session(shim_command(command, os.getpid()), os.getcwd(), environment, (0, 1, 2))
        self.identity: ProcessIdentity = process_table.identity_of(self._pid)

    async def wait(self, kill_after_hangup_s: float) -> int:
        """Wait until the command, and all that it has started, has ended; return its exit code.

        That is 128 plus the signal's number, as in a shell, where a signal has ended it. Signals to this
        process are passed on meanwhile. After a SIGHUP, as when the terminal goes, the command is killed in
        ``kill_after_hangup_s`` seconds, unless this process ignores that signal, as under nohup.
        """
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        descriptor = os.pidfd_open(self._pid)
        numbers = [
            each for each in (*PASSED_ON, *BESIDE_THE_SHIM) if signal.getsignal(each) != signal.SIG_IGN
        ]
        for number in numbers:
            loop.add_signal_handler(number, self.send, number)
        if signal.SIGHUP in numbers:
            loop.add_signal_handler(signal.SIGHUP, self._hang_up, loop, kill_after_hangup_s)
        loop.add_reader(descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
            for number in numbers:
                loop.remove_signal_handler(number)
        return self._code()

    def _code(self) -> int:
        """Reap the shim, kill what it left where somebody killed it, and return the exit code."""
        code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
        for pid in process_table.descendants_of(os.getpid()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        return code if code >= 0 else 128 - code

    def send(self, number: int) -> None:
        """Send the command a signal."""
        pid = process_table.command_under(self._pid) if number in BESIDE_THE_SHIM else self._pid
        with suppress(ProcessLookupError, PermissionError):
            if pid:
                os.kill(pid, number)

    def _hang_up(self, loop: asyncio.AbstractEventLoop, kill_after_s: float) -> None:
        self.send(signal.SIGHUP)
        loop.call_later(kill_after_s, self.kill)

    def kill(self) -> None:
        """Kill the command and all that it has started."""
        with suppress(ProcessLookupError):
            os.kill(self._pid, END_SIGNAL)
