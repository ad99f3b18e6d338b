"""The fork server: a process that has imported what workers need, and is forked in place of starting one.

Linux only. It takes a second of CPU and 15 MiB off each worker (docs/decisions/0052). It is single-threaded,
opens nothing, and knows no graph of a user's. The supervisor starts it, and is its only client, over a
``SOCK_SEQPACKET`` pair that is its standard input: ``("fork",)``, with descriptors for a file that has the
marshalled ``(argv, cwd, environment)`` and for the standard streams. The answer is ``("pid", pid)`` or
``("error", errno)``.

It forks twice, so that the supervisor, a subreaper, is the parent of the new process. That leads a session,
has no descriptors but its streams, its own environment, directory and ``sys.argv``, and calls ``main`` of the
module that ``argv`` names. Three things tell it from an executed one: ``/proc/PID/cmdline`` and ``environ``
are those of the fork server, which has the deployment's environment, so ``comm`` is the worker's name; the
seed of ``hash`` for texts and the layout of the memory are its siblings'; ``__main__`` is not the module.

The supervisor executes what the fork server cannot become: another program, another interpreter option, or a
variable that differs from the fork server's own and is not free to. That may have been read already, when the
interpreter started, or by a module. Without a fork server that answers, everything is executed.
"""

from __future__ import annotations

# The supervisor imports this: not ``signal``, ``socket`` or ``typing``, which would double it.
import _signal  # type: ignore[import-not-found]
import _socket
import os
import sys
import time

from dynaplan.process.kernel import die_with_parent, start_session
from dynaplan.process.packets import END, PacketSocket, is_readable, read_marshalled

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from typing import NoReturn

    Description = tuple[list[str], dict[str, str], list[str], list[str]]
    """A fork server's command and environment; the beginning of the commands that it can become; and the
    beginnings of the names of variables that are free to differ from its own."""

RUN = "import sys; from dynaplan.process.fork_server import main; sys.exit(main(*sys.argv[1:]))"

FORK_TIMEOUT_S = 10.0
"""Longest wait for an answer: the imports come before the first one. Then the fork server is given up."""

QUIET_S = 1.0
"""Time after a request in which nothing is imported: the forked process has the CPU then."""

COMM_BYTES = 15
"""The longest name that the kernel keeps of a process; proc_pid_comm(5)."""


class ForkServer:
    """A fork server below this process, which is the supervisor."""

    def __init__(self, description: Description) -> None:
        self.description = description
        command, environment, _, _ = description
        ours, theirs = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
        try:
            pid = start_session([*command, str(os.getpid())], ".", environment, (theirs.fileno(), 1, 2))
        finally:
            theirs.close()
        self._link = PacketSocket(ours.detach())
        # It is reaped like an orphan, whenever that happens: its pid may be another's by then.
        self._process = os.pidfd_open(pid)

    @property
    def runs(self) -> bool:
        return not is_readable(self._process, 0.0)

    def can_become(self, argv: Sequence[str], environment: Mapping[str, str]) -> bool:
        """Tell whether a fork of the server can run that command, with that environment."""
        _, own, beginning, free = self.description
        differing = [name for name in {**own, **environment} if own.get(name) != environment.get(name)]
        is_known = list(argv[: len(beginning)]) == beginning
        return is_known and all(name.startswith(tuple(free)) for name in differing)

    def fork(self, text: int, streams: Sequence[int]) -> int:
        """Return the pid of a new process, which is this one's child; 0 when the server is gone or too late.

        After a 0 no process of this call appears later. ``text`` is the descriptor of a file with the
        marshalled command. Raises OSError where the fork, or a change to the command's directory, fails.
        """
        try:
            self._link.send(("fork",), (text, *streams))
        except OSError:
            return 0
        is_late = not is_readable(self._link.fileno(), FORK_TIMEOUT_S)
        if is_late:
            self._kill()
        packet = self._link.receive()
        kind, number = packet[0] if packet and packet[0] else ("pid", 0)
        if kind == "error":
            raise OSError(number, os.strerror(number))
        if is_late and number:
            os.kill(number, _signal.SIGKILL)
        return 0 if is_late else int(number)

    def end(self) -> None:
        """Kill the fork server, and close its descriptors; processes that it has forked go on running."""
        self._kill()
        self._link.close()
        os.close(self._process)

    def _kill(self) -> None:
        try:
            _signal.pidfd_send_signal(self._process, _signal.SIGKILL)
        except OSError:
            return  # it has ended
        is_readable(self._process, FORK_TIMEOUT_S)


def main(package: str, modules: str, supervisor_pid: str) -> int:
    """Import, and fork for the supervisor until that ends; in a forked process, run its module.

    ``package`` is the directory from which dynaplan must have been imported. ``modules`` names a module with
    lists of modules to import: ``FIRST``, before any fork; ``WITH``, by an environment variable, before the
    fork of a process in which it is not empty; ``THEN``, one at a time while no fork is asked for. Returns 0
    when the supervisor ends; 1 for another directory, or when an import has started a thread, which a fork
    loses.
    """
    import gc
    from importlib import import_module

    die_with_parent(int(supervisor_pid))
    link = PacketSocket(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), 0)
    if not os.path.samefile(package, os.path.dirname(sys.modules["dynaplan"].__file__ or "")):
        return 1
    gc.disable()
    lists = import_module(modules)
    for name in lists.FIRST:
        _import(name)
    waiting, quiet_s = list(lists.THEN), 0.0
    while len(os.listdir("/proc/self/task")) == 1:
        if waiting and not is_readable(link.fileno(), quiet_s):
            _import(waiting.pop(0))
            quiet_s = 0.0
            continue
        message, descriptors = link.receive(waits=True) or (END, [])
        if not message:
            return 0
        argv, cwd, environment = read_marshalled(descriptors[0])
        for variable in filter(environment.get, lists.WITH):
            for name in lists.WITH[variable]:
                _import(name)
        gc.freeze()
        if _is_child(link, cwd):
            _become(argv, environment, descriptors[1:])
            gc.enable()
            at = argv.index("-m") + 1
            _end(int(import_module(argv[at]).main(sys.argv[1:])))
        for each in descriptors:
            os.close(each)
        quiet_s = QUIET_S
    return 1


def _end(code: int) -> NoReturn:
    """End a forked process as ``multiprocessing`` ends its own: without taking the interpreter apart.

    That would copy the pages that it shares with the fork server, which takes a tenth of a second.
    """
    import atexit
    import threading

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # nobody reads it, or it is closed
            continue
    os._exit(code)


def _import(name: str) -> None:
    """Import a module; one that cannot be is left to the process that needs it."""
    from importlib import import_module

    try:
        import_module(name)
    except ImportError:
        return


def _is_child(link: PacketSocket, cwd: str) -> bool:
    """Fork a child of the supervisor, which reports itself; return True in it."""
    between = os.fork()
    if between:
        os.waitpid(between, 0)
        return False
    try:
        os.chdir(cwd)
        between = os.getpid()
        if os.fork():
            os._exit(0)
    except OSError as error:
        link.send(("error", error.errno))
        os._exit(1)
    os.setsid()
    while os.getppid() == between:  # who dies with the supervisor must be its child first
        time.sleep(0.0002)
    try:
        link.send(("pid", os.getpid()))
    except OSError:  # the supervisor has ended, or has given the fork server up
        os._exit(1)
    return True


def _become(argv: Sequence[str], environment: Mapping[str, str], streams: Sequence[int]) -> None:
    """Set streams, environment and arguments of this forked process as an exec would have."""
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.set_inheritable(target, True)
    os.closerange(len(streams), os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[:] = ["-m", *argv[argv.index("-m") + 2 :]]
    sys.orig_argv[:] = argv
    if "-P" not in argv:
        sys.path.insert(0, os.getcwd())
    name = environment.get("DYNAPLAN_WORKER_NAME", "")
    with open("/proc/self/comm", "wb") as file:
        file.write(name.encode()[-COMM_BYTES:])
