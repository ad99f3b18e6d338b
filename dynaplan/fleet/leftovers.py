"""Leftovers of an earlier deployment of the namespace: recognised for certain, and ended."""

from __future__ import annotations

import os

from dynaplan.fleet.ports import DocumentStore
from dynaplan.fleet.rules.statefile import Document, arbiter_of
from dynaplan.process.identity import ProcessIdentity
from dynaplan.process.ports import Processes
from dynaplan.util.errors import DeploymentError, StatefileCorrupt

TRACKERS_WITHIN_S = 3.0
"""Longest wait per session: Python's resource trackers remove the shared memory of killed engines."""


def clear_leftovers(
    store: DocumentStore, processes: Processes, own: ProcessIdentity | None = None
) -> list[str]:
    """End and remove what an earlier deployment left; return sentences for the user.

    Raises DeploymentError while its arbiter still runs, unless that is ``own``.
    """
    try:
        document = store.read()
    except StatefileCorrupt as error:
        return [f"The statefile of an earlier run is set aside as {store.set_aside()} ({error})."]
    if document is None:
        return []
    arbiter = arbiter_of(document)
    if arbiter and arbiter != own and processes.is_alive(arbiter):
        raise DeploymentError(
            f"namespace {document['namespace']} is already running here (pid {arbiter.pid})",
            hint="Stop it with `dynaplan stop`, or choose another one with --namespace.",
        )
    ended = end_leftovers(document, processes, own)
    store.remove()
    return ["An earlier run ended without cleaning up; that is done now.", *ended]


def end_leftovers(document: Document, processes: Processes, own: ProcessIdentity | None = None) -> list[str]:
    """End the processes that a dead arbiter's deployment left running; return one sentence per session.

    Does nothing while the arbiter lives, unless it is ``own``, after a reboot, or for entries without pid and
    start time: a process that cannot be recognised for certain is left alone. Embedded servers may stand
    beside the workers, under ``servers``, as name -> pid and started_at.
    """
    arbiter = arbiter_of(document)
    boot_id = processes.identity_of(os.getpid()).boot_id
    if arbiter is None or arbiter.boot_id != boot_id or (arbiter != own and processes.is_alive(arbiter)):
        return []
    ended = []
    entries = {**document.get("components", {}), **document.get("servers", {})}
    for name, entry in entries.items():
        pid, started_at = int(entry.get("pid", 0)), int(entry.get("started_at", 0))
        if not pid or not started_at:
            continue
        if members := processes.kill_group(pid, started_at, waits_s=TRACKERS_WITHIN_S):
            ended.append(
                f"killed {name} (session {pid}, {len(members)} processes), left by arbiter {arbiter.pid}"
            )
    return ended
