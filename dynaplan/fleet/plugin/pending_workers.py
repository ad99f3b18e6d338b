"""The workers that wait for GPUs, and the lines that the user reads about them.

A service that lacks a worker for which no GPU is free is reported at once. A worker whose own GPU is not free
yet, most often because its last process has just ended, is logged, and reported when that takes long. Numbers
of gigabytes that change are no news.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass

from dynaplan.fleet.plugin.gpu_availability import NOT_READ

log = logging.getLogger(__name__)

REPORT_AFTER_S = 10.0
"""Time after which it is reported that a worker's own GPU is not free yet, in seconds."""

CHANGING = re.compile(r"\d+ of \d+ GB")


@dataclass
class _Pending:
    kind: str
    since_s: float
    is_reported: bool = False


class PendingWorkers:
    """Remembers what waits, why, and what was reported. ``reasons`` are by worker or service."""

    def __init__(self) -> None:
        self._pending: dict[str, _Pending] = {}
        self.reasons: dict[str, str] = {}

    def update(self, services: Mapping[str, str], workers: Mapping[str, str], now_s: float) -> list[str]:
        """Return the lines to report; ``services`` and ``workers`` are name -> why it waits."""
        self.reasons = {**services, **workers}
        self._pending = {name: self._updated(name, why, now_s) for name, why in self.reasons.items()}
        lines = []
        for name, why in self.reasons.items():
            wait = self._pending[name]
            is_due = name in services or now_s - wait.since_s >= REPORT_AFTER_S
            if not wait.is_reported and is_due and NOT_READ not in why:
                wait.is_reported = True
                which = f"{name}: a worker waits for its GPUs" if name in services else f"{name} waits"
                lines.append(f"{which}: {why}")
        return lines

    def overdue(self, now_s: float) -> frozenset[str]:
        """Return what waits for ``REPORT_AFTER_S`` or longer."""
        return frozenset(
            name for name, wait in self._pending.items() if now_s - wait.since_s >= REPORT_AFTER_S
        )

    def _updated(self, name: str, why: str, now_s: float) -> _Pending:
        kind = CHANGING.sub("", why)
        before = self._pending.get(name)
        if before is not None and before.kind == kind:
            return before
        if NOT_READ not in why:
            log.info("%s waits: %s", name, why)
        return _Pending(kind, now_s if before is None else before.since_s)
