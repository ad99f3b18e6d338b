"""The holder's side of a fork server (``fork_server.py``): which processes are forked, and asking for one."""

from __future__ import annotations

# Not ``signal``: it would double a process that only waits.
import _signal  # type: ignore[import-not-found]
import _socket
import marshal
import os
import select

from dynaplan.process.packets import END, PacketSocket
from dynaplan.process.spawning import start

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import Any

    About = tuple[list[str], dict[str, str], list[list[str]], list[str]]
    """A fork server's command line and environment, the words with which commands begin that it can become,
    and the beginnings of the names of variables in which such a command's environment may differ from its
    own: any other may have been read when the interpreter started, or by a module."""

LINK = 3
"""The descriptor at which a program that is started again finds its link to the holder."""

ANSWER_S = 10.0
"""Longest wait for a fork server: its imports come before its first answer. Then it is given up."""


def read_text(descriptor: int) -> Any:
    """Return what was marshalled into a file, from its beginning."""
    with open(descriptor, "rb", closefd=False) as file:
        file.seek(0)
        return marshal.load(file)


class Spawner:
    """Starts processes: by its fork server, if there is one that can become the command, or by exec."""

    def __init__(self) -> None:
        self._server: ForkServer | None = None
        self._paths: Sequence[str] = ()

    def leave(self, paths: Sequence[str]) -> None:
        """Name what the fork server is to clear up when this process has been killed."""
        self._paths = paths
        if self._server:
            self._server.leave(paths)

    def prepare(self, text: int) -> None:
        """Start the fork server that a file describes, unless it is there. Without one nothing is forked."""
        try:
            about = read_text(text)
            if self._server is None or self._server.about != about or not self._server.runs:
                self.end_fork_server()
                self._server = ForkServer(about)
                self._server.leave(self._paths)
        except OSError:
            return
        finally:
            os.close(text)

    def spawn(self, text: int, streams: Sequence[int]) -> int:
        """Start the command that a file describes; return its pid, or raise OSError when it cannot be run."""
        argv, cwd, environment = read_text(text)
        pid = self._forked(argv, environment, text, streams)
        return pid or start(argv, cwd, environment, streams)

    def spawn_linked(self, argv: Sequence[str], environment: Mapping[str, str], link: int) -> int:
        """Start a command here, with this process's streams and a link, its descriptor LINK; as ``spawn``."""
        text = os.memfd_create("command", os.MFD_CLOEXEC)
        try:
            os.write(text, marshal.dumps((list(argv), ".", dict(environment))))
            pid = self._forked(argv, environment, text, (0, 1, 2, link))
        finally:
            os.close(text)
        return pid or start(argv, ".", environment, (0, 1, 2, link))

    def _forked(
        self, argv: Sequence[str], environment: Mapping[str, str], text: int, streams: Sequence[int]
    ) -> int:
        """Return the pid of a forked process; 0 when there is no fork server that can become it."""
        if not self._server or not may_fork(self._server.about, argv, environment):
            return 0
        pid = self._server.fork(text, streams)
        if not pid:
            self.end_fork_server()
        return pid

    def end_fork_server(self) -> None:
        """End the fork server; what it has forked goes on."""
        if self._server:
            self._server.end()
        self._server = None


class ForkServer:
    """A fork server below this process."""

    def __init__(self, about: About) -> None:
        self.about = about
        command, environment, _, _ = about
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        try:
            pid = start([*command, str(os.getpid())], ".", environment, (theirs.fileno(), 1, 2))
        finally:
            theirs.close()
        self._link = PacketSocket(ours.detach())
        # It is reaped like an orphan, whenever that comes: its pid may be another's by then.
        self._process = os.pidfd_open(pid)

    @property
    def runs(self) -> bool:
        """True while it has not ended."""
        return not is_readable(self._process, 0.0)

    def fork(self, text: int, streams: Sequence[int]) -> int:
        """Return the pid of a new process, which is this one's child; 0 when there is none, and none comes.

        OSError where a fork or its directory fails.
        """
        try:
            self._link.ask(("fork",), (text, *streams))
        except OSError:
            return 0
        if not is_readable(self._link.fileno(), ANSWER_S):
            self._kill()
            if (late := self._answer()) and late[0] == "pid":
                os.kill(late[1], _signal.SIGKILL)
            return 0
        answer = self._answer()
        if answer and answer[0] == "error":
            raise OSError(answer[1], os.strerror(answer[1]))
        return int(answer[1]) if answer else 0

    def leave(self, paths: Sequence[str]) -> None:
        """Name the files that are left when this process is killed."""
        self._link.tell(("left", list(paths)))

    def end(self) -> None:
        """Kill it, and let go of it."""
        self._kill()
        self._link.close()
        os.close(self._process)

    def _answer(self) -> tuple[Any, ...]:
        packet = self._link.receive()
        return packet[0] if packet else END

    def _kill(self) -> None:
        try:
            _signal.pidfd_send_signal(self._process, _signal.SIGKILL)
        except OSError:
            return  # it has ended
        is_readable(self._process, ANSWER_S)


def may_fork(about: About, argv: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Tell whether that fork server can become that command."""
    _, own, beginnings, free = about
    differing = [name for name in {**own, **environment} if own.get(name) != environment.get(name)]
    is_known = any(list(argv[: len(words)]) == words for words in beginnings)
    return is_known and all(name.startswith(tuple(free)) for name in differing)


def is_readable(descriptor: int, within_s: float) -> bool:
    """Wait until there is something to read, or the end; tell whether there is."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(1000 * within_s))
