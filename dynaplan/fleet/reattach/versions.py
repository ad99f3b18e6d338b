"""The version of dynaplan that a deployment's ``serve`` is of, and how another one takes over.

``serve`` writes its version into a private file beside its sockets. For another version to take over, its
command is left in another file there, and ``serve`` is killed (SIGKILL): the supervisor starts that command,
which adopts what runs, as after any kill. It is on trial until it has; if it fails, the supervisor starts the
version before again.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterable, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import dynaplan
from dynaplan.fleet.runtime_dir import write_private
from dynaplan.graph.lifecycle import Role, Worker, WorkerState
from dynaplan.process import process_table
from dynaplan.util.errors import DeploymentError

VERSION_FILE = "version.json"

SUCCESSOR_FILE = "successor"

PACKAGE_VARIABLE = "DYNAPLAN_TAKES_OVER"
"""The directory of the package that a ``serve`` which takes over must be of."""

FIRST = (Role.FRONTEND, Role.DECODE, Role.PREFILL)
"""The order in which workers are renewed; others, such as the planner, come last."""


@dataclass(frozen=True)
class Version:
    """A version of dynaplan: its number, its interpreter, and the directory of its package."""

    number: str
    executable: str
    package: str

    def __str__(self) -> str:
        return f"dynaplan {self.number} ({self.executable})"


@dataclass(frozen=True)
class RunningServe:
    """The process of ``serve``, its version and its arguments.

    ``started_at`` is its start, and ``since`` that of the first ``serve`` of its version after another one,
    in clock ticks since boot; 0 where no other version came before.
    """

    pid: int
    started_at: int
    version: Version
    since: int = 0
    arguments: tuple[str, ...] = ()

    def not_renewed(self, workers: Sequence[Worker]) -> list[Worker]:
        """Return the workers that another version has started, and that stay, in the order of renewal."""
        return in_order(each for each in workers if each.pid and each.started_at < self.since)

    def older(self, workers: Sequence[Worker]) -> list[Worker]:
        """Return the workers that were started before this process, and stay, in the order of renewal."""
        return in_order(each for each in workers if each.pid and each.started_at < self.started_at)


def in_order(workers: Iterable[Worker]) -> list[Worker]:
    """Return the workers, without those that are leaving, in the order of renewal.

    Frontends come first, the planner last.
    """
    stays = [each for each in workers if each.state is not WorkerState.DRAINING]
    return sorted(stays, key=lambda each: FIRST.index(each.role) if each.role in FIRST else len(FIRST))


def own_version() -> Version:
    return Version(dynaplan.__version__, sys.executable, str(Path(dynaplan.__file__).resolve().parent))


def read_serve(runtime_dir: Path) -> RunningServe | None:
    """Return the ``serve`` that has last written down its version; None when there is nothing to read."""
    try:
        document = json.loads((runtime_dir / VERSION_FILE).read_text())
        version, arguments = Version(**document["version"]), tuple(document["arguments"])
        return RunningServe(**{**document, "version": version, "arguments": arguments})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def write_own(runtime_dir: Path, arguments: Sequence[str]) -> None:
    """Write down that this process, with these arguments, is the deployment's ``serve`` from now on."""
    me, own, before = process_table.identity_of(os.getpid()), own_version(), read_serve(runtime_dir)
    since = 0 if before is None else before.since if before.version == own else me.started_at
    serve = RunningServe(me.pid, me.started_at, own, since, tuple(arguments))
    write_private(runtime_dir / VERSION_FILE, json.dumps(asdict(serve)))


def take_over(runtime_dir: Path, running: RunningServe, program: Sequence[str], path: str | None) -> None:
    """Kill ``serve``, and have its supervisor start this version; ProcessLookupError when it is gone.

    ``program`` is the command of this version's ``serve`` without arguments: those of the running one are
    kept. ``path`` is this process's PYTHONPATH, if any: the only variable that the deployment takes over.
    """
    variables = [f"{PACKAGE_VARIABLE}={own_version().package}"]
    if path:
        variables.append(f"PYTHONPATH={os.pathsep.join(map(os.path.abspath, path.split(os.pathsep)))}")
    successor = runtime_dir / SUCCESSOR_FILE
    write_private(successor, "\0".join(("env", *variables, *program, *running.arguments)))
    try:
        if process_table.identify(running.pid) != running.started_at:
            raise ProcessLookupError(f"serve, process {running.pid}, has ended")
        os.kill(running.pid, signal.SIGKILL)
    except OSError:
        successor.unlink(missing_ok=True)
        raise


def check_own_package(environ: MutableMapping[str, str], *, is_trial: bool) -> None:
    """Raise DeploymentError when this process takes over, and is not of the version that was asked for."""
    expected = environ.pop(PACKAGE_VARIABLE, "")
    if is_trial and expected != own_version().package:
        raise DeploymentError(
            f"{expected} is to take over, but this is {own_version().package}",
            hint="Run `dynaplan upgrade` from an environment in which the new version is installed.",
        )
