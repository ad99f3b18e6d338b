"""A program's side of its supervisor (``supervisor.py``): getting one, and what is asked of it."""

from __future__ import annotations

import errno
import marshal
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import dynaplan
from dynaplan.process.fork_server import RUN
from dynaplan.process.kernel import adopt_orphans, die_with_parent, isolated_command
from dynaplan.process.packets import END, PacketSocket
from dynaplan.process.supervisor import AWAITED, SUPERVISOR_VARIABLE


@dataclass(frozen=True)
class SupervisorState:
    """What the supervisor has kept of the programs before this one: processes and descriptors, by name.

    ``away_s`` is how long no program ran, in seconds; 0 for the first program. ``ended`` has the wait
    statuses, by pid, of the processes that have ended since then.
    """

    pids: Mapping[str, int]
    kept: Mapping[str, int]
    away_s: float
    ended: Mapping[int, int] = field(default_factory=dict)


def fork_under_supervisor(command: Sequence[str], grace_s: float, drain_s: float) -> SupervisorLink:
    """Fork: return in the child, the program, and have this process become its supervisor.

    ``command`` starts the program again. To be called before there are threads, and before anything is open
    that the supervisor must not keep open.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    adopt_orphans()
    supervisor_pid, before = os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, AWAITED)
    program = os.fork()
    if program:
        _become_supervisor(ours.fileno(), program, command, grace_s, drain_s)
    # Ctrl-C reaches the supervisor alone, which passes it on; and to write is no fault of a group in the
    # back.
    os.setpgid(0, 0)
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    die_with_parent(supervisor_pid)
    ours.close()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return SupervisorLink(theirs.detach(), supervisor_pid)


def inherited_link(environ: MutableMapping[str, str]) -> SupervisorLink | None:
    """Return the link to the supervisor that has restarted this program, if so; removes its variable."""
    descriptor, *words = environ.pop(SUPERVISOR_VARIABLE, "").split(":")
    if not words:
        return None
    die_with_parent(int(words[0]))
    return SupervisorLink(int(descriptor), int(words[0]), is_trial="trial" in words)


def _become_supervisor(
    descriptor: int, program: int, command: Sequence[str], grace_s: float, drain_s: float
) -> None:
    """Become the supervisor, with no other descriptors than its own; the program ends where that fails."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with suppress(OSError):  # the descriptor of the listing itself
                os.set_inheritable(int(name), int(name) == descriptor)
    numbers = (str(program), str(descriptor), f"{grace_s:g}", f"{drain_s:g}")
    try:
        os.execv(sys.executable, isolated_command("supervisor", *numbers, "--", *command))
    finally:
        os._exit(1)


class SupervisorLink:
    """The link to the supervisor; methods that ask it something block until it has answered.

    ``on_end(pid, wait_status)`` is called for ended processes, by ``poll`` and while an answer is waited for.
    A program that ``is_trial`` takes the place of another, which is started again unless this one calls
    ``confirm_running``. ``arguments`` are this program's own.
    """

    def __init__(self, descriptor: int, supervisor_pid: int, *, is_trial: bool = False) -> None:
        self.supervisor_pid = supervisor_pid
        self.is_trial = is_trial
        self.arguments: Sequence[str] = ()
        self._early_ends: dict[int, int] = {}
        self.on_end: Callable[[int, int], None] = self._early_ends.__setitem__
        self._socket = PacketSocket(descriptor)

    def fileno(self) -> int:
        """Return the descriptor that can be read when there is something to ``poll`` at."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close the link: what the supervisor keeps stays kept."""
        self._socket.close()

    def hello(self) -> SupervisorState:
        """Return what the supervisor keeps of the programs before this one.

        The descriptors are copies, which this process is to close.
        """
        (_, children, names, away_s), descriptors = self._ask(("hello",))
        kept = dict(zip(names, descriptors, strict=True))
        return SupervisorState(dict(children), kept, away_s, self._early_ends)

    def spawn(
        self,
        name: str,
        stage: int,
        argv: Sequence[str],
        cwd: str,
        environment: Mapping[str, str],
        streams: Sequence[int],
    ) -> int:
        """Have a program started as the leader of a session; return its pid. OSError when it cannot be."""
        with _file_of((list(argv), cwd, dict(environment))) as text:
            answer, _ = self._ask(("spawn", name, stage), (text, *streams))
        if answer[0] == "error":
            raise OSError(answer[1], os.strerror(answer[1]), argv[0])
        return int(answer[1])

    def have_fork_server(
        self, modules: str, beginning: Sequence[str], variables: Mapping[str, str], free: Sequence[str]
    ) -> None:
        """Have commands with that beginning forked from now on, by a process that has imported much.

        ``modules`` names the module that lists what to import; ``variables`` are added to its environment.
        Any other command is executed as usual, as is one whose environment differs in a variable that begins
        with none of ``free``.
        """
        if not all(map(os.path.isabs, filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)))):
            return  # it means another directory in each working directory
        package = str(Path(dynaplan.__file__).resolve().parent)
        command = [sys.executable, "-P", "-c", RUN, package, modules]
        with _file_of((command, {**os.environ, **variables}, list(beginning), list(free))) as text:
            self._ask(("fork server",), (text,))

    def keep(self, name: str, descriptor: int) -> None:
        """Have the supervisor keep a copy of a descriptor, in the place of one of that name."""
        self._ask(("keep", name), (descriptor,))

    def keep_text(self, name: str, text: bytes) -> None:
        """Have the supervisor keep a text, as a file in memory."""
        file = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.write(file, text)
            self.keep(name, file)
        finally:
            os.close(file)

    def drop(self, name: str) -> None:
        """Have the supervisor close what it keeps by that name."""
        self._ask(("drop", name))

    def remove_at_the_end(
        self,
        paths: Sequence[Path],
        if_empty: Sequence[Path] = (),
        marked: Sequence[tuple[Path, str]] = (),
    ) -> None:
        """Name the files and directories to remove, in order, if everything must end without a program.

        Each of the ``marked`` files is removed if it holds its text then.
        """
        names = [*map(str, paths), *(f"{path}/" for path in if_empty)]
        self._ask(("remove", names, [(str(path), text) for path, text in marked]))

    def confirm_running(self, successor: Path, heartbeat: Path, still_s: float) -> None:
        """Say that all is as before: from now on an exit of this program is the end of everything.

        ``successor`` is the file for the command of another program that is to take this one's place. This
        program writes its heartbeats into the file ``heartbeat``; it is killed when it has written none for
        ``still_s`` seconds.
        """
        self._ask(("here", str(successor), str(heartbeat), still_s))

    def poll(self, *, waits: bool = False) -> None:
        """Take note of processes that have ended; with ``waits``, of the next one at least."""
        while (packet := self._socket.receive(waits=waits)) is not None:
            self._note(packet[0])
            waits = False

    def _ask(
        self, message: tuple[object, ...], descriptors: Sequence[int] = ()
    ) -> tuple[tuple[Any, ...], list[int]]:
        self._socket.send(message, descriptors)
        while True:
            packet = self._socket.receive(waits=True)
            assert packet is not None
            if packet[0] and packet[0][0] != "ended":
                return packet
            self._note(packet[0])

    def _note(self, message: tuple[Any, ...]) -> None:
        if message == END:
            raise OSError(errno.EPIPE, "the supervisor has ended")
        _, pid, status = message
        self.on_end(pid, status)
        self._socket.send(("noted", pid))


@contextmanager
def _file_of(message: tuple[Any, ...]) -> Iterator[int]:
    """Open a file in memory for what is longer than a packet may be; it is closed at the end."""
    text = os.memfd_create("message", os.MFD_CLOEXEC)
    try:
        with open(text, "wb", closefd=False) as file:
            marshal.dump(message, file)
        yield text
    finally:
        os.close(text)
