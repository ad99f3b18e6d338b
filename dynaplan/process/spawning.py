"""Starting a program by fork and exec, without the standard library's ``subprocess`` and what it loads."""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def start(
    argv: Sequence[str],
    cwd: str,
    environment: Mapping[str, str],
    streams: Sequence[int],
) -> int:
    """Start a program that leads a session, and return its pid; OSError when it cannot be run.

    It keeps no descriptor but ``streams``, which are its first ones.
    """
    told, tell = os.pipe()
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
            os.write(tell, str(error.errno).encode())
        finally:
            os._exit(127)
    os.close(tell)
    failed = os.read(told, 16)
    os.close(told)
    if failed:
        os.waitpid(pid, 0)
        raise OSError(int(failed), os.strerror(int(failed)))
    return pid
