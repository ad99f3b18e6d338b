"""What processes of ours ask the kernel for: to end with their parent, to adopt orphans, who is below whom.

Linux only. A process that only waits imports this, so it imports next to nothing itself.
"""

from __future__ import annotations

# Not ``signal``: its enumerations cost a process that only waits another MiB. Nor ``typing`` or ``ctypes``.
import _signal  # type: ignore[import-not-found]
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""Options of ``prctl``, from ``linux/prctl.h``: the signal that a process gets when its parent ends, and that
it becomes the parent of orphans below it."""

EXIT_CANNOT_START = 78
"""The same as ``dynaplan.graph.lifecycle.EXIT_CANNOT_START``, which a process that only waits must not
import."""

TRACKERS_TIMEOUT_S = 3.0
"""Time that Python's resource trackers, which remove shared memory, have to end by themselves."""

_RUN = (
    "import sys; sys.path.append(sys.argv.pop(1)); "
    "from dynaplan.process.{} import main; sys.exit(main(sys.argv[1:]))"
)


def isolated_command(module: str, *words: str) -> list[str]:
    """Return the command line that runs ``main`` of a module of ``dynaplan.process``, with these arguments.

    Isolated (``-I -S``): it sees neither the environment's paths nor site-packages, and starts in 15 ms.
    """
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return [sys.executable, "-I", "-S", "-c", _RUN.format(module), root, *words]


def shim_arguments(command_line: bytes) -> list[bytes] | None:
    """Return the arguments of a shim with that ``/proc/PID/cmdline``; None for any other process."""
    words = command_line.split(b"\0")
    is_it = len(words) > 6 and words[4] == _RUN.format("shim").encode()
    return words[6:-1] if is_it else None


def signal_at_parents_end(number: int, parent_pid: int) -> bool:
    """Have the kernel send this process a signal when its parent ends; return whether the parent is there.

    ``parent_pid`` is the pid that the parent had when it started this process. The kernel ties the signal to
    the parent's *thread* that started this process, so a parent must start its children from a thread that
    lives as long as itself. The request survives exec and is not inherited by children.
    """
    _prctl(PR_SET_PDEATHSIG, number)
    return os.getppid() == parent_pid


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process (SIGKILL) when its parent ends; exit now if that has happened."""
    if not signal_at_parents_end(_signal.SIGKILL, parent_pid):
        sys.exit(f"the parent, process {parent_pid}, is gone")


def adopt_orphans() -> None:
    """Adopt descendants whose parent dies, from now on, so that none can slip away."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def parents() -> dict[int, int]:
    """Return the parent of each process of this machine, by its pid; zombies are left out."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except OSError:
                continue
            if state not in b"ZX":
                found[int(name)] = int(parent)
    return found


def descendants(ancestor: int, parent_of: Mapping[int, int]) -> list[int]:
    """Return the processes below one, its children first, by what ``parents`` has found."""
    found: list[int] = []
    generation = {ancestor}
    while generation:
        generation = {pid for pid, parent in parent_of.items() if parent in generation}
        found += generation
    return found


def command_line(pid: int) -> bytes | None:
    """Return ``/proc/PID/cmdline``, empty in the midst of an exec; None when the process is gone."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return file.read()
    except OSError:
        return None


def is_stopped(pid: int) -> bool:
    """Tell whether a signal, such as SIGSTOP, has stopped the process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] == b"T"
    except OSError:
        return False


def is_resource_tracker(line: bytes | None) -> bool:
    """Tell whether a process with that command line is one of Python's resource trackers."""
    return line is not None and b"multiprocessing.resource_tracker" in line


def start_session(
    argv: Sequence[str],
    cwd: str,
    environment: Mapping[str, str],
    streams: Sequence[int],
) -> int:
    """Start a program that leads a session, and return its pid; OSError when it cannot be run.

    It keeps no descriptor but ``streams``, which are its first ones.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            for target, stream in enumerate(streams):
                os.dup2(stream, target)
                os.set_inheritable(target, True)
            for number in (_signal.SIGPIPE, _signal.SIGXFSZ):  # Python ignores them
                _signal.signal(number, _signal.SIG_DFL)
            os.chdir(cwd)
            os.execvpe(argv[0], list(argv), dict(environment))
        except OSError as error:
            os.write(writer, str(error.errno).encode())
        finally:
            os._exit(127)
    os.close(writer)
    failed = os.read(reader, 16)
    os.close(reader)
    if failed:
        os.waitpid(pid, 0)
        raise OSError(int(failed), os.strerror(int(failed)))
    return pid


def _prctl(option: int, value: int) -> None:
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
