"""Finding the running deployment, for the commands beside ``serve``. Reads only."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dynaplan.fleet.gpu_claims import live_claim_owners
from dynaplan.fleet.rules.statefile import Document, arbiter_of, fleet_of
from dynaplan.fleet.runtime_dir import CLIENTS_FILE
from dynaplan.fleet.statefile_store import StatefileStore, statefile_path
from dynaplan.graph.lifecycle import Worker
from dynaplan.process import process_table
from dynaplan.process.identity import ProcessIdentity
from dynaplan.process.port_holders import listening_process
from dynaplan.util.errors import DeploymentError, StatefileCorrupt


@dataclass(frozen=True)
class RunningDeployment:
    """A deployment whose arbiter runs; ``document`` is its statefile as it was when it was found."""

    statefile: Path
    document: Document
    arbiter: ProcessIdentity

    @property
    def namespace(self) -> str:
        return str(self.document["namespace"])

    @property
    def circus_endpoint(self) -> str:
        return str(self.document["circus_endpoint"])

    @property
    def frontend_url(self) -> str:
        return str(self._addresses["frontend_url"])

    @property
    def port(self) -> int:
        """The Frontends' port, which is held from before they listen."""
        return urlsplit(self.frontend_url).port or 0

    @property
    def runtime_dir(self) -> Path:
        """The directory, of mode 0700, with the sockets and tokens of this deployment."""
        return Path(self._addresses["runtime_dir"])

    @property
    def log_dir(self) -> Path:
        """The directory of the workers' logs, ``{watcher name}.log``."""
        return Path(self._addresses["log_dir"])

    @property
    def began_s(self) -> float:
        """The deployment's start, seconds since the epoch; a restarted ``serve`` keeps it."""
        return time.time() - process_table.age_s(self.arbiter.started_at)

    @property
    def workers(self) -> tuple[Worker, ...]:
        """The workers at the moment when the deployment was found."""
        return fleet_of(self.document)

    def environment(self) -> dict[str, str]:
        """Return a client's environment variables: addresses and tokens. Never to be printed.

        ``ETCD_ENDPOINTS``, ``NATS_SERVER``, ``NATS_AUTH_TOKEN``, ``DYNAPLAN_WORKER_TOKEN`` ...
        """
        try:
            return dict(json.loads((self.runtime_dir / CLIENTS_FILE).read_text()))
        except OSError as error:
            raise DeploymentError(
                f"cannot read {self.runtime_dir / CLIENTS_FILE}: {error.strerror}",
                hint="Run this as the user who started `dynaplan serve`.",
            ) from error

    @property
    def _addresses(self) -> dict[str, Any]:
        return dict(self.document["addresses"])


def find_deployment(namespace: str | None = None) -> RunningDeployment:
    """Return the deployment of that namespace, or the only one that runs; DeploymentError otherwise."""
    running = find_deployments(namespace)
    if len(running) == 1:
        return running[0]
    names = ", ".join(each.namespace for each in running)
    raise DeploymentError(f"several deployments are running: {names}", hint="Choose one with --namespace.")


def find_deployments(namespace: str | None = None) -> list[RunningDeployment]:
    """Return the deployment of that namespace, or all that run; DeploymentError when none does."""
    paths = statefiles(namespace)
    running = [found for path in paths if (found := _read(path))]
    if running:
        return running
    which = f"no deployment {namespace}" if namespace else "no deployment"
    others = [each.namespace for path in statefiles() if (each := _read(path))]
    hint = f"Running: {', '.join(others)}" if others else "Start one with `dynaplan serve GRAPH`"
    leads = [*map(_remains, paths), *_elsewhere()]
    raise DeploymentError(
        f"{which} is running here ({_state_dir()})",
        hint="\n  ".join([f"{hint}; DYN_LOCAL_STATE_DIR must be the same.", *filter(None, leads)]),
    )


def port_holder(port: int) -> str:
    """Return the holder of a TCP port in words: a deployment of dynaplan, listening or not yet, or a process.

    Empty when nobody is seen to listen there.
    """
    for each in filter(None, map(_read, statefiles())):
        if each.port == port:
            return f"pid {each.arbiter.pid} (dynaplan serve, namespace {each.namespace})"
    return listening_process(port)


def _state_dir() -> Path:
    return statefile_path(os.environ, "any").parent


def statefiles(namespace: str | None = None) -> list[Path]:
    """Return the path of that namespace's statefile, whether or not it exists; without one, all that exist.

    Files whose names begin with a dot are dynaplan's own notes, and left out.
    """
    if namespace:
        return [statefile_path(os.environ, namespace)]
    return [path for path in sorted(_state_dir().glob("*.json")) if not path.name.startswith(".")]


def _remains(path: Path) -> str:
    """Return a sentence about a statefile that is unreadable, or whose deployment has died, and what helps.

    Empty when there is no statefile, or one without an arbiter.
    """
    try:
        document = StatefileStore(path).read()
    except StatefileCorrupt as error:
        return (
            f"{error.args[0]}. A deployment that runs writes it anew at its next change, as by "
            "`dynaplan scale`; `dynaplan serve` sets it aside."
        )
    arbiter = arbiter_of(document) if document else None
    if document is None or arbiter is None:
        return ""
    return (
        f"{path} is left of a deployment {document['namespace']} that ended without cleaning up (serve was "
        f"pid {arbiter.pid}); `dynaplan serve` with that namespace cleans up."
    )


def _elsewhere() -> list[str]:
    """Return lines about deployments of this machine that have their statefiles elsewhere."""
    own = {each.arbiter.pid for each in filter(None, map(_read, statefiles()))}
    searched, lines = _state_dir(), []
    for pid, (which, state_dir) in live_claim_owners().items():
        is_elsewhere = state_dir is not None and state_dir != searched
        where = f"; DYN_LOCAL_STATE_DIR={state_dir} shows it" if is_elsewhere else ""
        lines += [] if pid in own else [f"There is {which} (serve pid {pid}){where}."]
    return lines


def tail(path: Path, lines: int) -> Iterator[str]:
    """Yield the last lines of a file; none when it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 400 * lines - 4096))
            last = file.read().decode(errors="replace").splitlines()
            yield from last[-lines:] if lines else ()
    except OSError:
        return


def _read(path: Path) -> RunningDeployment | None:
    """Return the deployment of a statefile; None when there is none, or its arbiter does not run."""
    try:
        document = StatefileStore(path).read()
    except StatefileCorrupt:
        return None
    arbiter = arbiter_of(document) if document else None
    if document is None or arbiter is None or "addresses" not in document:
        return None
    return RunningDeployment(path, document, arbiter) if process_table.is_alive(arbiter) else None
