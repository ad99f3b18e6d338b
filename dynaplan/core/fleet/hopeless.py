"""Services without hope: every worker that counts has failed, and none of them is tried again by itself."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dynaplan.domain.lifecycle import COUNTS, Worker, WorkerState

CAUSE = "can never start: "
"""The words before the cause in the line that a worker writes last into its log."""


def hopeless(workers: Iterable[Worker]) -> dict[str, Worker]:
    """Return the services of which no worker can ever start, with one of its workers: component -> worker."""
    counted = [worker for worker in workers if worker.state in COUNTS]
    return {
        worker.component: worker
        for worker in counted
        if all(_is_hopeless(each) for each in counted if each.component == worker.component)
    }


def cause(worker: Worker) -> str:
    """Return why a failed worker cannot start, in one line: the last that its log says, else its exit."""
    lines = [line.strip() for line in worker.reason.splitlines()] or ["no reason is known"]
    told = next((line.partition(CAUSE)[2] for line in reversed(lines) if CAUSE in line), lines[0])
    # An engine's own words follow; the last of them are its conclusion.
    return f"{told.partition('; its last lines')[0]}: {lines[-1]}" if told.endswith(":") else told


def published(workers: Iterable[Worker]) -> dict[str, Any]:
    """Return the part of the fleet's published document that says why requests cannot be answered."""
    return {
        "hopeless": {
            component: f"{component} cannot start: {cause(worker)}; see `dynaplan logs {worker.name}`"
            for component, worker in hopeless(workers).items()
        }
    }


def _is_hopeless(worker: Worker) -> bool:
    return worker.state is WorkerState.FAILED and not worker.retry_at_s
