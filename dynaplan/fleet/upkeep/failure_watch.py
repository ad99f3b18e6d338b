"""The watch over services of which no worker can ever start: the user is told once, and may want an end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from dynaplan.fleet.rules.hopeless import cause, hopeless
from dynaplan.graph.lifecycle import Worker


class FailureWatch:
    """Says of every service without hope, once, why it is so and where its log is; then calls ``lost()``."""

    def __init__(
        self,
        workers: Callable[[], Iterable[Worker]],
        log_dir: Path,
        say: Callable[[str], None],
        lost: Callable[[], None],
    ) -> None:
        self._workers = workers
        self._log_dir = log_dir
        self._say = say
        self._lost = lost
        self._told: set[str] = set()

    async def look(self) -> None:
        """Look once at the workers as they are written down."""
        found = hopeless(self._workers())
        for component, worker in found.items():
            if component not in self._told:
                log = self._log_dir / f"{worker.name}.log"
                self._say(f"No {component} can start: {cause(worker)}\n    log: {log}")
        is_new = bool(found.keys() - self._told)
        self._told = set(found)
        if is_new:
            self._lost()
