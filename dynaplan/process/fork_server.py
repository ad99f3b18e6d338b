"""The fork server: a process that has imported what workers need, and is forked instead of starting one.

Linux only. ``holding.HolderLink.have_fork_server`` has the holder start it. It is single-threaded, opens
nothing, and knows no graph of a user's. Its standard input is a socket to the holder, which sends
``("fork",)`` with descriptors: a file with the marshalled ``(argv, cwd, environment)``, the standard streams,
and for the holder's program its link. The answer is ``("pid", pid)``, or ``("error", errno)``.
``("left", paths)``, which is not answered, names what is left when the holder is killed: this process sees
that, clears it up, and ends.

It forks twice: so the holder, a subreaper, is the parent. The process that comes of it waits until that has
been answered, and then is what an exec of ``argv`` would have made, for itself and for the kernel: a session
of its own, no descriptors but its streams and its link, its own environment and command line in ``/proc``
(``process_view.py``), no module in ``__main__`` but its own. It differs in what an interpreter draws at its
start: the seed of ``hash`` for texts and the layout of its memory are those of its siblings.
"""

from __future__ import annotations

import errno
import gc
import io
import logging
import marshal
import os
import signal
import sys
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any

from dynaplan.process.forking import is_readable, read_text
from dynaplan.process.packets import END, PacketSocket
from dynaplan.process.process_view import is_shown, show_as

FORK_SERVER = (
    "import sys; sys.path[:] = sys.path[not sys.flags.safe_path:]; "
    "from dynaplan.process.fork_server import main; "
    "module = main(*sys.argv[1:]); "
    "import runpy; runpy._run_module_as_main(module)"
)
"""The program: what it does after ``main`` is what ``python -m`` does, in a forked process."""

GOES = b"g"

ENDED_WITHIN_S = 10.0
"""Longest wait for the end of a killed holder: its socket is closed before, when it seems to run still."""

QUIET_S = 1.0
"""Time after a request in which nothing is imported, in seconds: the forked process has the CPU then."""


def main(root: str, modules: str, holder_pid: str) -> str:
    """Import, and fork for the holder until that ends; return in a forked process: the module to run.

    ``modules`` names one that lists others: ``FIRST``, before which nothing is forked, ``THEN``, and the one
    that is ``AFTERWARDS`` told what the killed holder has left. This process ends without an answer where it
    is not of the package in ``root``, or a fork of it would not do.
    """
    holder = _opened(int(holder_pid))
    link = PacketSocket(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), 0)
    if not os.path.samefile(root, os.path.dirname(sys.modules["dynaplan"].__file__ or "")):
        sys.exit(f"the fork server of {root} has imported another dynaplan: workers start without it")
    gc.disable()
    lists = import_module(modules)
    for name in lists.FIRST:
        _import(name)
    if not _is_alone():
        os._exit(0)
    waiting, quiet_s = list(lists.THEN), 0.0
    left: list[str] = []
    while True:
        if waiting and not is_readable(link.fileno(), quiet_s):
            _import(waiting.pop(0))
            continue
        message, descriptors = link.receive(waits=True) or (END, [])
        if not message:
            is_readable(holder, ENDED_WITHIN_S)
            _clear_up(lists.AFTERWARDS, left, int(holder_pid))
        elif message[0] == "left":
            left = message[1]
        elif argv := _forked(link, descriptors):
            return argv[_module_at(argv)]
        else:
            quiet_s = QUIET_S


def _opened(holder_pid: int) -> int:
    """Return a descriptor that can be read when the holder has ended; end with it when it has already."""
    try:
        holder = os.pidfd_open(holder_pid)
    except ProcessLookupError:
        os._exit(0)
    if os.getppid() != holder_pid:
        os._exit(0)
    return holder


def _import(name: str) -> None:
    """Import a module; one that cannot be is left to the process that needs it."""
    with suppress(ImportError):
        import_module(name)


def _is_alone() -> bool:
    """Tell whether this process has one thread, which a fork takes along, and may change its view."""
    try:
        show_as(sys.orig_argv, os.environ)
    except OSError:
        return False
    return len(os.listdir("/proc/self/task")) == 1


def _clear_up(module: str, left: list[str], holder_pid: int) -> None:
    """Clear up what the killed holder has left, and end."""
    try:
        if left:
            import_module(module).clear_up(left, holder_pid)
    finally:
        os._exit(0)


def _forked(link: PacketSocket, descriptors: list[int]) -> list[str]:
    """Answer a request; return in the process that was asked for: its command, which it is now."""
    argv, cwd, environment = read_text(descriptors[0])
    gc.freeze()
    if _is_child(link, argv, cwd, environment):
        link.close()
        _become(argv, environment, descriptors[1:])
        return list(argv)
    for each in descriptors:
        os.close(each)
    return []


def _is_child(link: PacketSocket, argv: list[str], cwd: str, environment: dict[str, str]) -> bool:
    """Fork a child of the holder, and answer when it looks as an executed one; return True in the child."""
    told, tell = os.pipe()
    waits, release = os.pipe()
    between = os.fork()
    if between == 0:
        try:
            os.chdir(cwd)
            if os.fork():
                os._exit(0)
        except OSError as error:
            _say(tell, ("error", error.errno))
            os._exit(0)
        os.close(release)
        os.setsid()
        with suppress(OSError):  # then it is executed, below
            show_as(argv, environment)
        _say(tell, ("pid", os.getpid()))
        if os.read(waits, 1) != GOES:  # the fork server was killed: the holder starts another one
            os._exit(1)
        return True
    for each in (tell, waits):
        os.close(each)
    os.waitpid(between, 0)
    answer = os.read(told, 64)
    try:
        link.ask(marshal.loads(answer) if answer else ("error", errno.EAGAIN))
        os.write(release, GOES)
    except OSError:  # the holder is gone, or the child is: whose end the kernel tells
        pass
    for each in (told, release):
        os.close(each)
    return False


def _say(descriptor: int, answer: tuple[Any, ...]) -> None:
    try:
        os.write(descriptor, marshal.dumps(answer))
    except OSError:
        return


def _become(argv: list[str], environment: dict[str, str], streams: list[int]) -> None:
    """Become what an exec would have made of this process."""
    for target, stream in enumerate(streams):
        os.dup2(stream, target)
        os.set_inheritable(target, True)
    os.closerange(len(streams), os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(environment)
    if not is_shown(argv):
        _execute(argv, environment)
    _renew_interpreter(argv)


def _execute(argv: list[str], environment: dict[str, str]) -> None:
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them
        signal.signal(number, signal.SIG_DFL)
    os.execve(argv[0], argv, environment)


def _renew_interpreter(argv: list[str]) -> None:
    """Set what an interpreter derives from its command line, its directory and its streams at its start."""
    sys.orig_argv[:] = argv
    at = _module_at(argv)
    sys.argv[:] = ["-m", *argv[at + 1 :]]
    if not sys.flags.safe_path and "-P" not in argv[:at]:
        sys.path.insert(0, os.getcwd())
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.write_through:  # PYTHONUNBUFFERED
        sys.stdout.reconfigure(line_buffering=os.isatty(1))
    logging.root.handlers.clear()  # as ``import circus`` has added
    module, before = ModuleType("__main__"), vars(sys.modules["__main__"])
    vars(module).update(
        {name: before[name] for name in ("__annotations__", "__builtins__") if name in before}
    )
    sys.modules["__main__"] = module
    gc.enable()


def _module_at(argv: list[str]) -> int:
    """Return where the module of a command line stands that an interpreter runs as its program."""
    return argv.index("-m") + 1
