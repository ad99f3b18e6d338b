"""Clearing up after a holder that was killed, by the one process below it that sees this."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dynaplan import wiring
from dynaplan.domain.errors import UserError
from dynaplan.foundation.children.closing import remove
from dynaplan.supervisor.leftovers import clear_leftovers


def clear_up(paths: Sequence[str], holder_pid: int) -> None:
    """End what is left of the deployment, as the next ``serve`` would, and remove these; the statefile first.

    Does nothing when another ``serve`` has the namespace by now.
    """
    statefile = Path(paths[0])
    try:
        with wiring.box.namespace_lock(statefile, holder_pid):
            clear_leftovers(wiring.box.open_statefile(statefile), wiring.box.processes())
            remove(paths)
    except UserError:
        return
