"""The supervisor: one small process above a program, which is the parent of everything that the program
starts.

Linux only. ``supervisor_link.fork_under_supervisor`` forks the program off and becomes a Python that calls
``main`` with the words ``PROGRAM_PID SOCKET GRACE_S DRAIN_S -- COMMAND [ARG]...``. The pid stays, so the
process that has started the program waits for the supervisor. A program that a signal has killed is started
again, as COMMAND, and finds at its end of a socket what it had started and what it had given to keep.

- The program exits: the supervisor ends what is left, and ends with the same code.
- SIGINT and SIGTERM are passed on. SIGHUP does nothing. A program that does not act on them is killed: one
  that is stopped (SIGSTOP) at once, one that runs UNRESPONSIVE_S seconds after its deadline, which is DRAIN_S
  seconds after the first signal, and the moment of the second. The third signal kills it in any case. Then
  everything ends as without a program.
- A program that has not come back for GRACE_S seconds, or was killed after a signal to end: the supervisor
  ends everything in order, in DRAIN_S seconds at most, and removes the files that it was given.
- The supervisor is killed: its children end by the parent-death signals that they have asked for. The files
  stay until the next start of the program.

It may run for months, and its files may be gone by then, as after an upgrade: nothing is imported any more
when it ends.

Messages are marshalled tuples, one a packet; file descriptors travel beside them. The program asks, and is
answered at once:

- ``("spawn", name, stage)``, with four descriptors: a file with the marshalled ``(argv, cwd, environment)``,
  and the standard streams. Answer ``("pid", pid)``, or ``("error", errno)``.
- ``("keep", name)`` with a descriptor, ``("drop", name)``, ``("remove", paths)``: answer ``("ok",)``. A path
  with a slash at its end is a directory that goes if it is empty. A third part of the message, if there is
  one, has pairs: a file, and a text that it must hold to be removed.
- ``("hello",)``: answer ``("held", [(name, pid), ...], [kept name, ...], seconds without a program)``, with
  the kept descriptors. Before it comes what has ended since a program was here.
- ``("here", path, heartbeat, seconds)``, when all is as before: answer ``("ok",)``. The program writes into
  the file ``heartbeat`` from now on, and is killed when it has not for so many seconds. Where a program that
  was killed (SIGKILL) has left the file ``path``, its words, each but the last with a NUL behind it, are the
  command to start in its place. It is on trial until it says that it is here: when it ends before, or takes
  TRIAL_S seconds, the command of before is started again.
- ``("fork server",)``, with a file that describes one: workers are forked from now on, as
  ``fork_server.py`` says, until another program is started; answer ``("ok",)``.

and gets ``("ended", pid, wait status)``. A pid stays the ended process's until the program says
``("noted", pid)``, which is not answered. Processes of an earlier ``stage`` are ended first; those of the
stage PROGRAM_STAGE end with each program.
"""

from __future__ import annotations

# Not ``signal`` nor ``subprocess``: they would double a process that only waits. Nor ``typing``.
import _signal  # type: ignore[import-not-found]
import _socket
import os
import select
import time

from dynaplan.process.fork_server import ForkServer
from dynaplan.process.kernel import (
    command_line,
    descendants,
    is_resource_tracker,
    is_stopped,
    parents,
    shim_arguments,
    start_session,
)
from dynaplan.process.packets import PacketSocket, read_marshalled
from dynaplan.process.program_life import OVER, ProgramLife
from dynaplan.util.terminal import try_write_line

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from typing import Any

RESERVED_S = 2.0
"""Time before the deadline at which the next stage is signalled to end; as in ``fleet/shutdown.py``."""

UNRESPONSIVE_S = 10.0
"""Time beyond its deadline that a program may take to end after a signal."""

DRAIN_POLL_S = 0.02
AFTER_KILL_S, SPARED_S = 5.0, 3.0
"""Time to wait for killed processes, and the first part of it, in which those are spared that clean up."""

FIRST_WAIT_S, LONGEST_WAIT_S = 0.001, 0.02
"""Time between two checks of processes that were killed."""

DRAINED_STAGES = (0, 1)
"""The stages whose processes get SIGTERM; those of later ones are killed when the others are gone."""

EXIT_FORCED = 130
"""The exit code after a second signal to end; as in ``fleet/serve.py``."""

PROGRAM_STAGE = -1
"""The stage of processes that are killed whenever the program has ended."""

STOP_SIGNALS = (_signal.SIGINT, _signal.SIGTERM)
AWAITED = (*STOP_SIGNALS, _signal.SIGHUP, _signal.SIGCHLD)
"""Blocked when this script begins."""

MAX_MARKED_BYTES = 4096
"""The beginning of a file in which its text must stand."""

LINK = 3
"""The descriptor at which a program that is started again finds its link."""

SUPERVISOR_VARIABLE = "DYNAPLAN_HOLDER"
"""The variable of a program that is started again: the number of a descriptor, a colon, the supervisor's pid;
and ``:trial`` for one that takes the place of another."""


class Supervisor:
    """Holds a program's processes, and starts the program again when it was killed."""

    def __init__(
        self, command: Sequence[str], program: int, descriptor: int, grace_s: float, drain_s: float
    ) -> None:
        self._life = ProgramLife(command, grace_s, time.monotonic())
        self._next_path = self._beat_path = ""
        self._program = program
        self._grace_s = grace_s
        self._drain_s = drain_s
        self._poll = select.poll()
        self._link: PacketSocket | None = None
        self._connect(descriptor)
        self._held: dict[int, tuple[str, int]] = {}
        self._ended: dict[int, int] = {}
        self._ended_while_away: dict[int, int] = {}
        self._kept: dict[str, int] = {}
        self._paths: Sequence[str] = ()
        self._marked: Sequence[tuple[str, str]] = ()
        self._fork_server: ForkServer | None = None
        self._stop_signals: list[int] = []
        self._stop_by_s = 0.0
        self._signals: list[int] = []
        self._wake, wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll.register(self._wake, select.POLLIN)
        for number in AWAITED:
            _signal.signal(number, lambda number, _: self._signals.append(number))
        _signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
        _signal.pthread_sigmask(_signal.SIG_UNBLOCK, AWAITED)
        self._signals.append(_signal.SIGCHLD)  # one that came before

    def run(self) -> int:
        """Hold until the program has ended; return its wait status."""
        life = self._life
        while True:
            self._wait(self._due_s())
            status = self._handle_events()
            # The exit first: each question below is about the state that it leads to.
            if status is not None:
                self._record_exit(status)
                if life.state == OVER:
                    self._end_all()
                    return status
            if life.is_awaited and self._is_grace_over():
                return self._end_in_order(status or _signal.SIGKILL)
            if self._is_unresponsive():
                try_write_line("serve does not end: it is killed, and everything ends.")
                return self._end_in_order(_signal.SIGKILL)
            now_s = time.monotonic()
            if not self._stop_signals and life.is_still(now_s, self._read_beat):
                try_write_line("serve stands still: it is killed.")
                os.kill(self._program, _signal.SIGKILL)
            if self._program == 0 and now_s >= life.start_at_s:
                self._start_program()
            if life.is_on_trial and self._program and now_s >= life.trial_ends_s:
                os.kill(self._program, _signal.SIGKILL)

    # -- the program ------------------------------------------------------------------------------

    def _is_unresponsive(self) -> bool:
        """Tell whether a program that was told to end has to be killed.

        It is stopped by a signal, or out of time, or has been told more than twice.
        """
        if not self._stop_signals or not self._program:
            return False
        is_late = time.monotonic() >= self._stop_by_s
        return is_late or len(self._stop_signals) > 2 or is_stopped(self._program)

    def _read_beat(self) -> int:
        """Return when the program has last written its heartbeat, in ns; 0 where that is not known."""
        try:
            return os.stat(self._beat_path).st_mtime_ns
        except OSError:
            return 0

    def _is_grace_over(self) -> bool:
        """Tell whether everything is to end without the program, and say so when it did not come back."""
        if self._stop_signals:
            return True
        if not self._life.is_grace_over(time.monotonic()):
            return False
        try_write_line(f"serve has not come back within {self._grace_s:g} s: everything ends.")
        return True

    def _record_exit(self, status: int) -> None:
        """Record the program's exit, and say what follows."""
        life, was_on_trial = self._life, self._life.is_on_trial
        self._program = 0
        self._disconnect()
        for pid in self._in_stage(PROGRAM_STAGE):
            os.kill(pid, _signal.SIGKILL)
        is_exit = os.WIFEXITED(status)
        is_meant = is_exit or os.WTERMSIG(status) in STOP_SIGNALS
        # An upgrade writes the file and kills the program for it; any other end finds no use for the file.
        successor = self._successor() if status == _signal.SIGKILL else []
        life.ended(time.monotonic(), is_meant=is_meant, successor=successor)
        if life.is_on_trial or was_on_trial:
            self._end_fork_server()  # it is of the same version as the program
        if life.state == OVER or self._stop_signals:
            return
        code = f"ended with code {os.WEXITSTATUS(status)}" if is_exit else ""
        how = code or f"died of signal {os.WTERMSIG(status)}"
        if life.is_on_trial:
            try_write_line("Another serve takes over; what this one has started goes on.")
        elif was_on_trial:
            try_write_line("The other serve did not come up: the one before starts again.")
        else:
            try_write_line(f"serve {how}; it starts again, and what it has started goes on.")

    def _successor(self) -> list[str]:
        """Take the command that is to be started in the place of the program; empty when there is none."""
        try:
            with open(self._next_path, "rb") as file:
                words = file.read().split(b"\0")
            os.unlink(self._next_path)
        except OSError:
            return []
        return [os.fsdecode(word) for word in words]

    def _start_program(self) -> None:
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        life = self._life
        trial = ":trial" if life.is_on_trial else ""
        link = {SUPERVISOR_VARIABLE: f"{LINK}:{os.getpid()}{trial}"}
        try:
            environment = {**os.environ, **link}
            self._program = start_session(life.command, ".", environment, (0, 1, 2, theirs.fileno()))
        except OSError as error:
            try_write_line(f"serve cannot be started again: {error.strerror}")
            if life.is_on_trial:
                self._end_fork_server()
                try_write_line("The other serve did not come up: the one before starts again.")
            life.start_failed(time.monotonic())
            return
        finally:
            theirs.close()
        self._connect(ours.detach())

    # -- waiting ----------------------------------------------------------------------------------

    def _due_s(self) -> float | None:
        """Return the seconds until something is to be done without being asked; None for never."""
        due_s = self._life.due_at_s(is_running=self._program != 0)
        if self._stop_signals and not self._life.is_awaited:
            due_s = self._stop_by_s
        return None if due_s == float("inf") else due_s - time.monotonic()

    def _wait(self, most_s: float | None) -> None:
        if self._signals:
            return
        if self._link is not None:
            events = select.POLLIN | (select.POLLOUT if self._link.has_unsent else 0)
            self._poll.modify(self._link.fileno(), events)
        self._poll.poll(None if most_s is None else max(0.0, most_s) * 1000 + 1)

    def _handle_events(self) -> int | None:
        """Do what signals and messages ask for; return the program's wait status when it has ended."""
        try:
            os.read(self._wake, 4096)
        except BlockingIOError:
            pass
        numbers = [self._signals.pop(0) for _ in range(len(self._signals))]
        for number in numbers:
            if number in STOP_SIGNALS:
                self._pass_on(number)
        status = self._reap() if _signal.SIGCHLD in numbers else None
        if self._link is not None:
            self._link.flush()
            self._receive()
        return status

    def _pass_on(self, number: int) -> None:
        """Send the program a signal to end.

        While it is being started everything ends without it, unless it says just then that it is here.
        """
        deadline_s = 0.0 if self._stop_signals else self._drain_s
        self._stop_by_s = time.monotonic() + deadline_s + UNRESPONSIVE_S
        self._stop_signals.append(number)
        if self._program and not self._life.is_awaited:
            os.kill(self._program, number)

    def _reap(self) -> int | None:
        """Reap the program and orphans; tell of the processes held. Return the program's wait status."""
        status = None
        if self._program and (ended := os.waitpid(self._program, os.WNOHANG))[0]:
            status = ended[1]
        for pid in [pid for pid in self._held if pid not in self._ended]:
            how = os.WEXITED | os.WNOHANG | os.WNOWAIT  # its pid stays its own until the program has noted it
            if (found := os.waitid(os.P_PID, pid, how)) is not None:
                is_exit = found.si_code == os.CLD_EXITED
                self._ended[pid] = found.si_status << 8 if is_exit else found.si_status
                self._post(("ended", pid, self._ended[pid]))
        if self._link is None or status is not None:  # nobody is there who would note them
            self._ended_while_away |= self._ended
            for pid in list(self._ended):
                self._forget(pid)
        while (orphan := self._find_ended_orphan()) is not None:
            os.waitpid(orphan, 0)
        return status

    def _find_ended_orphan(self) -> int | None:
        """Return the first process that has ended, if it is an orphan of some process held."""
        try:
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return None
        is_known = found is None or found.si_pid in self._held or found.si_pid == self._program
        return None if found is None or is_known else found.si_pid

    def _forget(self, pid: int) -> None:
        if pid in self._ended:
            del self._ended[pid]
            self._held.pop(pid, None)
            os.waitpid(pid, 0)
            self._signals.append(_signal.SIGCHLD)  # an orphan may have waited behind it

    # -- messages ---------------------------------------------------------------------------------

    def _connect(self, descriptor: int) -> None:
        self._link = PacketSocket(descriptor)
        self._poll.register(descriptor, select.POLLIN)

    def _disconnect(self) -> None:
        if self._link is not None:
            self._poll.unregister(self._link.fileno())
            self._link.close()
        self._link = None

    def _post(self, message: tuple[Any, ...], descriptors: Iterable[int] = ()) -> None:
        if self._link is not None:
            self._link.post(message, descriptors)

    def _receive(self) -> None:
        while self._link is not None and (packet := self._link.receive()) is not None:
            message, descriptors = packet
            if message:
                self._handle(message, descriptors)
            else:
                self._disconnect()

    def _handle(self, message: tuple[Any, ...], descriptors: list[int]) -> None:
        what = message[0]
        if what == "noted":
            self._forget(message[1])
        elif what == "spawn":
            self._spawn(message[1], message[2], descriptors)
        elif what == "hello":
            held = [(name, pid) for pid, (name, _) in self._held.items() if pid not in self._ended]
            away_s = self._life.away_s(time.monotonic())
            for end in self._ended_while_away.items():
                self._post(("ended", *end))
            self._post(("held", held, list(self._kept), away_s), self._kept.values())
        else:
            if what == "keep":
                self._drop(message[1])
                self._kept[message[1]] = descriptors[0]
            elif what == "drop":
                self._drop(message[1])
            elif what == "remove":
                self._paths, self._marked = message[1], (message[2] if len(message) > 2 else ())
            elif what == "here":
                self._record_arrival(*message[1:])
            elif what == "fork server":
                self._have_fork_server(descriptors[0])
            self._post(("ok",))

    def _record_arrival(self, next_path: str, beat_path: str = "", still_s: float = 0.0) -> None:
        if self._life.is_awaited:
            for number in self._stop_signals:  # not passed on yet: they came while it was being started
                os.kill(self._program, number)
        self._life.arrived(time.monotonic(), still_s)
        self._ended_while_away.clear()
        self._next_path, self._beat_path = next_path, beat_path

    def _drop(self, name: str) -> None:
        if name in self._kept:
            os.close(self._kept.pop(name))

    def _spawn(self, name: str, stage: int, descriptors: list[int]) -> None:
        try:
            pid = self._start(descriptors[0], descriptors[1:4])
            self._held[pid] = name, stage
            self._post(("pid", pid))
        except OSError as error:
            self._post(("error", error.errno))
        for each in descriptors:
            os.close(each)

    def _start(self, text: int, streams: Sequence[int]) -> int:
        """Start the command that a file describes, by a fork where that does; return its pid."""
        argv, cwd, environment = read_marshalled(text)
        if self._fork_server and self._fork_server.can_become(argv, environment):
            if pid := self._fork_server.fork(text, streams):
                return pid
            self._end_fork_server()
        return start_session(argv, cwd, environment, streams)

    def _have_fork_server(self, text: int) -> None:
        """Start the fork server that the file ``text`` describes, unless that one runs; close the file.

        Where it cannot be started commands are executed, not forked. One of another description is ended.
        """
        try:
            description = read_marshalled(text)
            if self._fork_server and self._fork_server.description == description and self._fork_server.runs:
                return
            self._end_fork_server()
            self._fork_server = ForkServer(description)
        except OSError:
            return
        finally:
            os.close(text)

    def _end_fork_server(self) -> None:
        if self._fork_server:
            self._fork_server.end()
        self._fork_server = None

    # -- the end ----------------------------------------------------------------------------------

    def _end_in_order(self, status: int) -> int:
        """End everything without the program: stage after stage, and by force at the deadline.

        Return the wait status to end with: ``status``, unless somebody has asked for the end.
        """
        if self._program:
            os.kill(self._program, _signal.SIGKILL)
            os.waitpid(self._program, 0)
            self._program = 0
        self._life.finish()
        self._disconnect()
        signals, end_s = len(self._stop_signals), time.monotonic() + self._left_to_drain_s()
        for stage in DRAINED_STAGES:
            until_s = end_s - (0.0 if stage else min(RESERVED_S, self._drain_s / 4))
            for pid in self._in_stage(stage):
                os.kill(pid, _signal.SIGTERM)
            while self._in_stage(stage) and time.monotonic() < until_s and len(self._stop_signals) == signals:
                self._wait(DRAIN_POLL_S)
                self._handle_events()
        self._end_all()
        remove(self._paths)
        remove_marked(self._marked)
        if self._stop_signals:
            try_write_line("Stopped.")
            return 0 if len(self._stop_signals) == 1 else EXIT_FORCED << 8
        return status

    def _left_to_drain_s(self) -> float:
        """Return the time for requests to finish: none after a second signal, or when it has passed."""
        is_hurried = len(self._stop_signals) > 1
        has_passed = bool(self._stop_signals) and time.monotonic() >= self._stop_by_s
        return 0.0 if is_hurried or has_passed else self._drain_s

    def _in_stage(self, stage: int) -> list[int]:
        return [pid for pid, (_, its) in self._held.items() if its == stage and pid not in self._ended]

    def _end_all(self) -> None:
        """Kill all descendants of this process until none is left."""
        for number in (*STOP_SIGNALS, _signal.SIGHUP):
            _signal.signal(number, _signal.SIG_IGN)  # nothing is started any more that would inherit that
        end_everything_below()


def main(arguments: list[str]) -> int:
    """Hold the program; return its exit code, or die by its signal."""
    program, descriptor, grace_s, drain_s = arguments[:4]
    supervisor = Supervisor(arguments[5:], int(program), int(descriptor), float(grace_s), float(drain_s))
    code = os.waitstatus_to_exitcode(supervisor.run())
    if code >= 0:
        os._exit(code)  # at its own end Python would take a signal's handler away before the process is gone
    if -code != _signal.SIGKILL:
        _signal.signal(-code, _signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    return 128 - code


def cleans_up(pid: int) -> bool:
    """Tell whether a process is a shim or a resource tracker, which end by themselves after the others.

    True, too, for a process without a command line, which is in the midst of an exec and may become one.
    """
    line = command_line(pid)
    return line == b"" or is_resource_tracker(line) or shim_arguments(line or b"") is not None


def end_everything_below() -> None:
    """Kill all descendants of this process until none is left, or for AFTER_KILL_S seconds."""
    begun_s, pause_s = time.monotonic(), FIRST_WAIT_S
    while (since_s := time.monotonic() - begun_s) < AFTER_KILL_S:
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        for pid in descendants(os.getpid(), parents()):
            if since_s > SPARED_S or not cleans_up(pid):
                try:
                    os.kill(pid, _signal.SIGKILL)
                except OSError:
                    continue
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_WAIT_S)


def remove(paths: Iterable[str]) -> None:
    """Remove files, links and directories with all that is in them, in that order.

    A path with a slash at its end is a directory that goes if it is empty. What cannot be removed stays.
    """
    for path in paths:
        if path.endswith("/"):
            _try(os.rmdir, path)
        elif os.path.isdir(path) and not os.path.islink(path):
            for directory, directories, files in os.walk(path, topdown=False):
                for name in (*files, *directories):
                    inner = os.path.join(directory, name)
                    is_directory = name in directories and not os.path.islink(inner)
                    _try(os.rmdir if is_directory else os.unlink, inner)
            _try(os.rmdir, path)
        elif os.path.lexists(path):
            _try(os.unlink, path)


def remove_marked(marked: Iterable[tuple[str, str]]) -> None:
    """Remove each (path, text) whose file still contains the text: else it is another deployment's by now."""
    for path, text in marked:
        try:
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
                is_ours = os.fsencode(text) in file.read(MAX_MARKED_BYTES)
        except OSError:
            continue
        if is_ours:
            _try(os.unlink, path)


def _try(removal: Callable[[str], None], path: str) -> None:
    try:
        removal(path)
    except OSError:
        return
