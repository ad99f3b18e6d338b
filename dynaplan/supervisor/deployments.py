"""Finding the running deployment, for the commands beside ``serve``. Reads only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dynaplan import wiring
from dynaplan.core.fleet.statefile import Document, arbiter_of, fleet_of
from dynaplan.domain.errors import DeploymentError, StatefileCorrupt
from dynaplan.domain.identity import ProcessIdentity
from dynaplan.domain.lifecycle import Worker
from dynaplan.supervisor.runtime_dir import CLIENTS_FILE


@dataclass(frozen=True)
class RunningDeployment:
    """A deployment whose arbiter runs; ``document`` is its statefile as it was when it was found."""

    statefile: Path
    document: Document
    arbiter: ProcessIdentity

    @property
    def namespace(self) -> str:
        """The deployment's name."""
        return str(self.document["namespace"])

    @property
    def circus_endpoint(self) -> str:
        """The endpoint at which circus takes commands."""
        return str(self.document["circus_endpoint"])

    @property
    def frontend_url(self) -> str:
        """The base address of the Frontends."""
        return str(self._addresses["frontend_url"])

    @property
    def runtime_dir(self) -> Path:
        """The deployment's private directory."""
        return Path(self._addresses["runtime_dir"])

    @property
    def log_dir(self) -> Path:
        """The directory of the workers' logs, ``{watcher name}.log``."""
        return Path(self._addresses["log_dir"])

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
    directory = wiring.statefile_path("any").parent
    paths = [wiring.statefile_path(namespace)] if namespace else sorted(directory.glob("*.json"))
    running = [found for path in paths if (found := _read(path))]
    if len(running) == 1:
        return running[0]
    if running:
        names = ", ".join(each.namespace for each in running)
        raise DeploymentError(
            f"several deployments are running: {names}", hint="Choose one with --namespace."
        )
    which = f"no deployment {namespace}" if namespace else "no deployment"
    others = [each.namespace for path in sorted(directory.glob("*.json")) if (each := _read(path))]
    hint = f"Running: {', '.join(others)}" if others else "Start one with `dynaplan serve GRAPH`"
    raise DeploymentError(
        f"{which} is running here ({directory})",
        hint=f"{hint}; DYN_LOCAL_STATE_DIR must be the same.{''.join(map(_torn, paths))}",
    )


def _torn(path: Path) -> str:
    """Return what to do about a statefile that cannot be read; empty for a good one, and for none."""
    if path.name.startswith("."):
        return ""  # what dynaplan notes there of its own, as the start-up times
    try:
        wiring.open_statefile(path).read()
    except StatefileCorrupt as error:
        return (
            f"\n  {error.args[0]}. A deployment that runs writes it anew at its next change, as by "
            "`dynaplan scale`; `dynaplan serve` sets it aside."
        )
    return ""


def tail(path: Path, lines: int) -> Iterator[str]:
    """Yield the last lines of a file; none when it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 400 * lines - 4096))
            yield from file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return


def _read(path: Path) -> RunningDeployment | None:
    """Return the deployment of a statefile; None when there is none, or its arbiter does not run."""
    try:
        document = wiring.open_statefile(path).read()
    except StatefileCorrupt:
        return None
    arbiter = arbiter_of(document) if document else None
    if document is None or arbiter is None or "addresses" not in document:
        return None
    return RunningDeployment(path, document, arbiter) if wiring.processes().is_alive(arbiter) else None
