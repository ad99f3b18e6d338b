"""Clearing up after a holder that was killed, by the one process below it that sees this."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dynaplan.fleet import local_host
from dynaplan.fleet.leftovers import clear_leftovers
from dynaplan.process import process_table
from dynaplan.process.closing import remove
from dynaplan.util.errors import UserError


def clear_up(paths: Sequence[str], holder_pid: int) -> None:
    """End what is left of the deployment, as the next ``serve`` would, and remove these; the statefile first.

    Does nothing when another ``serve`` has the namespace by now.
    """
    statefile = Path(paths[0])
    try:
        with local_host.namespace_lock(statefile, holder_pid):
            clear_leftovers(local_host.open_statefile(statefile), process_table)
            remove(paths)
    except UserError:
        return
