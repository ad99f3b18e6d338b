"""The versions of dynaplan that a deployment's ``serve`` was of, in a private file beside its sockets."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import dynaplan
from dynaplan.fleet.runtime_dir import write_private
from dynaplan.graph.lifecycle import Role, Worker, WorkerState
from dynaplan.process import process_table

VERSION_FILE = "version.json"

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
class Takeover:
    """A version, and the start of its first ``serve``, in clock ticks since boot."""

    version: Version
    since: int


@dataclass(frozen=True)
class RunningServe:
    """The process of ``serve``, its start in clock ticks since boot, and all versions that it was of."""

    pid: int
    started_at: int
    takeovers: tuple[Takeover, ...]

    @property
    def version(self) -> Version:
        """The version of now."""
        return self.takeovers[-1].version

    def not_renewed(self, workers: Sequence[Worker]) -> list[Worker]:
        """Return the workers that another version has started, and that stay, in the order of renewal."""
        return in_order(each for each in workers if each.pid and self._of(each) != self.version)

    def older(self, workers: Sequence[Worker]) -> list[Worker]:
        """Return the workers that were started before this process, and stay, in the order of renewal."""
        return in_order(each for each in workers if each.pid and each.started_at < self.started_at)

    def _of(self, worker: Worker) -> Version:
        """Return the version that has started a worker: only ``serve`` and its plugin start any."""
        before = [each.version for each in self.takeovers if each.since <= worker.started_at]
        return before[-1] if before else self.takeovers[0].version


def in_order(workers: Iterable[Worker]) -> list[Worker]:
    """Return the workers that do not leave anyway, Frontends first, the planner last."""
    stays = [each for each in workers if each.state is not WorkerState.DRAINING]
    return sorted(stays, key=lambda each: FIRST.index(each.role) if each.role in FIRST else len(FIRST))


def own_version() -> Version:
    """Return the version of this process."""
    return Version(dynaplan.__version__, sys.executable, str(Path(dynaplan.__file__).resolve().parent))


def read_serve(runtime_dir: Path) -> RunningServe | None:
    """Return the ``serve`` that has last written down its version; None when there is nothing to read."""
    try:
        document = json.loads((runtime_dir / VERSION_FILE).read_text())
        takeovers = [
            Takeover(Version(**each["version"]), int(each["since"])) for each in document["takeovers"]
        ]
        found = RunningServe(int(document["pid"]), int(document["started_at"]), tuple(takeovers))
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return found if found.takeovers else None


def write_own(runtime_dir: Path) -> None:
    """Write down that this process is the ``serve`` of the deployment from now on."""
    me, own, before = process_table.identity_of(os.getpid()), own_version(), read_serve(runtime_dir)
    takeovers = before.takeovers if before else ()
    if not takeovers or takeovers[-1].version != own:
        takeovers = (*takeovers, Takeover(own, me.started_at))
    new = runtime_dir / f".{VERSION_FILE}"
    write_private(new, json.dumps(asdict(RunningServe(me.pid, me.started_at, takeovers))))
    new.replace(runtime_dir / VERSION_FILE)
